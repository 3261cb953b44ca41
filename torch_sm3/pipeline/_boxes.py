# SPDX-License-Identifier: Apache-2.0
"""What a Gantt chart of a schedule shows: lanes of boxes, phases and messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch_sm3.pipeline._actions import COMPUTE, OTHERS, consumers, message_key
from torch_sm3.pipeline._memory import Memory, thinned
from torch_sm3.pipeline.schedule import Action, Schedule

#: Time that an action spends waiting for a message.
WAIT = "WAIT"
PHASES = ("warm-up", "steady", "cool-down")
#: Boxes that a lane may have, and all lanes together.
LANE_LIMIT, TOTAL_LIMIT = 2_000, 60_000

Times = tuple[float, float]


class Box(NamedTuple):
    """A span of time on one lane.

    Attributes:
        start: when it begins.
        end: when it ends.
        kind: operation, or ``WAIT``.
        name: the action; empty where several were merged.
        chunk: place of the stage among those of its rank.
        microbatch: its microbatch, -1 if it has none.
        low: lower edge, as a part of the lane's height.
        high: upper edge.
    """

    start: float
    end: float
    kind: str
    name: str = ""
    chunk: int = 0
    microbatch: int = -1
    low: float = 0.0
    high: float = 1.0


class Lane(NamedTuple):
    """One row of the chart.

    Attributes:
        label: what stands before it.
        boxes: in order of time.
        phases: start and end of warm-up, steady state and cool-down.
        busy: time in boxes that are no wait.
        merged: whether boxes stand for more than one action.
        memory: what is live over time, if that is shown.
        end: when the step of this lane ends; 0 for the end of the time axis.
    """

    label: str
    boxes: list[Box]
    phases: list[Times]
    busy: float
    merged: bool = False
    memory: Memory | None = None
    end: float = 0.0


class Arrow(NamedTuple):
    """A message from one lane to another."""

    source: int
    sent: float
    target: int
    used: float


class Picture(NamedTuple):
    """Everything that is drawn.

    Attributes:
        title: the headline.
        lanes: from top to bottom.
        arrows: messages between lanes.
        end: end of the time axis, which begins at 0.
        unit: of the axis.
        chunks: most stages of any rank.
    """

    title: str
    lanes: list[Lane]
    arrows: list[Arrow]
    end: float
    unit: str
    chunks: int


def phases(boxes: Sequence[Box]) -> list[Times]:
    """Cut a lane where its first backward begins and its last forward ends.

    Args:
        boxes: of one rank, in order.

    Returns:
        Start and end of warm-up, steady state and cool-down; nothing for a lane
        without backwards.
    """
    work = [box for box in boxes if box.kind in COMPUTE]
    if all(box.kind == "F" for box in work):
        return []
    start, end = work[0].start, max(box.end for box in work)
    back = min((box.start for box in work if box.kind != "F"), default=end)
    last = max((box.end for box in work if box.kind == "F"), default=start)
    # Without a forward after the first backward there is no steady state.
    last = max(last, back)
    return [(start, back), (back, last), (last, end)]


def lane(
    label: str,
    row: Sequence[Action],
    spans: Sequence[Times],
    chunk_of: dict[int, int],
    ready: Sequence[float] | None = None,
) -> Lane:
    """Make the lane of one rank.

    Args:
        label: what stands before it.
        row: the rank's actions.
        spans: start and end of each.
        chunk_of: place of each stage among those of its rank.
        ready: when the inputs of each action were there; what comes before is
            waiting. None if it did not wait inside actions.
    """
    boxes: list[Box] = []
    busy = 0.0
    for index, (action, (start, end)) in enumerate(zip(row, spans, strict=True)):
        if action.op not in COMPUTE and action.op not in OTHERS:
            continue
        begin = start if ready is None else ready[index]
        if begin > start:
            boxes.append(Box(start, begin, WAIT, action.text))
        if end <= begin:
            continue
        number = action.microbatch if action.op in COMPUTE else -1
        box = Box(begin, end, action.op, action.text, chunk_of[action.stage], number)
        before = boxes[-1] if boxes else None
        if before is not None and before[:2] == box[:2]:
            # A pair that runs as one: each has half of the lane.
            boxes[-1] = before._replace(low=0.5)
            box = box._replace(high=0.5)
        else:
            busy += end - begin
        boxes.append(box)
    return Lane(label, boxes, phases(boxes), busy)


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
    return found


def chunks_of(schedule: Schedule) -> dict[int, int]:
    """Return the place of each stage among those of its rank."""
    seen: dict[int, int] = {}
    found = {}
    for stage, rank in enumerate(schedule.placement):
        found[stage] = seen.get(rank, 0)
        seen[rank] = found[stage] + 1
    return found


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
    actions = [schedule.actions(rank) for rank in range(schedule.ranks)]
    chunk_of = chunks_of(schedule)
    lanes = [
        lane(f"rank {rank}", row, spans, chunk_of)
        for rank, (row, spans) in enumerate(zip(actions, timeline, strict=True))
    ]
    starts = [[start for start, _ in spans] for spans in timeline]
    end = max((end for spans in timeline for _, end in spans), default=0.0)
    places = range(len(lanes))
    return Picture(
        title,
        lanes,
        arrows_of(actions, starts, starts, places),
        end,
        unit,
        max(chunk_of.values(), default=0) + 1,
    )


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
    kinds = sorted({box.kind for box in lane.boxes}, key=_order)
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


def gaps(lane: Lane, end: float) -> list[Times]:
    """Return when a lane does nothing, which is its bubble.

    Args:
        lane: a lane that is not merged.
        end: end of the time axis.
    """
    found, before = [], 0.0
    # Sums of times are off by a few bits.
    least = 1e-9 * end
    for box in lane.boxes:
        if box.start - before > least:
            found.append((before, box.start))
        before = max(before, box.end)
    if end - before > least:
        found.append((before, end))
    return found


def _limited(lane: Lane, limit: int, end: float) -> Lane:
    lane = merged(lane, limit, end)
    if lane.memory is None:
        return lane
    return lane._replace(memory=thinned(lane.memory, limit, end))


def _order(kind: str) -> int:
    return (*COMPUTE, *OTHERS, WAIT).index(kind)


def kinds_of(lanes: Iterable[Lane]) -> list[str]:
    """Return the kinds that occur, in the order of the legend."""
    return sorted({box.kind for lane in lanes for box in lane.boxes}, key=_order)


def within_limits(chart: Picture) -> Picture:
    """Merge the boxes of lanes that have too many of them, and drop their arrows."""
    limit = min(LANE_LIMIT, max(64, TOTAL_LIMIT // max(1, len(chart.lanes))))
    lanes = [_limited(lane, limit, chart.end) for lane in chart.lanes]
    dense = any(lane.merged for lane in lanes)
    return chart._replace(lanes=lanes, arrows=[] if dense else chart.arrows)
