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


class Clock:
    """Sleeps so that times are right on average: the system wakes sleepers late."""

    def __init__(self) -> None:
        self._late = 0.0

    def sleep(self, seconds: float, since: float) -> None:
        """Sleep until some seconds after a moment, less what earlier calls overslept.

        Args:
            seconds: what the whole is to take.
            since: when it began, by :func:`time.perf_counter`.
        """
        end = since + seconds - self._late
        time.sleep(max(0.0, end - time.perf_counter()))
        self._late = time.perf_counter() - end


_CLOCK = Clock()


class Pause(torch.autograd.Function):
    """Pass a tensor on; sleep on the way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, back: float) -> torch.Tensor:
        """Return a copy."""
        ctx.back = back
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Sleep and return the gradient."""
        _CLOCK.sleep(ctx.back, time.perf_counter())
        return gradient, None


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
        start = time.perf_counter()
        forward, backward, weight = self.seconds
        held = Pause.apply(self.weight, weight)
        output = nn.functional.linear(Pause.apply(x, backward), held)
        _CLOCK.sleep(forward, start)
        return output


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
