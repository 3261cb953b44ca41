# SPDX-License-Identifier: Apache-2.0
"""Measure what stays in flight on a pipeline whose stages recompute.

Four Gloo ranks run the same 1F1B step of eight microbatches. Each stage is a chain of
couplings, once stored, once reversible. Bytes are those that the runner counts, tensor
by tensor; beside them stand those of torch's allocator.

    python benchmarks/pipeline_reversible.py --check
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from _meter import bytes_of
from _ranks import run
from _report import Figure, arguments, finish
from torch import Tensor, nn

from torch_sm3.pipeline import Costs, PipelineRunner, Stage, plan, profile, verify
from torch_sm3.reversible import AdditiveCoupling, ReversibleSequence

RANKS, MICROBATCHES, MAX_PENDING = 4, 8, 2


def mlp(width: int) -> nn.Module:
    """Return a pre-norm MLP of expansion 4."""
    return nn.Sequential(
        nn.LayerNorm(width),
        nn.Linear(width, 4 * width),
        nn.GELU(),
        nn.Linear(4 * width, width),
    )


class Chain(nn.Module):
    """Couplings of two streams, stored or reversible, on the same weights."""

    def __init__(self, width: int, blocks: int, reversible: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            AdditiveCoupling(mlp(width), mlp(width)) for _ in range(blocks)
        )
        self.sequence = ReversibleSequence(*self.blocks) if reversible else None

    def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Run all of them."""
        if self.sequence is not None:
            first, second = self.sequence(first, second)
            return first, second
        for block in self.blocks:
            first, second = block(first, second)
        return first, second


def loss_of(output: Sequence[Tensor], target: Tensor) -> Tensor:
    """Return the mean squared error of the streams' mean."""
    return nn.functional.mse_loss((output[0] + output[1]) / 2, target)


def peaks(width: int, rows: int, blocks: int, reversible: bool) -> dict[str, Any]:
    """Return peaks of one way, of all ranks as counted and of rank 0 as allocated."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    schedule = plan("1f1b", RANKS, MICROBATCHES)
    runner = PipelineRunner(
        [Stage(Chain(width, blocks, reversible), rank)],
        schedule,
        loss_fn=loss_of,
        max_pending=MAX_PENDING,
        trace=True,
    )
    items = [tuple(torch.randn(2, rows, width)) for _ in range(MICROBATCHES)]
    targets = [torch.randn(rows, width) for _ in range(MICROBATCHES)]

    def step() -> None:
        runner.step(microbatches=items, targets=targets)

    step()  # makes the gradients of the weights
    allocated = bytes_of(step).peak
    said = runner.report()
    runner.close()
    return {"counted": [x.peak_bytes for x in said.measured], "allocated": allocated}


def costs_of(width: int, rows: int, blocks: int, reversible: bool) -> Costs:
    """Profile all stages of a way."""
    return profile(
        [Stage(Chain(width, blocks, reversible), s) for s in range(RANKS)],
        tuple(torch.randn(2, rows, width)),
        target=torch.randn(rows, width),
        loss_fn=loss_of,
        repeats=1,
        warmup=0,
    )


def measure(width: int, rows: int, blocks: int) -> dict[str, Any]:
    """Return the peaks of both ways, and what they are to be compared with."""
    both = {
        name: peaks(width, rows, blocks, name == "reversible")
        for name in ("stored", "reversible")
    }
    if dist.get_rank() > 0:
        return {}
    # A stage in the middle: its input is not the caller's.
    one = costs_of(width, rows, 1, reversible=False).activation_bytes
    assert isinstance(one, tuple)
    costs = costs_of(width, rows, blocks, reversible=True)
    predicted = verify(
        plan("1f1b", RANKS, MICROBATCHES), max_pending=MAX_PENDING, memory=costs
    ).peak_bytes
    assert isinstance(costs.static_bytes, tuple) and isinstance(
        costs.boundary_bytes, tuple
    )
    return {
        **both,
        "one_block": one[1],
        "boundary": costs.boundary_bytes[0],
        "predicted": [
            a - b for a, b in zip(predicted, costs.static_bytes, strict=True)
        ],
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    arguments(parser)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--rows", type=int, default=1024, help="of a microbatch")
    parser.add_argument("--blocks", type=int, default=8, help="of a stage")
    options = parser.parse_args()
    rows = 256 if options.quick else options.rows
    found = run(RANKS, measure, options.width, rows, options.blocks)
    stored, ours = found["stored"], found["reversible"]
    in_flight = RANKS  # of rank 0 in 1F1B
    bound = found["boundary"] * in_flight + 1.2 * found["one_block"]
    figures = [
        Figure(
            "activation peak of rank 0, reversible over stored",
            ours["counted"][0] / stored["counted"][0],
            limit=0.5,
        ),
        Figure(
            "the same over boundaries in flight and 1.2 blocks",
            ours["counted"][0] / bound,
            limit=1.0,
        ),
        Figure(
            "allocated peak of rank 0, reversible over stored",
            ours["allocated"] / stored["allocated"],
        ),
        Figure(
            "predicted over counted peak of rank 0, reversible",
            found["predicted"][0] / ours["counted"][0],
        ),
    ]
    finish(figures, options, found)


if __name__ == "__main__":
    main()
