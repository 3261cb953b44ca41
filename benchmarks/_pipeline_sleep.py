# SPDX-License-Identifier: Apache-2.0
"""Pipelines whose stages sleep instead of computing, one process per rank."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from _ranks import run
from torch import nn

from torch_sm3.pipeline import PipelineRunner, Stage, plan

STEPS = 5
WARM_UP = 2


class Pause(torch.autograd.Function):
    """Pass a tensor on; sleep on the way and on the way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float, back: float) -> torch.Tensor:
        """Sleep and return a copy."""
        ctx.back = back
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Sleep and return the gradient."""
        time.sleep(ctx.back)
        return gradient, None, None


class Sleeper(nn.Module):
    """Take given times for forward, input gradient and weight gradient.

    The weight is that of a layer, whose backward the runner cuts in two. The first
    stage of a pipeline has no input gradient and saves that time.
    """

    def __init__(self, forward: float, backward: float, weight: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))
        self.seconds = forward, backward, weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input times the weight, after a while."""
        forward, backward, weight = self.seconds
        held = Pause.apply(self.weight, 0.0, weight)
        return nn.functional.linear(Pause.apply(x, forward, backward), held)


def _steps(kind: str, m: int, chunks: int, seconds: tuple[float, ...]) -> float:
    """Return the median time of a step of the slowest rank."""
    rank, p = dist.get_rank(), dist.get_world_size()
    schedule = plan(kind, p, m, chunks=chunks)
    own = [s for s, place in enumerate(schedule.placement) if place == rank]
    forward, backward, weight = (cost / chunks for cost in seconds)
    stages = [Stage(Sleeper(forward, backward, weight), index=s) for s in own]
    runner = PipelineRunner(stages, schedule, loss_fn=nn.functional.mse_loss)
    times = []
    for _ in range(WARM_UP + STEPS):
        dist.barrier()
        start = time.perf_counter()
        runner.step(torch.zeros(m, 4), target=torch.zeros(m, 4))
        taken = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        times.append(float(taken))
    runner.close()
    return statistics.median(times[WARM_UP:])


def makespan(
    kind: str, p: int, m: int, chunks: int, seconds: tuple[float, ...]
) -> float:
    """Measure a step of p processes over Gloo.

    Args:
        kind: kind of the plan.
        p: number of ranks.
        m: number of microbatches.
        chunks: stages per rank.
        seconds: F, I and W of a rank.
    """
    return float(run(p, _steps, kind, m, chunks, seconds))
