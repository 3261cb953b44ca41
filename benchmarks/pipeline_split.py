# SPDX-License-Identifier: Apache-2.0
"""Measure what it costs to run a backward in two parts.

One process runs the forwards of a stage and then either full backwards or, in turn,
those of its inputs and of its weights, as a rank of a zero-bubble schedule does. Times
are those of the actions alone, as the runner's trace tells them. Beside them stand the
page faults of a step: what glibc gives back to the kernel between two actions has to be
faulted in again, and that depends on the order in which memory is released.

    python benchmarks/pipeline_split.py --check
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from _report import Figure, arguments, finish
from torch import nn

from torch_sm3.pipeline import PipelineRunner, Schedule, Stage
from torch_sm3.pipeline.trace import load_trace

MICROBATCHES, ROWS = 4, 512


def schedule_of(backward: Sequence[str]) -> Schedule:
    """Return a middle stage between one that gives and one that takes.

    Args:
        backward: operations of each backward of the middle stage.
    """
    cells = [f"{s}F{i}" for i in range(MICROBATCHES) for s in range(3)]
    for i in range(MICROBATCHES):
        cells += [f"2B{i}", *(f"1{op}{i}" for op in backward), f"0B{i}"]
    return Schedule.parse(
        f"schedule 1 kind=split ranks=1 stages=3 microbatches={MICROBATCHES} "
        f"placement=0,0,0\nrank 0: {' '.join(cells)}"
    )


def blocks(width: int, depth: int) -> nn.Module:
    """Return pre-norm MLPs of expansion 4."""
    return nn.Sequential(
        *(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.GELU(),
                nn.Linear(4 * width, width),
            )
            for _ in range(depth)
        )
    )


class Scale(nn.Module):
    """A stage that does next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale."""
        return x * self.weight


def faults() -> int:
    """Return the page faults of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def measure(width: int, depth: int, repeats: int) -> tuple[float, list[float]]:
    """Return I + W over B of one stage, and the page faults of a step of both.

    The ratio is the median over alternated steps.
    """
    torch.manual_seed(0)
    items = [torch.randn(ROWS, width) for _ in range(MICROBATCHES)]
    stages = [Stage(Scale(), 0), Stage(blocks(width, depth), 1), Stage(Scale(), 2)]
    runners = [
        PipelineRunner(
            stages, schedule_of(ops), loss_fn=nn.functional.mse_loss, trace=True
        )
        for ops in ("B", "IW")
    ]
    ratios = []
    faulted = [0.0, 0.0]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        for _ in range(repeats):
            seconds = []
            for way, runner in enumerate(runners):
                before = faults()
                # A trace keeps the latest eight steps.
                for _ in range(8):
                    runner.step(microbatches=items, targets=items)
                faulted[way] += (faults() - before) / (8 * repeats)
                runner.save_trace(path)
                costs = load_trace(path)
                assert isinstance(costs.I, tuple) and isinstance(costs.W, tuple)
                whole = costs.B[1] if isinstance(costs.B, tuple) else 0.0
                seconds.append((whole, costs.I[1] + costs.W[1]))
            ratios.append(seconds[1][1] / seconds[0][0])
    for runner in runners:
        runner.close()
    return statistics.median(ratios), faulted


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    arguments(parser)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--depth", type=int, default=2, help="MLPs of the stage")
    options = parser.parse_args()
    torch.set_num_threads(1)
    widths = options.widths[:2] if options.quick else options.widths
    figures, faulted = [], {}
    for width in widths:
        ratio, both = measure(width, options.depth, 3 if options.quick else 9)
        figures.append(Figure(f"I + W over B, width {width}", ratio, limit=1.1))
        faulted[str(width)] = dict(zip(("B", "I and W"), both, strict=True))
    shape = {"rows": ROWS, "depth": options.depth}
    finish(figures, options, {**shape, "page_faults_of_a_step": faulted})


if __name__ == "__main__":
    main()
