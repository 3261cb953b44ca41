# SPDX-License-Identifier: Apache-2.0
"""Traces of steps that took exactly what the simulator says."""

from __future__ import annotations

from torch_sm3.pipeline import Costs, Schedule, simulate
from torch_sm3.pipeline._recorder import Stamps
from torch_sm3.pipeline.trace import Trace

_KEPT = {"F": 100, "B": -100, "I": -40, "W": -60}


def synthetic(
    schedule: Schedule, costs: Costs, steps: int = 2, start: int = 5_000_000
) -> Trace:
    """Return the trace of a rank that waits inside the action whose input is missing.

    Args:
        schedule: what runs.
        costs: in seconds.
        steps: how many, each after a pause as long as a step.
        start: of the first, in nanoseconds.
    """
    ran = simulate(schedule, costs)
    ranks = range(schedule.ranks)
    rows = [ran.schedule.actions(rank) for rank in ranks]
    found: list[list[Stamps]] = [[] for _ in ranks]
    for step in range(1, steps + 1):
        for rank in ranks:
            stamps = Stamps.empty(step, len(rows[rank]))
            free, kept = start, 0
            spans = ran.timeline()[rank]
            for index, (action, span) in enumerate(zip(rows[rank], spans, strict=True)):
                stamps.begin[index] = free
                stamps.ready[index] = start + round(1e9 * span[0])
                stamps.end[index] = free = start + round(1e9 * span[1])
                kept += _KEPT.get(action.op, 0)
                stamps.live[index] = stamps.peak[index] = kept
                if action.op in ("B", "I", "W"):
                    stamps.kept[index] = 60 if action.op == "W" else 100
                stamps.pending[index] = index % 3
            found[rank].append(stamps)
        start += 2 * round(1e9 * ran.makespan)
    return Trace(ran.schedule, found)
