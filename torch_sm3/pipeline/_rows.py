# SPDX-License-Identifier: Apache-2.0
"""Schedules as a runner needs them: complete, with routes, ties and reductions."""

from __future__ import annotations

from collections.abc import Sequence

from torch_sm3.pipeline.schedule import Action, Schedule, ScheduleError


def row_of(schedule: Schedule, rank: int) -> list[Action]:
    """Return the actions of a rank, idle slots left out.

    Args:
        schedule: a lowered schedule.
        rank: the rank.
    """
    return [action for action in schedule.actions(rank) if action.op != "."]


def forward_of(
    schedule: Schedule, microbatches: int, routes: Sequence[tuple[int, int]]
) -> Schedule:
    """Return the schedule that runs the same stages forward only, chunk by chunk.

    Args:
        schedule: whose stages and ranks.
        microbatches: their number.
        routes: source and target of values that skip stages.
    """
    stages, placement = schedule.stages, ",".join(map(str, schedule.placement))
    lines = [
        f"schedule 1 kind=forward ranks={schedule.ranks} stages={stages} "
        f"microbatches={microbatches} placement={placement}"
    ]
    for rank in range(schedule.ranks):
        own = [s for s in range(stages) if schedule.placement[s] == rank]
        cells = [f"{stage}F{i}" for stage in own for i in range(microbatches)]
        lines.append(f"rank {rank}: " + " ".join(cells))
    return with_extras(Schedule.parse("\n".join(lines)), routes, [])


def with_extras(
    schedule: Schedule,
    routes: Sequence[tuple[int, int]],
    ties: Sequence[Sequence[int]],
) -> Schedule:
    """Add the routes and ties of the stages that a schedule does not declare.

    Args:
        schedule: as given.
        routes: source and target of each, in order.
        ties: stages of each tied weight, in order.

    Raises:
        ScheduleError: if the schedule declares one that no stage has.
    """
    head, _, rows = schedule.text.partition("\n")
    words = [w for w in head.split() if not w.startswith(("routes=", "ties="))]
    for name, known, wanted, form in (
        ("routes", schedule.routes, routes, ">"),
        ("ties", schedule.ties, ties, "+"),
    ):
        declared, others = [list(stages) for stages in known], [[*w] for w in wanted]
        for stages in declared:
            if stages not in others:
                raise ScheduleError(
                    f"PipelineRunner: expected stages with the {name} {declared} of "
                    f"the schedule, but got {[[*w] for w in wanted]} (argument "
                    "'stages')"
                )
            others.remove(stages)
        # Those of the schedule keep their numbers.
        texts = [form.join(map(str, stages)) for stages in declared + others]
        words += [f"{name}={','.join(texts)}"] * bool(texts)
    return Schedule.parse(" ".join(words) + "\n" + rows)


def check_order(schedule: Schedule) -> None:
    """Refuse a schedule whose sums would depend on it.

    Args:
        schedule: of a deterministic run.

    Raises:
        ScheduleError: naming a backward that is not in microbatch order.
    """
    for rank in range(schedule.ranks):
        latest: dict[tuple[str, int], int] = {}
        for action in row_of(schedule, rank):
            if action.op not in ("B", "I", "W"):
                continue
            key = action.op, action.stage
            if latest.get(key, -1) > action.microbatch:
                raise ScheduleError(
                    f"PipelineRunner: expected backwards in microbatch order for a "
                    f"deterministic run, but got {action.text} after "
                    f"{action._replace(microbatch=latest[key]).text} (argument "
                    "'schedule')"
                )
            latest[key] = action.microbatch


def with_collectives(
    row: list[Action], ties: dict[int, int], stages: Sequence[int]
) -> list[Action]:
    """Add the reductions that a row leaves out, at its end.

    Args:
        row: of this rank.
        ties: number of each tied weight of this rank, to its stage here.
        stages: of this rank, in the order of their last weight gradients.
    """
    known = {(op, i if op == "TIE_REDUCE" else s) for op, s, i, *_ in row}
    added = [
        Action("TIE_REDUCE", stage, number)
        for number, stage in sorted(ties.items())
        if ("TIE_REDUCE", number) not in known
    ]
    added += [
        Action("REDUCE_GRAD", stage, 0)
        for stage in stages
        if ("REDUCE_GRAD", stage) not in known
    ]
    return row + added


def with_validation(row: Sequence[Action]) -> list[Action]:
    """Put VALIDATE before the first backward of a row that has none.

    Args:
        row: of this rank.
    """
    if any(action.op == "VALIDATE" for action in row):
        return list(row)
    first = next(i for i, action in enumerate(row) if action.op in ("B", "I"))
    return [*row[:first], Action("VALIDATE", 0, 0), *row[first:]]


def reduction_order(row: Sequence[Action]) -> list[int]:
    """Return the stages of a row in the order in which they are reduced.

    Args:
        row: of this rank.
    """
    asked = [a.stage for a in row if a.op == "REDUCE_GRAD"]
    done = [a.stage for a in reversed(row) if a.op in ("B", "W")]
    late = list(dict.fromkeys(done))[::-1]
    return asked + [stage for stage in late if stage not in asked]
