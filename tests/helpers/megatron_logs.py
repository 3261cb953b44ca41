# SPDX-License-Identifier: Apache-2.0
"""What a rank logs of steps that a test makes up."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from helpers import megatron_ranks as ranks
from helpers.megatron_ranks import Case

import torch_sm3.megatron as plug


class Writer:
    """Records what would go to TensorBoard."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: Any, step: int) -> None:
        self.scalars.append((name, round(float(value), 6), step))

    def add_text(self, name: str, text: str) -> None:
        pass


class Step(NamedTuple):
    """A step that has been done.

    Attributes:
        losses: by name.
        skipped: whether weights stayed.
    """

    losses: dict[str, float]
    skipped: int = 0


def logged(
    rank: int,
    size: int,
    generation: str,
    strict: bool | None,
    steps: list[Step],
    options: dict[str, Any],
) -> tuple[list[str], list[tuple[str, float, int]]]:
    """Log steps; return lines without times, and scalars that are no times.

    Args:
        rank: the rank.
        size: number of ranks.
        generation: a letter.
        strict: ``strict_log`` of the plug; None to leave it out.
        steps: what to log.
        options: of Megatron.
    """
    megatron = ranks.load(generation)
    writer = Writer()
    case = Case(1, 2)
    args = ranks.initialize(megatron, case, writer, train_iters=8, **options)
    home = ranks.module("training")
    if strict is not None:
        plug.install(megatron, schedule="auto", optimizer=None, strict_log=strict)
    try:
        with ranks.Lines() as lines:
            _log(generation, args, home, steps)
    finally:
        plug.restore()
    kept = [s for s in writer.scalars if not s[0].endswith("-time")]
    times = [s for s in writer.scalars if s[0] == "iteration-time"]
    wanted = args.log_interval if generation == "a" else 0
    assert len(times) == (len(steps) // wanted if wanted else 0)
    return lines.lines, kept


def _log(generation: str, args: Any, home: Any, steps: list[Step]) -> None:
    timers = ranks.module("global_vars").get_timers()
    if generation == "d":
        timers("interval-time", log_level=0).start()
    else:
        timers("interval time" if generation == "a" else "interval-time").start()
    total: dict[str, Any] = {}
    report = True
    for number, step in enumerate(steps, start=1):
        args.consumed_train_samples += 4
        losses = {key: torch.tensor([value]) for key, value in step.losses.items()}
        norms = [1.25, 2.5, 3.0] if generation != "a" else []
        if norms and step.skipped:
            norms = [None, 2.5, None]
        given = losses, total, 0.01, number, 4096.0, report, step.skipped, *norms
        report = home.training_log(*given)


def overflows(
    rank: int, size: int, generation: str, plugged: bool
) -> tuple[list[str], list[Any], list[float]]:
    """Train in fp16 with a loss scale that is too high at first.

    Returns:
        Lines, the weights, and the learning rate after each step.
    """
    megatron = ranks.load(generation)
    case = Case(size, 2)
    ranks.initialize(
        megatron, case, fp16=True, initial_loss_scale=2.0**24, train_iters=12
    )
    if plugged:
        plug.install(megatron, **ranks.PLUG)
    try:
        with ranks.Lines() as lines:
            built = ranks.build(generation, case)
            step = ranks.user_step(ranks.Events(), generation, case)
            ranks.train(generation, step, built, case, 0)
    finally:
        plug.restore()
    return lines.lines, ranks.parameters(built[0]), [built[1].param_groups[0]["lr"]]
