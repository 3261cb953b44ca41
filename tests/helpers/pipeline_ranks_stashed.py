# SPDX-License-Identifier: Apache-2.0
"""Runs whose ranks count their bytes, beside what the verifier says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from helpers.pipeline_chain import own_stages, squared
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torch_sm3 import reversible
from torch_sm3.pipeline import (
    PipelineRunner,
    Schedule,
    Stage,
    live_bytes,
    plan,
    profile,
)
from torch_sm3.pipeline.trace import Trace

ROWS, WIDTH = 16, 8
UNIT = 4 * ROWS * WIDTH


class Checkpointed(nn.Module):
    """Recomputes two layers."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)
        )
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        """Keep the input only."""
        return checkpoint(self.body, x, use_reentrant=self.reentrant)


class Reversible(nn.Module):
    """Keeps the last pair of two couplings."""

    def __init__(self) -> None:
        super().__init__()
        half = WIDTH // 2
        self.blocks = reversible.ReversibleSequence(
            *(
                reversible.AdditiveCoupling(
                    nn.Linear(half, half), nn.Linear(half, half)
                )
                for _ in range(2)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        """Split the features, and join them again."""
        return torch.cat(self.blocks(*x.chunk(2, -1)), -1)


class Pair(nn.Module):
    """Returns what a reversible block keeps, and takes such a pair."""

    def __init__(self) -> None:
        super().__init__()
        half = WIDTH // 2
        self.blocks = reversible.ReversibleSequence(
            reversible.AdditiveCoupling(nn.Linear(half, half), nn.Linear(half, half))
        )

    def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return the streams apart."""
        first, second = x.chunk(2, -1) if y is None else (x, y)
        return tuple(self.blocks(first, second))


class Join(nn.Module):
    """Joins two streams."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Run a layer on both."""
        return self.body(torch.cat([x, y], -1))


class Twice(nn.Module):
    """Uses one weight twice on one path."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Multiply twice."""
        return x @ self.weight @ self.weight


def linear() -> nn.Module:
    """Return a layer that keeps its input."""
    return nn.Linear(WIDTH, WIDTH)


# Each makes the stages of a model; the last one ends in the loss.
MODELS: dict[str, Callable[[int], list[nn.Module]]] = {
    "linear": lambda n: [linear() for _ in range(n)],
    "relu": lambda n: [nn.Sequential(linear(), nn.ReLU()) for _ in range(n)],
    "tanh": lambda n: [
        nn.Sequential(nn.LayerNorm(WIDTH), linear(), nn.Tanh(), linear(), nn.Tanh())
        for _ in range(n)
    ],
    "twice": lambda n: [Twice() for _ in range(n)],
    "checkpoint": lambda n: [Checkpointed(i % 2 == 1) for i in range(n)],
    "reversible": lambda n: [Reversible() for _ in range(n)],
    "pairs": lambda n: [*(Pair() for _ in range(n - 1)), Join()],
}

KINDS: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "gpipe": {},
    "zb_h1": {},
    "zbv": {},
    "interleaved": {"chunks": 2},
}


def counted(
    model: str, schedule: Schedule, rank: int, steps: int = 2, max_pending: int = 2
) -> list[str]:
    """Run a model and return where a rank's count is not the verifier's.

    Args:
        model: one of ``MODELS``.
        schedule: what to run.
        rank: this rank.
        steps: how many; the first one makes the gradients.
        max_pending: of the runner.
    """
    torch.manual_seed(0)
    modules = MODELS[model](schedule.stages)
    items = [torch.randn(ROWS, WIDTH) for _ in range(schedule.microbatches)]
    targets = [torch.randn(ROWS, WIDTH) for _ in range(schedule.microbatches)]
    costs = profile(
        [Stage(module, s) for s, module in enumerate(modules)],
        items[0],
        target=targets[0],
        loss_fn=squared,
        repeats=1,
        warmup=0,
    )
    runner = PipelineRunner(
        [Stage(modules[s], s) for s in own_stages(schedule, rank)],
        schedule,
        loss_fn=squared,
        timeout=60,
        trace=True,
        max_pending=max_pending,
    )
    for _ in range(steps):
        runner.step(microbatches=items, targets=targets)
    trace = runner._session.trace(everywhere=True)
    assert isinstance(trace, Trace)
    said = [
        b - sum(costs.static_bytes[s] for s in own_stages(schedule, rank))
        for b in live_bytes(trace.schedule, rank, costs, max_pending=max_pending)
    ]
    wrong = []
    for stamps in trace.steps[rank]:
        for action, got, want in zip(
            trace.schedule.actions(rank), stamps.live, said, strict=True
        ):
            if got != want:
                wrong.append(
                    f"{model} {schedule.kind} step {stamps.step} rank {rank} after "
                    f"{action.text}: counted {got / UNIT}, predicted {want / UNIT}"
                )
    if not any(stamps.live[0] for stamps in trace.steps[rank]):
        wrong.append(f"{model} {schedule.kind}: nothing was counted")
    runner.close()
    return wrong


def all_kinds(rank: int, ranks: int, models: list[str]) -> list[str]:
    """Count all kinds with some models."""
    wrong = []
    for kind, options in KINDS.items():
        schedule = plan(kind, ranks, 2 * ranks, **options)
        for model in models:
            wrong += counted(model, schedule, rank)
    return wrong
