# SPDX-License-Identifier: Apache-2.0
"""Whole Gantt charts: lanes of all ranks, their messages, and limits to their size."""

from __future__ import annotations

from collections.abc import Sequence

from torch_sm3.pipeline._actions import consumers, message_key
from torch_sm3.pipeline._boxes import (
    Arrow,
    Box,
    Lane,
    Picture,
    Times,
    chunks_of,
    lane,
    order_of,
)
from torch_sm3.pipeline._memory import thinned
from torch_sm3.pipeline.schedule import Action, Schedule

#: Boxes that a lane may have, and all lanes together.
LANE_LIMIT, TOTAL_LIMIT = 2_000, 60_000


def arrows_of(
    actions: Sequence[Sequence[Action]],
    sent: Sequence[Sequence[float]],
    used: Sequence[Sequence[float]],
    lanes: Sequence[int],
) -> list[Arrow]:
    """Return the messages of a lowered schedule.

    Args:
        actions: of each rank.
        sent: when each action of each rank sent what it sends.
        used: when each action of each rank used what it got.
        lanes: the lane of each rank.
    """
    left: dict[object, tuple[int, float]] = {}
    for rank, row in enumerate(actions):
        for index, action in enumerate(row):
            if action.op.startswith("SEND"):
                left[message_key(action)] = lanes[rank], sent[rank][index]
    found = []
    for rank, row in enumerate(actions):
        for index, target in consumers(row).items():
            origin = left.get(message_key(row[index]))
            if origin is not None:
                found.append(Arrow(*origin, lanes[rank], used[rank][target]))
    # In an order of their own: where a RECV stands in its gap is not shown.
    return sorted(found)


def picture(
    schedule: Schedule, timeline: Sequence[Sequence[Times]], title: str, unit: str
) -> Picture:
    """Return the chart of a schedule that ran on paper.

    Args:
        schedule: a lowered schedule.
        timeline: start and end of each of its actions.
        title: the headline.
        unit: of the times.
    """
    chunk_of = chunks_of(schedule)
    end = max((end for spans in timeline for _, end in spans), default=0.0)
    limit = limit_of(schedule.ranks)
    # Each lane is merged before the next is made, so that large charts fit.
    lanes = [
        merged(
            lane(f"rank {rank}", schedule.actions(rank), spans, chunk_of), limit, end
        )
        for rank, spans in enumerate(timeline)
    ]
    arrows: list[Arrow] = []
    if not any(x.merged for x in lanes):
        actions = [schedule.actions(rank) for rank in range(schedule.ranks)]
        starts = [[start for start, _ in spans] for spans in timeline]
        arrows = arrows_of(actions, starts, starts, range(len(lanes)))
    return Picture(
        title,
        lanes,
        arrows,
        end,
        unit,
        max(chunk_of.values(), default=0) + 1,
    )


def limit_of(lanes: int) -> int:
    """Return how many boxes each of some lanes may have."""
    return min(LANE_LIMIT, max(64, TOTAL_LIMIT // max(1, lanes)))


def merged(lane: Lane, limit: int, end: float) -> Lane:
    """Return a lane of at most ``limit`` boxes.

    Its time is cut into equal columns. In each, the share of every kind of work is a
    part of the height, so that idle time stays visible as what is missing.

    Args:
        lane: any lane.
        limit: the most boxes.
        end: end of the time axis.
    """
    if len(lane.boxes) <= limit:
        return lane
    kinds = sorted({box.kind for box in lane.boxes}, key=order_of)
    columns = max(1, limit // len(kinds))
    width = end / columns
    share = [dict.fromkeys(kinds, 0.0) for _ in range(columns)]
    for box in lane.boxes:
        height = box.high - box.low
        column = min(int(box.start / width), columns - 1)
        while column < columns and column * width < box.end:
            inside = min(box.end, (column + 1) * width) - max(box.start, column * width)
            share[column][box.kind] += max(0.0, inside) * height / width
            column += 1
    boxes = []
    for column, parts in enumerate(share):
        low = 0.0
        for kind, part in parts.items():
            if part > 0:
                high = min(1.0, low + part)
                start = column * width
                boxes.append(Box(start, start + width, kind, low=low, high=high))
                low = high
    return lane._replace(boxes=boxes, merged=True)


def within_limits(chart: Picture) -> Picture:
    """Merge the boxes of lanes that have too many of them, and drop their arrows."""
    limit = limit_of(len(chart.lanes))
    lanes = [_limited(lane, limit, chart.end) for lane in chart.lanes]
    dense = any(lane.merged for lane in lanes)
    return chart._replace(lanes=lanes, arrows=[] if dense else chart.arrows)


def _limited(lane: Lane, limit: int, end: float) -> Lane:
    lane = merged(lane, limit, end)
    if lane.memory is None:
        return lane
    return lane._replace(memory=thinned(lane.memory, limit, end))
