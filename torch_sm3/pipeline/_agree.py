# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a runner compare before they begin."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from torch_sm3 import _library
from torch_sm3.pipeline._options import Options, check_options, fail, refuse
from torch_sm3.pipeline._rows import check_order, with_extras
from torch_sm3.pipeline._ties import Member, combined, described, numbered, stages_of
from torch_sm3.pipeline.schedule import Schedule, ScheduleError
from torch_sm3.pipeline.simulator import verify
from torch_sm3.pipeline.stage import Stage


class _Record(NamedTuple):
    schedule: str
    digest: str
    options: Options
    version: str
    problem: tuple[str, str] | None
    routes: list[tuple[int, int]]
    ties: dict[str, list[Member]]
    kwargs: list[str]


class Agreement(NamedTuple):
    """What all ranks know of each other.

    Attributes:
        schedule: with its messages.
        routes: source and target of all values that skip stages.
        ties: members of each tied weight.
        kwargs: names that any stage takes.
    """

    schedule: Schedule
    routes: list[tuple[int, int]]
    ties: dict[str, list[Member]]
    kwargs: frozenset[str]


def agree(
    group: dist.ProcessGroup | None,
    rank: int,
    size: int,
    stages: Sequence[Stage],
    schedule: Schedule,
    loss_fn: Callable[..., Any] | None,
    options: Options,
    replicas: dist.ProcessGroup | None,
    hook: Any = None,
) -> Agreement:
    """Check the arguments of a runner on all ranks together.

    Args:
        group: the ranks; None if there is one.
        rank: this rank.
        size: number of ranks.
        stages: the stages of this rank.
        schedule: what every rank is to do.
        loss_fn: loss of the last stage.
        options: the rest.
        replicas: the ranks with the same stages.
        hook: what reduces over them.

    Returns:
        What all ranks know of each other.

    Raises:
        ValueError: the same on all ranks, if anything does not fit on any of them.
    """
    record = _Record(
        "", "", options, str(_library.BUILD_INFO["version"]), None, [], {}, []
    )
    try:
        _check_kinds(stages, schedule, loss_fn, replicas, hook)
        record = record._replace(
            schedule=f"{schedule.kind} of {schedule.ranks} ranks and "
            f"{schedule.microbatches} microbatches",
            digest=hashlib.sha256(schedule.text.encode()).hexdigest()[:12],
        )
        _check(rank, size, stages, schedule, loss_fn, options, replicas)
        pairs = ((s.index, t) for s in stages for to in s.routes.values() for t in to)
        record = record._replace(
            routes=sorted(set(pairs)),
            ties=described(stages, rank),
            kwargs=sorted({name for stage in stages for name in stage.kwargs}),
        )
    except (ValueError, TypeError, RuntimeError) as error:
        record = record._replace(problem=(type(error).__name__, str(error)))
    records: list[Any] = [record]
    if group is not None:
        records = [None] * size
        dist.all_gather_object(records, record, group=group)
    _compare(records)
    routes = sorted(route for other in records for route in other.routes)
    ties = combined(other.ties for other in records)
    shared = sorted(stages_of(members) for members in ties.values())
    shared = [stages for stages in shared if len(stages) > 1]
    lowered = with_extras(schedule, routes, shared).lower()
    verify(lowered, max_pending=options.max_pending).raise_if_invalid()
    if options.deterministic:
        check_order(lowered)
    ties = numbered(ties, lowered.ties)
    names = frozenset(name for other in records for name in other.kwargs)
    return Agreement(lowered, routes, ties, names)


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
                f"PipelineRunner: expected {first.schedule} ({first.digest}) as on "
                f"rank 0, but got {record.schedule} ({record.digest}) on rank {rank} "
                "(argument 'schedule')"
            )
        for field, mine in record.options._asdict().items():
            theirs = getattr(first.options, field)
            if mine != theirs:
                raise ValueError(
                    f"PipelineRunner: expected {theirs!r} as on rank 0, but got "
                    f"{mine!r} on rank {rank} (argument '{field}')"
                )


_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error
    for error in (ValueError, TypeError, RuntimeError, ScheduleError)
}


def _check_kinds(
    stages: Any, schedule: Any, loss_fn: Any, replicas: Any, hook: Any
) -> None:
    """Refuse arguments of another kind; here, so that no rank waits for this one."""
    if not isinstance(schedule, Schedule):
        refuse("a Schedule", schedule, "schedule")
    if isinstance(stages, Stage):
        raise TypeError(
            "PipelineRunner: expected a list of Stage objects, but got one Stage "
            "(argument 'stages')"
        )
    if not isinstance(stages, Sequence):
        refuse("a list of Stage objects", stages, "stages")
    for stage in stages:
        if not isinstance(stage, Stage):
            refuse("Stage objects", stage, "stages")
    if loss_fn is not None and not callable(loss_fn):
        refuse("a function of output and target", loss_fn, "loss_fn")
    if replicas is not None and not isinstance(replicas, dist.ProcessGroup):
        refuse("a process group that this rank is in", replicas, "data_parallel")
    if hook is not None and not (isinstance(hook, Sequence) and len(hook) == 2):
        refuse("(state, function), a communication hook as of DDP", hook, "hook")
    if hook is not None and not callable(hook[1]):
        refuse("a function of state and bucket", hook[1], "hook")


def _check(
    rank: int,
    size: int,
    stages: Sequence[Stage],
    schedule: Schedule,
    loss_fn: Callable[..., Any] | None,
    options: Options,
    replicas: dist.ProcessGroup | None,
) -> None:
    if schedule.ranks != size:
        fail(f"a schedule of {size} ranks", schedule.ranks, "schedule")
    indices = sorted(stage.index for stage in stages)
    own = [s for s, place in enumerate(schedule.placement) if place == rank]
    if indices != own:
        fail(f"the stages {own}, each once", indices, "stages")
    for stage in stages:
        for target in (to for targets in stage.routes.values() for to in targets):
            if target >= schedule.stages:
                fail(f"a route to one of {schedule.stages} stages", target, "routes")
        _check_wrappers(stage, schedule, options)
    ops = {op for op, *_ in schedule.actions(rank)}
    if loss_fn is None and ops & {"B", "I"}:
        fail("a loss_fn for a schedule with backwards", None, "loss_fn")
    if options.hook and replicas is None:
        fail("data_parallel, the group of the hook's ranks", None, "data_parallel")
    check_options(options, schedule.ranks)


def _check_wrappers(stage: Stage, schedule: Schedule, options: Options) -> None:
    """Refuse modules that reduce or shard by themselves without being told how."""
    if stage.ddp is not None and stage.ddp._comm_hooks and not options.hook:
        fail(
            f"hook=(state, function), since the DistributedDataParallel of stage "
            f"{stage.index} has a hook that its forward and backward would not call",
            None,
            "hook",
        )
    if not any(
        hasattr(m, "_get_fsdp_state") or _is_fsdp1(m) for m in stage.module.modules()
    ):
        return
    rank = schedule.placement[stage.index]
    if not any(
        op == "UNSHARD" and s == stage.index for op, s, *_ in schedule.actions(rank)
    ):
        raise RuntimeError(
            f"PipelineRunner: expected UNSHARD and RESHARD actions for stage "
            f"{stage.index}, since its module is sharded by FSDP, but got a schedule "
            f"without; add '{stage.index}UNSHARD' before its first forward (argument "
            "'schedule')"
        )


def _is_fsdp1(module: Any) -> bool:
    return type(module).__name__ == "FullyShardedDataParallel"
