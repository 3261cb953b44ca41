# SPDX-License-Identifier: Apache-2.0
"""What stamps tell of memory."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from torch_sm3.pipeline._actions import COMPUTE
from torch_sm3.pipeline._recorder import Stamps
from torch_sm3.pipeline.schedule import Action, Schedule

Cell = tuple[str, int]


class _Samples:
    """Bytes by operation and stage, in any number of microbatches and steps."""

    def __init__(self) -> None:
        # Made by computations, sent, kept for W, and in use only meanwhile.
        self.made: dict[Cell, list[int]] = defaultdict(list)
        self.sent: dict[int, list[int]] = defaultdict(list)
        self.routed: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.for_weight: dict[int, list[int]] = defaultdict(list)
        self.over: dict[int, list[int]] = defaultdict(list)
        self.forward: dict[int, list[int]] = defaultdict(list)
        # What a backward found, and of it what is the output as well.
        self.known: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self.unknown: dict[int, list[int]] = defaultdict(list)

    def add(self, row: Sequence[Action], stamps: Stamps) -> None:
        before = 0
        for index, action in enumerate(row):
            op, stage = action.op, action.stage
            made, kept = stamps.made[index], stamps.kept[index]
            if op in ("F", "B", "I"):
                self.made[op, stage].append(made)
            if op == "SEND_F" and action.route is None:
                self.sent[stage].append(made)
            elif op == "SEND_F" and action.route is not None:
                self.routed[action.route].append(made)
            elif op == "W":
                self.for_weight[stage].append(kept)
            elif op in ("B", "I") and stamps.shared[index] < 0:
                self.unknown[stage].append(kept)
            elif op in ("B", "I"):
                self.known[stage].append((kept, stamps.shared[index]))
            if op in COMPUTE:
                over = self.forward if op == "F" else self.over
                over[stage].append(stamps.peak[index] - before - made)
            before = stamps.live[index]


def _median(values: Sequence[int]) -> float:
    # One that was measured: a mean of two would be none of them.
    return float(statistics.median_low(values)) if values else 0.0


def bytes_of(
    schedule: Schedule,
    rows: Sequence[Sequence[Action]],
    steps: Sequence[Sequence[Stamps]],
) -> dict[str, Any]:
    """Return the bytes of :class:`Costs` that complete steps counted.

    Args:
        schedule: what ran.
        rows: actions of each rank.
        steps: stamps of each rank's steps.
    """
    found = _Samples()
    for row, own in zip(rows, steps, strict=True):
        for stamps in own:
            if all(stamps.end):
                found.add(row, stamps)
    routes = [_median(found.routed[route]) for route in schedule.routes]
    activation, released, shared, boundary, transient = [], [], [], [], []
    for stage in range(schedule.stages):
        sent = _median(found.sent[stage])
        if not found.sent[stage]:
            # To a stage of the same rank, and with it what goes other ways.
            others = [
                size
                for (source, _), size in zip(schedule.routes, routes, strict=True)
                if source == stage
            ]
            sent = max(0.0, _median(found.made["F", stage]) - sum(others))
        both = found.known[stage]
        kept = _median([a for a, _ in both] or found.unknown[stage])
        weight = found.for_weight[stage]
        boundary.append(sent)
        activation.append(kept)
        shared.append(min(kept, sent, _median([b for _, b in both])))
        released.append(kept - _median(weight) if weight else 0.0)
        # A forward also takes what it keeps.
        over = [float(x) for x in found.over[stage]]
        over += [x - kept + shared[-1] for x in found.forward[stage]]
        transient.append(max([0.0, *over]))
    return {
        "activation_bytes": activation,
        "released_at_input": released,
        "shared_bytes": shared,
        "boundary_bytes": boundary,
        "route_bytes": routes or 0.0,
        "transient_bytes": transient,
    }
