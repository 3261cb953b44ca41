# SPDX-License-Identifier: Apache-2.0
"""The search of ``plan("auto", …)``: its time, and its plan against all named ones.

Times are of one thread, by the time that it computed. The makespan of the searched plan
is compared with the best named kind that fits the same memory, over sizes, costs and
limits; where nothing named fits, the search may still find a plan, or nothing.
"""

from __future__ import annotations

import argparse
import itertools
import time
from typing import Any

import torch
from _report import Figure, arguments, finish

from torch_sm3.pipeline import Costs, ScheduleError, kinds, plan, simulate

# Seconds that a search may take; at the larger size it is only told.
SECONDS = {(8, 64): 2.0, (64, 512): None}
SIZES = ((2, 4), (4, 8), (4, 9), (8, 16))
TRIPLES = ((1.0, 1.0, 1.0), (1.0, 2.0, 1.0), (3.0, 4.0, 2.0))
# Memory of a rank, over what p microbatches of its stages take.
LIMITS = (0.3, 0.4, 0.5, 0.7, 1.0, 1.5, None)
NOT_NAMED = ("auto", "none", "forward")


def costs_of(triple: tuple[float, float, float], chunks: int) -> Costs:
    """Return the costs of a stage, of which a rank has some."""
    f, i, w = (cost / chunks for cost in triple)
    return Costs(F=f, I=i, W=w, activation_bytes=120 / chunks, boundary_bytes=1)


def timed(p: int, m: int, limit: float | None) -> float:
    """Return the seconds that a search computes."""
    start = time.process_time()
    plan("auto", p, m, costs=costs_of(TRIPLES[1], 1), memory_limit=limit)
    return time.process_time() - start


def best_named(
    p: int, m: int, triple: tuple[float, float, float], limit: float | None
) -> float | None:
    """Return the least makespan of a named kind that fits."""
    found: list[float] = []
    for kind in kinds():
        if kind in NOT_NAMED or (kind == "dualpipe_v" and m < 2 * p):
            continue
        chunks = plan(kind, p, m).stages // p
        costs = costs_of(triple, chunks)
        try:
            fitting = plan(kind, p, m, costs=costs, memory_limit=limit)
        except ScheduleError:
            continue
        found.append(simulate(fitting, costs).makespan)
    return min(found, default=None)


def compared(sizes: tuple[tuple[int, int], ...]) -> tuple[float, float, int]:
    """Return the largest and the mean ratio to the best named kind, and how many."""
    ratios: list[float] = []
    for (p, m), triple, part in itertools.product(sizes, TRIPLES, LIMITS):
        limit = None if part is None else 120 * p * part
        named = best_named(p, m, triple, limit)
        if named is None:
            continue
        found = plan("auto", p, m, costs=costs_of(triple, 1), memory_limit=limit)
        assert found.costs is not None
        ratios.append(simulate(found, found.costs).makespan / named)
    return max(ratios), sum(ratios) / len(ratios), len(ratios)


def main() -> None:
    """Parse the command line, measure, print the figures and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    arguments(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures: list[Figure] = []
    times: dict[str, Any] = {}
    for (p, m), limit in itertools.product(SECONDS, (None, 0.6)):
        bytes_of = None if limit is None else 120 * p * limit
        seconds = timed(p, m, bytes_of)
        about = "no limit" if limit is None else f"{limit:g} of the memory of 1f1b"
        times[f"p={p} m={m} limit={limit}"] = seconds
        name = f"seconds to search p = {p}, m = {m}, {about}"
        figures.append(Figure(name, seconds, SECONDS[p, m]))
        if options.quick:
            break
    most, mean, count = compared(SIZES[:2] if options.quick else SIZES)
    figures.append(
        Figure("makespan over the best named kind that fits, largest", most, 1 + 1e-9)
    )
    figures.append(Figure("makespan over the best named kind that fits, mean", mean))
    figures.append(Figure("searches compared", count))
    finish(figures, options, {"seconds": times})


if __name__ == "__main__":
    main()
