# SPDX-License-Identifier: Apache-2.0
"""A chain of small stages on any ranks, and the run of one process that it equals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torch_sm3.pipeline import PipelineRunner, Schedule, Stage

WIDTH = 6


def chain(count: int, dropout: float = 0.0) -> list[nn.Module]:
    """Return stages of equal bits each time, whatever their number before one."""
    stages: list[nn.Module] = []
    for index in range(count):
        generator = torch.Generator().manual_seed(100 + index)
        linear = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            for parameter in linear.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
        stages.append(nn.Sequential(linear, nn.Tanh(), nn.Dropout(dropout)))
    return stages


def batches(sizes: Sequence[int], seed: int = 5) -> tuple[list[Tensor], list[Tensor]]:
    """Return inputs and targets of microbatches of the given sizes."""
    generator = torch.Generator().manual_seed(seed)

    def draw(size: int) -> Tensor:
        return torch.randn(size, WIDTH, generator=generator)

    return [draw(n) for n in sizes], [draw(n) for n in sizes]


def squared(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean squared error."""
    return (output - target).square().mean()


def looped(placement: Sequence[int], m: int) -> Schedule:
    """Return the schedule that runs stage after stage forward, then backward."""
    ranks = max(placement) + 1
    lines = [
        f"schedule 1 kind=looped ranks={ranks} stages={len(placement)} "
        f"microbatches={m} placement={','.join(map(str, placement))}"
    ]
    for rank in range(ranks):
        own = [s for s, place in enumerate(placement) if place == rank]
        cells = [f"{s}F{i}" for s in own for i in range(m)]
        cells += [f"{s}B{i}" for s in reversed(own) for i in range(m)]
        lines.append(f"rank {rank}: " + " ".join(cells))
    return Schedule.parse("\n".join(lines))


def runner_of(
    modules: Sequence[nn.Module],
    schedule: Schedule,
    rank: int,
    stage_options: dict[int, dict[str, Any]] | None = None,
    **options: Any,
) -> PipelineRunner:
    """Make the runner of a rank, with the stages that the schedule gives it."""
    given = stage_options or {}
    stages = [
        Stage(modules[s], s, **given.get(s, {}))
        for s, place in enumerate(schedule.placement)
        if place == rank
    ]
    return PipelineRunner(
        stages, schedule, **{"loss_fn": squared, "timeout": 30, **options}
    )


def accumulate(
    modules: Sequence[nn.Module],
    items: Sequence[Any],
    targets: Sequence[Any],
    weights: Sequence[float],
    loss_fn: Callable[[Any, Any], Tensor] = squared,
) -> list[Tensor]:
    """Add up gradients in one process with plain autograd; return the losses."""
    losses = []
    for item, target, weight in zip(items, targets, weights, strict=True):
        value = item
        for module in modules:
            value = module(value)
        loss = loss_fn(value, target)
        (loss * weight).backward()
        losses.append(loss.detach())
    return losses


def differing(
    modules: Sequence[nn.Module], others: Sequence[nn.Module], own: Sequence[int]
) -> list[str]:
    """Return the stages and names whose gradients differ in a bit."""
    wrong = []
    for stage in own:
        pairs = zip(
            modules[stage].named_parameters(), others[stage].parameters(), strict=True
        )
        for (name, mine), other in pairs:
            same = (mine.grad is None) == (other.grad is None) and (
                mine.grad is None or torch.equal(mine.grad, other.grad)
            )
            if not same:
                wrong.append(f"stage {stage} {name}")
    return wrong


def own_stages(schedule: Schedule, rank: int) -> list[int]:
    """Return the stages of a rank."""
    return [s for s, place in enumerate(schedule.placement) if place == rank]
