# SPDX-License-Identifier: Apache-2.0
"""What a Gantt chart shows of memory: a step function below each lane."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from torch_sm3.pipeline.costs import Costs
from torch_sm3.pipeline.schedule import Schedule
from torch_sm3.pipeline.simulator import live_bytes

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")

Times = tuple[float, float]


class Level(NamedTuple):
    """How much is live over a span of time."""

    start: float
    end: float
    value: float


class Memory(NamedTuple):
    """The memory of one lane.

    Attributes:
        levels: in order of time; between them nothing is live.
        peak: the largest.
        in_bytes: whether it is counted in bytes; in microbatches of a rank otherwise.
    """

    levels: list[Level]
    peak: float
    in_bytes: bool

    def text(self) -> str:
        """Return the peak for the reader."""
        if not self.in_bytes:
            return f"peak {self.peak:.4g}"
        value, power = self.peak, 0
        while value >= 1024 and power + 1 < len(_UNITS):
            value, power = value / 1024, power + 1
        return f"peak {value:.4g} {_UNITS[power]}"


def levels_of(
    live: Sequence[float], spans: Sequence[Times], end: float, in_bytes: bool = True
) -> Memory:
    """Return the step function of what is live after each action of a rank.

    An action that takes memory has it from its start, one that gives some back has
    it until its end.

    Args:
        live: what is live after each action.
        spans: start and end of each.
        end: end of the time axis.
        in_bytes: whether ``live`` are bytes.
    """
    marks: list[Times] = []
    before = 0.0
    for value, (start, stop) in zip(live, spans, strict=True):
        if value != before:
            marks.append((start if value > before else stop, value))
        before = value
    levels = []
    for (start, value), (stop, _) in itertools.pairwise([*marks, (end, 0.0)]):
        if stop > start and value > 0:
            levels.append(Level(start, stop, value))
    return Memory(levels, max((x.value for x in levels), default=0.0), in_bytes)


def memories(
    schedule: Schedule,
    timeline: Sequence[Sequence[Times]],
    costs: Costs,
    links: str,
    max_pending: int,
    end: float,
) -> list[Memory]:
    """Return the memory of each rank of a schedule that ran on paper.

    Without bytes in the costs, a microbatch of one of a rank's v stages counts 1/v.

    Args:
        schedule: a lowered schedule.
        timeline: start and end of each of its actions.
        costs: their bytes.
        links: as for ``verify``.
        max_pending: as for ``verify``.
        end: end of the time axis.
    """
    in_bytes = has_bytes(costs)
    if not in_bytes:
        costs = Costs(activation_bytes=parts_of(schedule))
    found = []
    for rank, spans in enumerate(timeline):
        live = live_bytes(schedule, rank, costs, links=links, max_pending=max_pending)
        # Sums of parts such as 1/3 are off by a few bits.
        live = live if in_bytes else [round(value, 9) for value in live]
        found.append(levels_of(live, spans, end, in_bytes))
    return found


def parts_of(schedule: Schedule) -> list[float]:
    """Return which part of its rank's microbatch each stage keeps, for no bytes.

    Args:
        schedule: of which a microbatch of one of a rank's v stages counts 1/v.
    """
    return [1 / schedule.placement.count(rank) for rank in schedule.placement]


def has_bytes(costs: Costs) -> bool:
    """Tell whether costs say what anything holds."""
    names = ("activation", "boundary", "transient", "static", "route")
    values = costs.values()
    return any(any(values[f"{name}_bytes"]) for name in names)


def thinned(memory: Memory, limit: int, end: float) -> Memory:
    """Return at most ``limit`` levels: the largest of each of equal columns of time."""
    if len(memory.levels) <= limit:
        return memory
    width = end / limit
    tops = [0.0] * limit
    for start, stop, value in memory.levels:
        column = min(int(start / width), limit - 1)
        while column < limit and column * width < stop:
            tops[column] = max(tops[column], value)
            column += 1
    levels = [
        Level(i * width, (i + 1) * width, top) for i, top in enumerate(tops) if top > 0
    ]
    return memory._replace(levels=levels)
