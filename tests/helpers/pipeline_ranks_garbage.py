# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of what a step leaves behind."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from helpers.pipeline_chain import batches, chain, own_stages, runner_of, squared
from torch import Tensor

from torch_sm3.pipeline import PipelineError, PipelineRunner, plan

M = 4


def _counted(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
    loss = (output - target).square().sum()
    return loss, torch.tensor(float(len(target))), {"seen": loss.detach()}


class _Watch:
    """Weak references to what a step meets on this rank."""

    def __init__(self) -> None:
        self._seen: list[tuple[str, weakref.ref[Any]]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        self._seen.append((name, weakref.ref(tensor)))

    def left(self) -> list[str]:
        """Return the names of what is still there, and forget all."""
        seen, self._seen = self._seen, []
        return sorted({name for name, ref in seen if ref() is not None})

    @property
    def count(self) -> int:
        return len(self._seen)


def left_behind(rank: int, ranks: int, case: str) -> list[str]:
    """Step without a garbage collector; return what outlives its step.

    Args:
        rank: this rank.
        ranks: their number.
        case: what the step uses.
    """
    watch, options = _Watch(), dict[str, Any]()
    if case in ("samples", "tokens"):
        options["loss_reduction"] = case
    if case in ("deterministic", "trace"):
        options[case] = True
    due = [False]

    def loss_fn(output: Tensor, target: Tensor) -> Any:
        if due[0]:
            raise LookupError("no loss")
        found = (_counted if case == "tokens" else squared)(output, target)
        watch.add("loss", found[0] if isinstance(found, tuple) else found)
        return found

    kind = "zb_h1" if case == "split" else "1f1b"
    schedule = plan(kind, ranks, M)
    modules = chain(ranks)
    for stage in own_stages(schedule, rank):
        modules[stage].register_forward_hook(lambda *a: watch.add("output", a[-1]))
    runner = runner_of(modules, schedule, rank, loss_fn=loss_fn, **options)
    optimizer = torch.optim.SGD(modules[rank].parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", 2.0) if case == "scaler" else None
    wrong = []
    gc.collect()
    gc.disable()
    try:
        for number in range(3):
            due[0] = case == "raise" and number == 1
            short = case == "arguments" and number == 1
            _step(runner, case, watch, scaler, M - short)
            if case == "later":
                runner.optimizer_step(optimizer, max_norm=1.0, post_validate=True)
            assert short or watch.count > M, "nothing was watched"
            wrong += [f"{name} of step {number}" for name in watch.left()]
        runner.close()
    finally:
        gc.enable()
    return wrong


def _step(
    runner: PipelineRunner, case: str, watch: _Watch, scaler: Any, count: int
) -> None:
    """Step once, and hold nothing of it."""
    items, targets = batches([2] * count)
    for name, many in (("input", items), ("target", targets)):
        for tensor in many:
            watch.add(name, tensor)
    call: Callable[..., Any] = runner.step
    if case == "eval":
        call = runner.eval
    if scaler is not None:
        call(microbatches=items, targets=targets, scaler=scaler)
    elif case == "iterator":
        call(iterator=zip(items, targets, strict=True))
    elif case == "outputs":
        call(microbatches=items, targets=targets, return_outputs=True)
    elif case == "whole":
        whole = torch.cat(items), torch.cat(targets)
        watch.add("input", whole[0])
        watch.add("target", whole[1])
        call(whole[0], target=whole[1])
    else:
        try:
            call(microbatches=items, targets=targets)
        except (PipelineError, ValueError) as error:
            assert (case, type(error)) in (
                ("raise", PipelineError),
                ("arguments", ValueError),
            )
