# SPDX-License-Identifier: Apache-2.0
"""What stamps tell: costs, waiting and memory."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence

from torch_sm3.pipeline._actions import consumers, message_key
from torch_sm3.pipeline._counted import bytes_of
from torch_sm3.pipeline._recorder import Stamps
from torch_sm3.pipeline.costs import Costs
from torch_sm3.pipeline.schedule import Action, Schedule

Steps = Sequence[Sequence[Stamps]]
# Shorter waits tell the time of a look at an empty queue, not of a message.
_WAITED = 20_000


def _median(values: Sequence[float]) -> float:
    return float(statistics.median(values)) if values else 0.0


def _fused(row: Sequence[Action], stamps: Stamps) -> Iterator[int]:
    """Yield the first half of each pair that ran as one."""
    for index, action in enumerate(row):
        if action.paired and stamps.end[index] == stamps.end[index + 1]:
            yield index


class _Seconds:
    """Durations by operation and stage."""

    def __init__(self) -> None:
        self.took: dict[tuple[str, int], list[float]] = defaultdict(list)

    def add(self, row: Sequence[Action], stamps: Stamps) -> None:
        fused = set(_fused(row, stamps))
        halves = {index + 1 for index in fused}
        for index, action in enumerate(row):
            if not stamps.end[index] or index in halves:
                continue
            op = "pair" if index in fused else action.op
            seconds = 1e-9 * (stamps.end[index] - stamps.ready[index])
            self.took[op, action.stage].append(seconds)

    def of(self, op: str, stages: int) -> list[float]:
        return [_median(self.took[op, stage]) for stage in range(stages)]

    def has(self, op: str) -> bool:
        return any(name == op and values for (name, _), values in self.took.items())


def latencies(rows: Sequence[Sequence[Action]], steps: Steps) -> list[list[float]]:
    """Return the seconds of a message by sender, then receiver.

    Args:
        rows: actions of each rank.
        steps: stamps of each rank's steps.
    """
    clean: dict[tuple[int, int], list[float]] = defaultdict(list)
    late: dict[tuple[int, int], list[float]] = defaultdict(list)
    for step in zip(*steps, strict=True):
        sent = {
            message_key(action): (rank, step[rank].end[index])
            for rank, row in enumerate(rows)
            for index, action in enumerate(row)
            if action.op.startswith("SEND")
        }
        for rank, row in enumerate(rows):
            stamps = step[rank]
            for index, target in consumers(row).items():
                origin, left = sent.get(message_key(row[index]), (rank, 0))
                waited = stamps.ready[target] - stamps.begin[target]
                if left and stamps.end[target] and waited > _WAITED:
                    # A message may not travel before it is asked for.
                    asked = stamps.end[index]
                    took = max(0, stamps.ready[target] - max(left, asked))
                    seen = clean if asked <= left else late
                    seen[origin, rank].append(1e-9 * took)
    known = {link: _median(values) for link, values in {**late, **clean}.items()}
    usual = _median(list(known.values()))
    ranks = range(len(rows))
    return [[known.get((a, b), usual) if a != b else 0.0 for b in ranks] for a in ranks]


def costs_of(schedule: Schedule, steps: Steps) -> Costs:
    """Return the costs that a trace tells; see :meth:`Trace.costs`."""
    rows = [schedule.actions(rank) for rank in range(schedule.ranks)]
    seconds = _Seconds()
    for row, own in zip(rows, steps, strict=True):
        for stamps in own:
            seconds.add(row, stamps)
    stages = schedule.stages
    forward, full, first, second = (seconds.of(op, stages) for op in "FBIW")
    # What a stage never ran is made of what it ran.
    first = [i or 0.5 * b for i, b in zip(first, full, strict=True)]
    second = [w or 0.5 * b for w, b in zip(second, full, strict=True)]
    whole = [b or i + w for b, i, w in zip(full, first, second, strict=True)]
    pairs = [
        pair or f + b
        for pair, f, b in zip(seconds.of("pair", stages), forward, whole, strict=True)
    ]
    # OPTIM has no stage: its time is shared out among those of the rank.
    own_stages = [schedule.placement.count(rank) for rank in schedule.placement]
    steps_of = [_optimizer(rows[rank], steps[rank]) for rank in range(schedule.ranks)]
    return Costs(
        forward,
        first,
        second,
        whole if seconds.has("B") else None,
        pair=pairs if seconds.has("pair") else None,
        reduce=seconds.of("REDUCE_GRAD", stages),
        optimizer=[
            steps_of[rank] / own_stages[stage]
            for stage, rank in enumerate(schedule.placement)
        ],
        **bytes_of(schedule, rows, steps),
        latency=latencies(rows, steps),
    )


def _optimizer(row: Sequence[Action], steps: Sequence[Stamps]) -> float:
    took = [
        1e-9 * (stamps.end[index] - stamps.ready[index])
        for stamps in steps
        for index, action in enumerate(row)
        if action.op == "OPTIM" and stamps.end[index]
    ]
    return _median(took)
