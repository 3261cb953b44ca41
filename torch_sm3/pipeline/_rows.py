# SPDX-License-Identifier: Apache-2.0
"""Schedules as a runner needs them: complete, with routes, ties and reductions."""

from __future__ import annotations

from collections import Counter
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
    """Add routes and ties of the stages to a schedule that declares none.

    Args:
        schedule: as given.
        routes: source and target of each, in order.
        ties: stages of each tied weight, in order.

    Raises:
        ScheduleError: if the schedule declares others.
    """
    head, _, rows = schedule.text.partition("\n")
    for name, known, wanted, form in (
        ("routes", schedule.routes, routes, ">"),
        ("ties", schedule.ties, ties, "+"),
    ):
        words = [form.join(map(str, stages)) for stages in wanted]
        if known and sorted(map(list, known)) != sorted(map(list, wanted)):
            raise ScheduleError(
                f"PipelineRunner: expected stages with the {name} {known} of the "
                f"schedule, but got {list(wanted)} (argument 'stages')"
            )
        if words and not known:
            head += f" {name}={','.join(words)}"
    return Schedule.parse(f"{head}\n{rows}")


def check_complete(schedule: Schedule) -> None:
    """Refuse a lowered schedule that leaves out or repeats what a step needs.

    Args:
        schedule: a lowered schedule.

    Raises:
        ScheduleError: naming the first action that is missing or too much.
    """
    rows = [row_of(schedule, rank) for rank in range(schedule.ranks)]
    got = Counter(
        (op, stage, i)
        for row in rows
        for op, stage, i, route, _ in row
        if route is None and (op in "FBIW" or op[:4] in ("SEND", "RECV"))
    )
    training = any(op in ("B", "I") for op, _, _ in got)
    place = schedule.placement
    wanted = Counter[tuple[str, int, int]]()
    for stage in range(schedule.stages):
        ops = ["F"]
        for other, first, second in (
            (stage - 1, "RECV_F", "SEND_B"),
            (stage + 1, "SEND_F", "RECV_B"),
        ):
            if 0 <= other < schedule.stages and place[other] != place[stage]:
                ops += [op for op in (first, second) if training or op[-1] == "F"]
        for i in range(schedule.microbatches):
            split = training and got["I", stage, i] > 0
            back = ["I", "W"] if split else ["B"] * training
            wanted.update((op, stage, i) for op in ops + back)
    for op, stage, i in sorted((wanted - got) + (got - wanted)):
        raise ScheduleError(
            f"Schedule: expected {stage}{op}{i} {wanted[op, stage, i]} times, but got "
            f"{got[op, stage, i]} (argument 'schedule')"
        )


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
