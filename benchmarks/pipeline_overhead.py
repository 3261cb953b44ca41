# SPDX-License-Identifier: Apache-2.0
"""Measure a step of one rank against a loop over the same microbatches by hand.

What is left is the cost of the runner itself: cutting the batch, the way between C++
and the module, the loss and its backward. Small: a 64 x 64 Linear, 8 samples in each
microbatch; large: the same with a forward that takes 20 ms.

    python benchmarks/pipeline_overhead.py --json pipeline_overhead.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from _report import Figure, arguments, finish
from torch import nn

from torch_sm3.pipeline import PipelineRunner, Stage, plan

WIDTH, SAMPLES, MICROBATCHES = 64, 8, 8
LIMITS = {"small": 1.25, "large": 1.02}


class Sleepy(nn.Module):
    """A Linear whose forward takes a given time at least."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer."""
        if self.seconds:
            time.sleep(self.seconds)
        output: torch.Tensor = self.linear(x)
        return output


def by_hand(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    """Train on one microbatch after the other."""
    for a, b in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
        loss = nn.functional.mse_loss(module(a), b)
        (loss / MICROBATCHES).backward()


def measure(seconds: float, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each step of both, taken in turns."""
    torch.manual_seed(0)
    module = Sleepy(seconds)
    x, y = torch.randn(2, MICROBATCHES * SAMPLES, WIDTH)
    runner = PipelineRunner(
        [Stage(module, 0)],
        plan("none", 1, MICROBATCHES),
        loss_fn=nn.functional.mse_loss,
    )

    def step() -> None:
        runner.step(x, target=y)

    def loop() -> None:
        by_hand(module, x, y)

    calls: dict[str, Callable[[], None]] = {"runner": step, "loop": loop}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 5):
        for name, call in calls.items():
            module.zero_grad()
            start = time.perf_counter()
            call()
            if repeat >= 5:
                times[name].append(time.perf_counter() - start)
    runner.close()
    return times


def main() -> None:
    """Parse the command line, measure, print the figures and write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    quick = options.quick
    found = {
        "small": measure(0.0, 50 if quick else 500),
        "large": measure(0.02, 3 if quick else 20),
    }
    medians = {
        name: {way: statistics.median(values) for way, values in times.items()}
        for name, times in found.items()
    }
    figures = [
        Figure(
            f"step of one rank, {name}, runner / loop",
            median["runner"] / median["loop"],
            LIMITS[name],
        )
        for name, median in medians.items()
    ]
    finish(figures, options, {"median_seconds": medians})


if __name__ == "__main__":
    main()
