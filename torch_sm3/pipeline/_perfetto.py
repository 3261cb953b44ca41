# SPDX-License-Identifier: Apache-2.0
"""Traces as JSON for chrome://tracing and ui.perfetto.dev."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch_sm3.pipeline._actions import consumers, message_key
from torch_sm3.pipeline._recorder import Stamps
from torch_sm3.pipeline.schedule import Action, Schedule

FORMAT = "torch_sm3.pipeline trace 1"
# Before the name of an action.
PREFIX = "torch_sm3.pipeline "
_MEASURED, _PREDICTED = 1, 2
# What a span of the measured lane tells besides its times: names of its arguments and
# of the stamps.
_NOTED = {
    "live_bytes": "live",
    "pending_sends": "pending",
    "peak_bytes": "peak",
    "made_bytes": "made",
    "kept_bytes": "kept",
    "shared_bytes": "shared",
}
_LANES = {_MEASURED: "measured", _PREDICTED: "predicted"}

Event = dict[str, Any]
Spans = Sequence[Sequence[tuple[float, float]]]


def _names(ranks: int, lanes: Sequence[int]) -> Iterator[Event]:
    def name(what: str, rank: int, lane: int, value: Any) -> Event:
        key = "sort_index" if what.endswith("sort_index") else "name"
        args = {key: value}
        return {"name": what, "ph": "M", "pid": rank, "tid": lane, "args": args}

    for rank in range(ranks):
        yield name("process_name", rank, 0, f"rank {rank}")
        yield name("process_sort_index", rank, 0, rank)
        for lane in lanes:
            yield name("thread_name", rank, lane, _LANES[lane])
            yield name("thread_sort_index", rank, lane, lane)


def _span(rank: int, lane: int, action: Action, start: int, end: int) -> Event:
    return {
        "name": PREFIX + action.text,
        "cat": action.op,
        "ph": "X",
        "pid": rank,
        "tid": lane,
        # Microseconds; three digits behind the point keep every nanosecond.
        "ts": start / 1000,
        "dur": (end - start) / 1000,
    }


def _counters(rank: int, stamps: Stamps, index: int) -> Iterator[Event]:
    for name, unit, value in (
        ("live activation bytes", "bytes", stamps.live[index]),
        ("pending sends", "sends", stamps.pending[index]),
    ):
        ts = stamps.end[index] / 1000
        args = {unit: value}
        yield {"name": name, "ph": "C", "pid": rank, "ts": ts, "args": args}


def _measured(rank: int, row: Sequence[Action], stamps: Stamps) -> Iterator[Event]:
    for index, action in enumerate(row):
        begin, end = stamps.begin[index], stamps.end[index]
        if not end or action.op == ".":
            continue
        event = _span(rank, _MEASURED, action, begin, end)
        event["args"] = {
            "step": stamps.step,
            "index": index,
            "waited_us": (stamps.ready[index] - begin) / 1000,
            **{key: getattr(stamps, name)[index] for key, name in _NOTED.items()},
        }
        yield event
        yield from _counters(rank, stamps, index)


def _flows(
    rows: Sequence[Sequence[Action]], times: Spans, lane: int, prefix: str
) -> Iterator[Event]:
    """Yield an arrow for each message, from its SEND to its consumer.

    Args:
        rows: actions of each rank.
        times: when each sent, and when it had its inputs; 0 for never.
        lane: the lane of all spans.
        prefix: makes the arrows' names unique.
    """
    sent = {
        message_key(action): (rank, times[rank][index][0])
        for rank, row in enumerate(rows)
        for index, action in enumerate(row)
        if action.op.startswith("SEND")
    }
    for rank, row in enumerate(rows):
        for index, target in consumers(row).items():
            key = message_key(row[index])
            origin, start = sent.get(key, (rank, 0))
            end = times[rank][target][1]
            if not start or not end:
                continue
            common = {
                "name": "message",
                "cat": row[index].op[-1],
                "id": prefix + row[index].text,
                "tid": lane,
            }
            yield {**common, "ph": "s", "pid": origin, "ts": start / 1000}
            yield {**common, "ph": "f", "bp": "e", "pid": rank, "ts": end / 1000}


def write(
    path: str | Path,
    schedule: Schedule,
    steps: Sequence[Sequence[Stamps]],
    errors: Sequence[int],
    predicted: Spans | None,
    max_pending: int,
) -> None:
    """Write a trace.

    Args:
        path: the file.
        schedule: what ran, lowered.
        steps: of each rank the stamps of its steps, on one clock.
        errors: of each rank's clock, in nanoseconds.
        predicted: start and end of each action in one step, in seconds.
        max_pending: messages of a link that may be under way.
    """
    rows = [schedule.actions(rank) for rank in range(schedule.ranks)]
    lanes = [_MEASURED] if predicted is None else [_MEASURED, _PREDICTED]
    events = list(_names(schedule.ranks, lanes))
    for number, step in enumerate(zip(*steps, strict=True)):
        for rank, stamps in enumerate(step):
            events += _measured(rank, rows[rank], stamps)
        used = [list(zip(x.begin, x.ready, strict=True)) for x in step]
        events += _flows(rows, used, _MEASURED, f"{number}:")
        if predicted is not None:
            # A step on paper begins where the measured one did.
            start = min(t for x in step for t in x.begin if t)
            spans = [
                [(start + round(1e9 * a), start + round(1e9 * b)) for a, b in row]
                for row in predicted
            ]
            for rank, row in enumerate(rows):
                for action, times in zip(row, spans[rank], strict=True):
                    if action.op != ".":
                        events.append(_span(rank, _PREDICTED, action, *times))
            starts = [[(a, a) for a, _ in row] for row in spans]
            events += _flows(rows, starts, _PREDICTED, f"{number}p:")
    content = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "format": FORMAT,
            "schedule": schedule.text,
            "clock_error_ns": list(errors),
            "max_pending": max_pending,
        },
    }
    Path(path).write_text(json.dumps(content, separators=(",", ":")) + "\n")


def read(path: str | Path) -> tuple[Schedule, list[list[Stamps]], list[int], int]:
    """Read a trace: schedule, stamps of each rank and step, clock errors, max_pending.

    Raises:
        ValueError: if the file is no trace of ours.
    """
    try:
        return _parsed(json.loads(Path(path).read_text()))
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError):
        raise ValueError(
            f"load_trace: expected a trace that PipelineRunner.save_trace wrote, but "
            f"got {str(path)!r} (argument 'path')"
        ) from None


def _parsed(content: Any) -> tuple[Schedule, list[list[Stamps]], list[int], int]:
    """Return what :func:`read` does; what does not fit raises whatever it does."""
    about = content["otherData"]
    if about["format"] != FORMAT:
        raise KeyError(about["format"])
    schedule = Schedule.parse(about["schedule"])
    sizes = [len(schedule.actions(rank)) for rank in range(schedule.ranks)]
    steps: list[dict[int, Stamps]] = [{} for _ in sizes]
    for event in content["traceEvents"]:
        if event["ph"] != "X" or event["tid"] != _MEASURED:
            continue
        rank, args = event["pid"], event["args"]
        number, index = args["step"], args["index"]
        stamps = steps[rank].setdefault(number, Stamps.empty(number, sizes[rank]))
        begin = round(1000 * event["ts"])
        stamps.begin[index] = begin
        stamps.ready[index] = begin + round(1000 * args["waited_us"])
        stamps.end[index] = begin + round(1000 * event["dur"])
        for key, name in _NOTED.items():
            getattr(stamps, name)[index] = args[key]
    errors = [int(error) for error in about["clock_error_ns"]]
    if len(errors) != schedule.ranks:
        raise ValueError(errors)
    found = [list(x.values()) for x in steps]
    return schedule, found, errors, int(about["max_pending"])
