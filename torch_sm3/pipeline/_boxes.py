# SPDX-License-Identifier: Apache-2.0
"""What a Gantt chart of a schedule shows: lanes of boxes, phases and messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch_sm3.pipeline._actions import COMPUTE, OTHERS
from torch_sm3.pipeline._memory import Memory
from torch_sm3.pipeline.schedule import Action, Schedule

#: Time that an action spends waiting for a message.
WAIT = "WAIT"
PHASES = ("warm-up", "steady", "cool-down")

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


def chunks_of(schedule: Schedule) -> dict[int, int]:
    """Return the place of each stage among those of its rank."""
    seen: dict[int, int] = {}
    found = {}
    for stage, rank in enumerate(schedule.placement):
        found[stage] = seen.get(rank, 0)
        seen[rank] = found[stage] + 1
    return found


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


def order_of(kind: str) -> int:
    """Return the place of a kind in the legend."""
    return (*COMPUTE, *OTHERS, WAIT).index(kind)


def kinds_of(lanes: Iterable[Lane]) -> list[str]:
    """Return the kinds that occur, in the order of the legend."""
    return sorted({box.kind for lane in lanes for box in lane.boxes}, key=order_of)
