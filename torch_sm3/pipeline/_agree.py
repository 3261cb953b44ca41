# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a runner compare before they begin."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from torch_sm3 import _library
from torch_sm3.pipeline.schedule import Schedule, ScheduleError
from torch_sm3.pipeline.stage import Stage

REDUCTIONS = ("mean", "samples", "sum")


class Options(NamedTuple):
    """Options of a runner that must be equal on all ranks."""

    loss_reduction: str
    batch_dim: int
    timeout: float
    max_pending: int


class _Record(NamedTuple):
    schedule: str
    digest: str
    options: Options
    version: str
    problem: tuple[str, str] | None


def forward_of(schedule: Schedule) -> Schedule:
    """Return the schedule that runs the same stages forward only, chunk by chunk."""
    stages, m = schedule.stages, schedule.microbatches
    lines = [
        f"schedule 1 kind=forward ranks={schedule.ranks} stages={stages} "
        f"microbatches={m} placement={','.join(map(str, schedule.placement))}"
    ]
    for rank in range(schedule.ranks):
        own = [s for s in range(stages) if schedule.placement[s] == rank]
        cells = [f"{stage}F{i}" for stage in own for i in range(m)]
        lines.append(f"rank {rank}: " + " ".join(cells))
    return Schedule.parse("\n".join(lines))


def steps_of(schedule: Schedule, rank: int) -> list[tuple[str, int, int]]:
    """Return operation, stage and microbatch of each action that a step runs."""
    idle = {".", "REDUCE_GRAD", "OPTIM", "VALIDATE", "UNSHARD", "RESHARD"}
    return [action[:3] for action in schedule.actions(rank) if action.op not in idle]


def check_complete(schedule: Schedule) -> None:
    """Refuse a lowered schedule that leaves out or repeats what a step needs.

    Args:
        schedule: a lowered schedule.

    Raises:
        ScheduleError: naming the first action that is missing or too much.
    """
    rows = [steps_of(schedule, rank) for rank in range(schedule.ranks)]
    got = Counter(action for row in rows for action in row)
    training = any(op == "B" for op, _, _ in got)
    place = schedule.placement
    wanted = Counter[tuple[str, int, int]]()
    for stage in range(schedule.stages):
        ops = ["F"] + ["B"] * training
        for other, first, second in (
            (stage - 1, "RECV_F", "SEND_B"),
            (stage + 1, "SEND_F", "RECV_B"),
        ):
            if 0 <= other < schedule.stages and place[other] != place[stage]:
                ops += [op for op in (first, second) if training or op[-1] == "F"]
        wanted.update(
            (op, stage, i) for op in ops for i in range(schedule.microbatches)
        )
    for op, stage, i in sorted((wanted - got) + (got - wanted)):
        raise ScheduleError(
            f"Schedule: expected {stage}{op}{i} {wanted[op, stage, i]} times, but got "
            f"{got[op, stage, i]} (argument 'schedule')"
        )


def agree(
    group: dist.ProcessGroup | None,
    rank: int,
    size: int,
    stages: Sequence[Stage],
    schedule: Schedule,
    loss_fn: Callable[..., Any] | None,
    options: Options,
) -> Schedule:
    """Check the arguments of a runner on all ranks together.

    Args:
        group: the ranks; None if there is one.
        rank: this rank.
        size: number of ranks.
        stages: the stages of this rank.
        schedule: what every rank is to do.
        loss_fn: loss of the last stage.
        options: the rest.

    Returns:
        The schedule with its messages.

    Raises:
        ValueError: the same on all ranks, if anything does not fit on any of them.
    """
    problem: tuple[str, str] | None = None
    lowered = schedule
    try:
        lowered = schedule.lower()
        check_complete(lowered)
        _check(rank, size, stages, schedule, loss_fn, options)
    except (ValueError, TypeError) as error:
        problem = type(error).__name__, str(error)
    digest = hashlib.sha256(lowered.text.encode()).hexdigest()[:12]
    name = (
        f"{schedule.kind} of {schedule.ranks} ranks and {schedule.microbatches} "
        f"microbatches ({digest})"
    )
    version = str(_library.BUILD_INFO["version"])
    record = _Record(name, digest, options, version, problem)
    records: list[Any] = [record]
    if group is not None:
        records = [None] * size
        dist.all_gather_object(records, record, group=group)
    _compare(records)
    return lowered


def _compare(records: list[_Record]) -> None:
    for rank, record in enumerate(records):
        if record.problem is not None:
            kind, text = record.problem
            where = f", on rank {rank}" if len(records) > 1 else ""
            raise _ERRORS[kind](text + where)
    first = records[0]
    for rank, record in enumerate(records):
        if record.version != first.version:
            raise ValueError(
                f"PipelineRunner: expected torch_sm3 {first.version} as on rank 0, but "
                f"got {record.version} on rank {rank}"
            )
        if record.digest != first.digest:
            raise ScheduleError(
                f"PipelineRunner: expected {first.schedule} as on rank 0, but got "
                f"{record.schedule} on rank {rank} (argument 'schedule')"
            )
        for field, mine in record.options._asdict().items():
            theirs = getattr(first.options, field)
            if mine != theirs:
                raise ValueError(
                    f"PipelineRunner: expected {theirs!r} as on rank 0, but got "
                    f"{mine!r} on rank {rank} (argument '{field}')"
                )


_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error for error in (ValueError, TypeError, ScheduleError)
}


def _check(
    rank: int,
    size: int,
    stages: Sequence[Stage],
    schedule: Schedule,
    loss_fn: Callable[..., Any] | None,
    options: Options,
) -> None:
    def fail(expected: str, got: Any, argument: str) -> None:
        raise ValueError(
            f"PipelineRunner: expected {expected}, but got {got} "
            f"(argument '{argument}')"
        )

    if schedule.ranks != size:
        fail(f"a schedule of {size} ranks", schedule.ranks, "schedule")
    for stage in stages:
        if not isinstance(stage, Stage):
            raise TypeError(
                f"PipelineRunner: expected Stage objects, but got "
                f"{type(stage).__name__} (argument 'stages')"
            )
    indices = sorted(stage.index for stage in stages)
    own = [s for s, place in enumerate(schedule.placement) if place == rank]
    if indices != own:
        fail(f"the stages {own}, each once", indices, "stages")
    if loss_fn is None and any(op == "B" for op, _, _ in steps_of(schedule, rank)):
        fail("a loss_fn for a schedule with backwards", None, "loss_fn")
    if options.loss_reduction not in REDUCTIONS:
        fail(
            f"loss_reduction in {{{', '.join(REDUCTIONS)}}}",
            repr(options.loss_reduction),
            "loss_reduction",
        )
    if not options.timeout > 0:
        fail("a timeout above 0 s", options.timeout, "timeout")
    if options.max_pending < 1:
        fail("max_pending of at least 1", options.max_pending, "max_pending")
