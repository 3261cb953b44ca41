# SPDX-License-Identifier: Apache-2.0
"""Measure what tracing costs a pipeline whose actions take 5 ms.

Two Gloo ranks run the same 1F1B step with and without ``trace=True``, in turn.

    python benchmarks/pipeline_trace.py --check
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from _ranks import alternate, ratio, run, spread
from _report import Figure, arguments, finish
from torch import nn

from torch_sm3.pipeline import PipelineRunner, Stage, plan

RANKS, MICROBATCHES, WIDTH = 2, 8, 64


class _Nap(torch.autograd.Function):
    """Sleeps in the forward and in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        """Sleep and return a copy."""
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Sleep and return the gradient."""
        time.sleep(ctx.seconds)
        return gradients[0], None


class Slow(nn.Module):
    """A Linear that takes a time of its own."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the Linear, then sleep."""
        out: torch.Tensor = _Nap.apply(self.body(x), self.seconds)
        return out


def measure(seconds: float, repeats: int) -> tuple[float, dict[str, list[float]]]:
    """Return traced over untraced, and the quartiles of both in milliseconds."""
    rank = dist.get_rank()
    x, y = torch.randn(2, 4 * MICROBATCHES, WIDTH)
    runners = {
        name: PipelineRunner(
            [Stage(Slow(seconds), rank)],
            plan("1f1b", RANKS, MICROBATCHES),
            loss_fn=nn.functional.mse_loss,
            trace=name == "traced",
        )
        for name in ("plain", "traced")
    }

    def step(runner: PipelineRunner) -> Callable[[], object]:
        return lambda: runner.step(x, target=y)

    times = alternate({name: step(r) for name, r in runners.items()}, repeats)
    for runner in runners.values():
        runner.close()
    return ratio(times, "traced", "plain"), spread(times)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    arguments(parser)
    parser.add_argument("--seconds", type=float, default=0.005, help="of an action")
    options = parser.parse_args()
    value, times = run(RANKS, measure, options.seconds, 10 if options.quick else 40)
    figures = [Figure("traced over untraced step", value, limit=1.03)]
    finish(figures, options, {"quartiles_ms": times})


if __name__ == "__main__":
    main()
