# SPDX-License-Identifier: Apache-2.0
"""Reports: where the time and the memory of a step went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch_sm3.pipeline._actions import COMPUTE, OTHERS, is_message
from torch_sm3.pipeline._recorder import Stamps
from torch_sm3.pipeline.costs import Cost, Costs
from torch_sm3.pipeline.schedule import Action, Schedule
from torch_sm3.pipeline.trace import Trace

# A stage this much above the mean is worth a hint.
_UNEVEN = 1.1
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class Figures:
    r"""Hold the figures of one rank and step; times in seconds, memory in bytes.

    Attributes:
        busy: time in forwards, backwards, reductions and the optimizer.
        bubble: the step's makespan less ``busy``.
        waiting: the part of ``bubble`` that passed in waiting for a message.
        peak_bytes: most bytes of activations and messages in use at once, static bytes
            aside. None if nothing was counted.
    """

    busy: float
    bubble: float
    waiting: float
    peak_bytes: float | None


@dataclass(frozen=True)
class StepReport:
    r"""Hold what became of a step, rank by rank; ``print`` shows a table.

    Attributes:
        kind: of the schedule.
        makespan: seconds from the first start to the last end.
        predicted_makespan: what the simulator says of the same costs.
        measured: figures of each rank.
        predicted: figures of each rank.
        stage_seconds: of each stage, its compute for one microbatch.
        largest_stage: the stage that takes most.
        hints: what could be done, in words.
        snapshots: for each rank the bytes of its last snapshot for post-validation, and
            what they would be with the state of Adam; empty without post-validation.

    Example::

        >>> from torch_sm3.pipeline.report import Figures, StepReport
        >>> rank = Figures(busy=0.003, bubble=0.001, waiting=0.001, peak_bytes=2048)
        >>> report = StepReport("none", 0.004, 0.0039, [rank], [rank], [0.003], 0, [])
        >>> str(report).splitlines()[0]
        'none: 4.00 ms measured, 3.90 ms predicted'
        >>> report.to_dict()["measured"][0]["busy"]
        0.003
    """

    kind: str
    makespan: float
    predicted_makespan: float
    measured: list[Figures]
    predicted: list[Figures]
    stage_seconds: list[float]
    largest_stage: int
    hints: list[str]
    snapshots: list[tuple[int, int]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        r"""Return everything as numbers, strings, lists and dicts, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [
            f"{self.kind}: {1e3 * self.makespan:.2f} ms measured, "
            f"{1e3 * self.predicted_makespan:.2f} ms predicted",
            f"{'':6}{'busy ms':>20}{'bubble ms':>20}{'waiting ms':>20}"
            f"{'peak activations':>24}",
            f"{'rank':6}" + 3 * f"{'measured':>11}{'pred.':>9}"
            f"{'measured':>13}{'pred.':>11}",
        ]
        for rank, (got, said) in enumerate(
            zip(self.measured, self.predicted, strict=True)
        ):
            cells = "".join(
                f"{1e3 * getattr(got, name):11.2f}{1e3 * getattr(said, name):9.2f}"
                for name in ("busy", "bubble", "waiting")
            )
            memory = f"{_bytes(got.peak_bytes):>13}{_bytes(said.peak_bytes):>11}"
            lines.append(f"{rank:<6}{cells}{memory}")
        largest = self.stage_seconds[self.largest_stage]
        lines.append(f"largest stage: {self.largest_stage}, {1e3 * largest:.2f} ms")
        for rank, (bytes_, adam) in enumerate(self.snapshots):
            lines.append(
                f"snapshot of rank {rank}: {_bytes(bytes_)}, with Adam {_bytes(adam)}"
            )
        return "\n".join(lines + [f"hint: {hint}" for hint in self.hints])


def _bytes(value: float | None) -> str:
    if value is None:
        return "-"
    power = 0
    while abs(value) >= 1024 and power + 1 < len(_UNITS):
        value, power = value / 1024, power + 1
    return (
        f"{value:.0f} {_UNITS[power]}" if power == 0 else f"{value:.1f} {_UNITS[power]}"
    )


def _measure(row: Sequence[Action], stamps: Stamps, makespan: float) -> Figures:
    busy = waiting = 0
    last = 0
    for index, action in enumerate(row):
        begin, ready, end = (x[index] for x in stamps[1:4])
        if action.op in COMPUTE or action.op in OTHERS:
            # The halves of a pair that ran as one share their time.
            busy += max(0, end - max(ready, last))
            waiting += ready - begin
            last = max(last, end)
        elif is_message(action):
            waiting += end - begin
    seconds = 1e-9 * busy
    peak = max(stamps.peak, default=0) or None
    return Figures(seconds, makespan - seconds, 1e-9 * waiting, peak)


def _per_stage(value: Cost, stages: int) -> list[float]:
    return list(value) if isinstance(value, Sequence) else [value] * stages


def _seconds_of_stages(costs: Costs, stages: int) -> list[float]:
    forward, first, second = (
        _per_stage(x, stages) for x in (costs.F, costs.I, costs.W)
    )
    back = [a + b for a, b in zip(first, second, strict=True)]
    if costs.B is not None:
        back = _per_stage(costs.B, stages)
    return [a + b for a, b in zip(forward, back, strict=True)]


def _hints(
    schedule: Schedule, seconds: Sequence[float], makespan: float, waiting: float
) -> list[str]:
    found = []
    m, ranks = schedule.microbatches, schedule.ranks
    per_rank = [0.0] * ranks
    for stage, rank in enumerate(schedule.placement):
        per_rank[rank] += seconds[stage]
    mean, most = sum(per_rank) / ranks, max(per_rank)
    if mean > 0 and most > _UNEVEN * mean:
        rank = per_rank.index(most)
        largest = max(range(len(seconds)), key=seconds.__getitem__)
        saved = min(1.0, m * (most - mean) / makespan) if makespan else 0.0
        found.append(
            f"rank {rank} has {most / mean:.2f} times the work of the mean rank and "
            f"stage {largest} is the largest; an even cut (partition) would save up to "
            f"{100 * saved:.0f} % of the step"
        )
    if makespan and waiting > 0.25 * makespan:
        found.append(
            f"a rank waits {100 * waiting / makespan:.0f} % of the step for messages; "
            "more microbatches, another kind or a longer warm-up would hide more of it"
        )
    return found


def report(trace: Trace, costs: Costs | None = None) -> StepReport:
    r"""Set what a traced step took beside what the simulator predicts.

    Args:
        trace: of at least one complete step; the latest is reported.
        costs: to predict with, for example those of :func:`profile`; those that the
            trace itself tells if None. Then what remains between measured and
            predicted is what the schedule cannot explain: other processes, Python,
            slow links.

    Returns:
        A :class:`StepReport`.

    Raises:
        ValueError: if the trace has no complete step.
    """
    schedule, step = trace.schedule, trace.latest()
    measured_costs = trace.costs()
    start = min(t for x in step for t in x.begin)
    makespan = 1e-9 * (max(max(x.end) for x in step) - start)
    measured = [
        _measure(schedule.actions(rank), stamps, makespan)
        for rank, stamps in enumerate(step)
    ]
    used = measured_costs if costs is None else costs
    ran = trace.simulate(used)
    static = [0.0] * schedule.ranks
    for stage, size in enumerate(_per_stage(used.static_bytes, schedule.stages)):
        static[schedule.placement[stage]] += size
    predicted = [
        # On paper a rank waits from the step's start to its own last end.
        Figures(
            ran.busy[rank],
            ran.idle[rank],
            max(end for _, end in spans) - ran.busy[rank],
            ran.peak_bytes[rank] - static[rank] or None,
        )
        for rank, spans in enumerate(ran.timeline())
    ]
    seconds = _seconds_of_stages(measured_costs, schedule.stages)
    return StepReport(
        schedule.kind,
        makespan,
        ran.makespan,
        measured,
        predicted,
        seconds,
        max(range(len(seconds)), key=seconds.__getitem__),
        _hints(schedule, seconds, makespan, max(x.waiting for x in measured)),
    )
