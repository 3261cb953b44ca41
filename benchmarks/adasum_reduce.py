# SPDX-License-Identifier: Apache-2.0
"""Time of ``adasum_all_reduce`` against ``dist.all_reduce`` over Gloo, in one run.

Starts its own processes, one compute thread each. Rounds of the two alternate;
medians and quartiles go to JSON. Between two ranks a third way takes its turn, which
says what is left to gain: for float32 the bare messages of the bucket, for a bfloat16
wire an ``all_reduce`` between two conversions, as DDP's ``bf16_compress_hook`` has it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import _ranks
import _report
import torch
import torch.distributed as dist

import torch_sm3

MB = 1_000_000
SIZES = [64 << 10, 256 << 10, MB, 8 * MB, 32 * MB, 128 * MB]
# What a ratio may be at most, by number of ranks, then bytes.
LIMITS = {
    2: {MB: 2.0, 8 * MB: 1.2, 32 * MB: 1.2, 128 * MB: 1.2},
    4: {MB: 3.0, 8 * MB: 2.0, 32 * MB: 2.0, 128 * MB: 2.0},
}
WIRE_RANKS = 2
FLOOR, WIRE_FLOOR = "messages alone", "bfloat16 all_reduce"
WIRE_LIMITS = {32 * MB: 0.8, 128 * MB: 0.8}


def messages(tensor: torch.Tensor) -> Callable[[], object]:
    """Return a call that swaps a tensor with the other of two ranks."""
    other, peer = torch.empty_like(tensor), 1 - dist.get_rank()

    def call() -> None:
        works = [dist.irecv(other, peer), dist.isend(tensor, peer)]
        for work in works:
            if work is not None:
                work.wait()

    return call


def compressed(tensor: torch.Tensor) -> Callable[[], object]:
    """Return a call that adds a tensor over the ranks in bfloat16."""

    def call() -> None:
        narrow = tensor.bfloat16()
        dist.all_reduce(narrow)
        tensor.copy_(narrow)

    return call


def measure(size: int, repeats: int, wire: bool) -> tuple[_ranks.Times, str]:
    """Return the seconds of all rounds and the algorithm that was used."""
    tensor = torch.randn(size // 4)
    state = torch_sm3.AdasumState(wire_dtype=torch.bfloat16 if wire else None)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(tensor),
        "adasum": lambda: torch_sm3.adasum_all_reduce(tensor, state=state),
    }
    if dist.get_world_size() == 2:
        calls[WIRE_FLOOR if wire else FLOOR] = (
            compressed(tensor) if wire else messages(tensor)
        )
    times = _ranks.alternate(
        calls,
        repeats,
        between=tensor.normal_,  # else the sums grow without end
    )
    algorithm = state.algorithm_in_use
    state.close()
    return times, algorithm


def row_of(
    world: int, size: int, repeats: int, wire: bool
) -> tuple[dict[str, Any], list[_report.Figure]]:
    """Measure one size on ``world`` ranks."""
    times, algorithm = _ranks.run(world, measure, size, repeats, wire)
    limits = WIRE_LIMITS if wire else LIMITS.get(world, {})
    kind = "bfloat16 wire" if wire else "float32"
    row = {
        "ranks": world,
        "bytes": size,
        "wire": "bfloat16" if wire else None,
        "algorithm": algorithm,
        "repeats": repeats,
        "quartiles_ms": _ranks.spread(times),
    }
    figures = []
    for name in [name for name in times if name != "all_reduce"]:
        ratio = _ranks.ratio(times, name, "all_reduce")
        limit = limits.get(size) if name == "adasum" else None
        details = f"{kind}, {algorithm}" if name == "adasum" else "no Adasum"
        title = f"{name} / all_reduce, {world} ranks, {size // 1000} kB, {details}"
        figures.append(_report.Figure(title, ratio, limit))
        print(figures[-1].line(), flush=True)
    row["ratio"] = figures[0].value
    return row, figures


def main() -> None:
    """Parse the command line, measure, print ratios and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    _report.arguments(parser)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--bytes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    sizes = [size for size in options.bytes if not options.quick or size <= 8 * MB]
    repeats = 10 if options.quick else options.repeats
    cases = [(world, size, False) for world in options.ranks for size in sizes]
    cases += [
        (world, size, True)
        for world in options.ranks
        for size in sizes
        if world == WIRE_RANKS and size in WIRE_LIMITS
    ]
    measured = [row_of(world, size, repeats, wire) for world, size, wire in cases]
    _report.finish(
        [figure for _, figures in measured for figure in figures],
        options,
        {"rows": [row for row, _ in measured]},
    )


if __name__ == "__main__":
    main()
