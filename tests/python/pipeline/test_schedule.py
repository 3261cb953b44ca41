# SPDX-License-Identifier: Apache-2.0
"""Text form, planner and lowering against slow oracles."""

from __future__ import annotations

import pickle
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.pipeline_oracle import deadlocks, plan_rows, simulate

from torch_sm3.pipeline import Action, Schedule, ScheduleError, plan

KINDS = ("none", "gpipe", "1f1b", "forward")


def kinds_of(p: int) -> tuple[str, ...]:
    return KINDS if p == 1 else KINDS[1:]


def rows_of(schedule: Schedule) -> list[list[tuple[str, int, int]]]:
    return [
        [action[:3] for action in schedule.actions(rank)]
        for rank in range(schedule.ranks)
    ]


# --- text --------------------------------------------------------------------


@st.composite
def actions(draw: st.DrawFn, own: list[int], m: int, routes: list, ties: list) -> str:
    """Draw any cell of a rank that holds the stages `own`."""
    alone = draw(st.sampled_from([".", "OPTIM", "VALIDATE", ""]))
    if alone or not own:
        return alone or "."
    stage, i = draw(st.sampled_from(own)), draw(st.integers(0, m - 1))
    op = draw(
        st.sampled_from(
            "F B I W SEND_F RECV_F SEND_B RECV_B REDUCE_GRAD UNSHARD RESHARD "
            "TIE_REDUCE PAIR".split()
        )
    )
    if op in ("REDUCE_GRAD", "UNSHARD", "RESHARD"):
        return f"{stage}{op}"
    if op == "TIE_REDUCE":
        mine = [tie for tie, members in enumerate(ties) if stage in members]
        return f"{stage}{op}{draw(st.sampled_from(mine))}" if mine else "."
    if op == "PAIR":
        back = draw(st.sampled_from(own))
        kind, j = draw(st.sampled_from("BI")), draw(st.integers(0, m - 1))
        return f"({stage}F{i};{back}{kind}{j})OVERLAP_F_B"
    text = f"{stage}{op}{i}"
    # An activation leaves at the source of a route, its gradient at the target.
    end = 0 if op in ("SEND_F", "RECV_B") else 1
    others = [route[1 - end] for route in routes if route[end] == stage]
    if "_" in op and others and draw(st.booleans()):
        arrow = ">" if op.startswith("SEND") else "<"
        text += f"{arrow}{draw(st.sampled_from(others))}"
    return text


@st.composite
def schedules(draw: st.DrawFn) -> str:
    """Draw any readable schedule, sensible or not, in its canonical text."""
    ranks = draw(st.integers(1, 4))
    stages = draw(st.integers(1, 6))
    m = draw(st.integers(1, 2**32 - 1))
    placement = draw(
        st.lists(st.integers(0, ranks - 1), min_size=stages, max_size=stages)
    )
    loop = [s % ranks for s in range(stages)]
    v = [
        s % ranks if s // ranks % 2 == 0 else ranks - 1 - s % ranks
        for s in range(stages)
    ]
    name = ",".join(map(str, placement))
    name = "loop" if placement == loop else "v" if placement == v else name
    kind = draw(st.text("abcdefghijklmnopqrstuvwxyz_0123456789", min_size=1))
    text = (
        f"schedule 1 kind={kind} ranks={ranks} stages={stages} microbatches={m} "
        f"placement={name}"
    )
    pair = st.sets(st.integers(0, stages - 1), min_size=2, max_size=2)
    tie = st.sets(st.integers(0, stages - 1), min_size=2)
    routes, ties = [], []
    if stages > 1:
        routes = sorted({tuple(sorted(r)) for r in draw(st.lists(pair, max_size=3))})
        ties = [sorted(members) for members in draw(st.lists(tie, max_size=2))]
    if routes:
        text += " routes=" + ",".join(f"{a}>{b}" for a, b in routes)
    if ties:
        text += " ties=" + ",".join("+".join(map(str, t)) for t in ties)
    for rank in range(ranks):
        own = [s for s in range(stages) if placement[s] == rank]
        cells = draw(st.lists(actions(own, m, routes, ties), max_size=6))
        text += "\n" + " ".join([f"rank {rank}:", *cells])
    return text + "\n"


def line_of(schedule: Schedule, rank: int) -> str:
    """Write a row from what `actions` says."""
    row = iter(schedule.actions(rank))
    cells = [f"rank {rank}:"]
    for action in row:
        text = action.text
        cells.append(f"({text};{next(row).text})OVERLAP_F_B" if action.paired else text)
    return " ".join(cells)


@settings(max_examples=300, deadline=None)
@given(schedules())
def test_text_is_read_back_without_loss(text: str) -> None:
    schedule = Schedule.parse(text)
    assert schedule.text == text
    assert Schedule.parse(schedule.text) == schedule
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    rows = text.splitlines()[1:]
    assert rows == [line_of(schedule, rank) for rank in range(schedule.ranks)]


def test_pickles_hold_the_text_only() -> None:
    schedule = plan("zbv", 2, 4)
    restore, arguments = schedule.__reduce__()
    assert arguments == (schedule.text,) and restore(*arguments) == schedule


def test_actions_tell_routes_pairs_and_ties() -> None:
    schedule = Schedule.parse(
        "schedule 1 kind=x ranks=1 stages=3 microbatches=2 placement=loop "
        "routes=0>1,0>2 ties=0+2\n"
        "rank 0: 0SEND_F1>2 2RECV_F1<0 2SEND_B1>0 0RECV_B1<2 0SEND_F1 "
        "(0F0;2B1)OVERLAP_F_B 0TIE_REDUCE0 OPTIM\n"
    )
    assert schedule.routes == [(0, 1), (0, 2)] and schedule.ties == [[0, 2]]
    assert schedule.actions(0) == [
        Action("SEND_F", 0, 1, route=(0, 2)),
        Action("RECV_F", 2, 1, route=(0, 2)),
        Action("SEND_B", 2, 1, route=(0, 2)),
        Action("RECV_B", 0, 1, route=(0, 2)),
        Action("SEND_F", 0, 1),
        Action("F", 0, 0, paired=True),
        Action("B", 2, 1),
        Action("TIE_REDUCE", 0, 0),
        Action("OPTIM", 0, 0),
    ]
    with pytest.raises(ValueError, match=r"a rank from 0 to 0, but got 1"):
        schedule.actions(1)


def test_routes_and_ties_are_added_and_taken_away() -> None:
    plain = plan("gpipe", 3, 1)
    both = plain.with_routes([(1, 2), (0, 2)]).with_ties([(2, 0)])
    assert both.routes == [(0, 2), (1, 2)] and both.ties == [[0, 2]]
    assert both.with_routes([]).with_ties([]) == plain
    for wrong in ([(2, 0)], [(0, 3)], [(-1, 2)], [(0, 2), (0, 2)]):
        with pytest.raises(ScheduleError, match=r"Schedule: expected .*route"):
            plain.with_routes(wrong)
    for wrong in ([(0,)], [()], [(0, 0)], [(0, 3)]):
        with pytest.raises(ScheduleError, match="expected ties of two or more"):
            plain.with_ties(wrong)
    with pytest.raises(ScheduleError, match="expected a schedule that is not lowered"):
        plain.lower().with_ties([(0, 1)])


def test_comments_blank_lines_and_order_do_not_matter() -> None:
    text = (
        "# a plan\n\nschedule 1 ranks=2 kind=x placement=0,1 microbatches=1 stages=2"
        " # head\nrank 1:  1F0\t1B0\nrank 0: 0F0 . 0B0 # row\n"
    )
    schedule = Schedule.parse(text)
    assert schedule.text == (
        "schedule 1 kind=x ranks=2 stages=2 microbatches=1 placement=loop\n"
        "rank 0: 0F0 . 0B0\nrank 1: 1F0 1B0\n"
    )
    assert repr(schedule) == f"Schedule.parse({schedule.text!r})"
    assert hash(schedule) == hash(Schedule.parse(schedule.text))
    assert schedule != plan("1f1b", 2, 1) and schedule != "text"


HEAD = "schedule 1 kind=x ranks=2 stages=2 microbatches=2 placement=loop\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected 'schedule 1 ...' in the first line, but got ''"),
        ("schedule 2 kind=x", "expected 'schedule 1 ...' in the first line"),
        ("schedule 1 kind=x kind=y", "key=value, each key once, but got 'kind=y'"),
        ("schedule 1 kind=x", "a value of ranks in the first line, but got 'none'"),
        (HEAD.replace("=2 s", "=0 s"), "ranks from 1 to 65535, but got '0'"),
        (HEAD.replace("=loop", "=0,2"), "loop, v or ranks from 0 to 1, but got '2'"),
        (HEAD.replace("=loop", "=0"), "a placement of 2 stages, but got '0'"),
        (HEAD.replace("=loop", "=v x=1"), "no key besides .*, but got 'x'"),
        (HEAD + "rank 0: 0F0\n", "a line 'rank 1: ...', but got 'none'"),
        (HEAD + "rank 0:\nrank 0:\n", "each rank once, but got '0'"),
        (HEAD + "rank 7:\n", "a rank from 0 to 1, but got '7'"),
        (HEAD + "row 0:\n", "a line 'rank <r>: ...', but got 'row'"),
        (HEAD + "rank 0: 0F0 0X1\n", "but got '0X1' in row 0, column 1"),
        (HEAD + "rank 0: 0F0x\n", "but got '0F0x' in row 0, column 0"),
        (HEAD + "rank 0: 0F00\n", "but got '0F00' in row 0, column 0"),
        (HEAD + "rank 0: F0\n", "but got 'F0' in row 0, column 0"),
        (HEAD + "rank 0: 0F\n", "but got '0F' in row 0, column 0"),
        (HEAD + "rank 0: 70000F0\n", "but got '70000F0' in row 0, column 0"),
        (HEAD + "rank 0:\nrank 1: . 0F0\n", "stage 0 is on rank 0.*row 1, column 1"),
        (HEAD + "rank 0: 2F0\n", "a stage below 2, but got '2F0' in row 0, column 0"),
        (HEAD + "rank 0: 0F2\n", "a microbatch below 2, but got '0F2' in row 0"),
    ],
)
def test_unreadable_text_is_named(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=r"^Schedule: expected ") as caught:
        Schedule.parse(text)
    assert re.search(message, str(caught.value)), caught.value


# --- planner -----------------------------------------------------------------


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("m", [1, 2, 3, 4, 7, 16, 32])
def test_rows_bubble_and_peak_are_those_of_the_formulas(p: int, m: int) -> None:
    for kind in kinds_of(p):
        schedule = plan(kind, p, m)
        rows = rows_of(schedule)
        assert rows == plan_rows(kind, p, m), kind
        for f, b in [(1.0, 1.0), (1.0, 2.0), (2.0, 1.0)]:
            if kind == "forward":
                b = 0.0
            makespan, peaks = simulate(rows, p, f, b)
            assert makespan - m * (f + b) == (p - 1) * (f + b)
            if kind == "1f1b":
                assert peaks == [min(p - r, m) for r in range(p)]
            elif kind == "gpipe":
                assert peaks == [m] * p
            elif kind == "none":
                assert peaks == [1]


@pytest.mark.parametrize("v", [1, 2, 3, 4])
def test_looped_forward_has_its_bubble(v: int) -> None:
    for p in (1, 2, 3, 5):
        for m in range(1, 4 * p):
            schedule = plan("forward", p, m, chunks=v)
            assert schedule.stages == p * v
            assert rows_of(schedule) == plan_rows("forward", p, m, v)
            makespan, _ = simulate(rows_of(schedule), p * v)
            assert makespan - m * v == (p - 1) + (v - 1) * max(0, p - m)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1fb1", 2, 2), "}, but got '1fb1' (argument 'kind'), perhaps for '1f1b'"),
        (("gpipes", 2, 2), "perhaps for 'gpipe'"),
        (("1f1b", 0, 2), "ranks from 1 to 65535, but got 0 (argument 'ranks')"),
        (("1f1b", 2, 0), "but got 0 (argument 'microbatches')"),
        (("1f1b", 2, 2, 0), "but got 0 (argument 'chunks')"),
        (("1f1b", 2, 2, 2), "expected 1 chunk for kind 1f1b, but got 2 (argument"),
        (("none", 2, 2), "expected 1 rank for kind none, but got 2 (argument 'ranks')"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(arguments: tuple, message: str) -> None:
    kind, ranks, microbatches, *chunks = arguments
    with pytest.raises(ValueError, match=r"^plan: expected ") as caught:
        plan(kind, ranks, microbatches, chunks=chunks[0] if chunks else None)
    assert message in str(caught.value)


# --- lowering ----------------------------------------------------------------


def every_plan(p_max: int, m_max: int) -> list[Schedule]:
    plans = [
        plan(kind, p, m)
        for p in range(1, p_max + 1)
        for m in range(1, m_max + 1)
        for kind in kinds_of(p)
    ]
    return plans + [plan("forward", p, m, chunks=2) for p in (2, 3) for m in (1, 2, 3)]


def test_lowering_is_idempotent_and_keeps_the_computation() -> None:
    for schedule in every_plan(4, 5):
        lowered = schedule.lower()
        assert lowered.lower() == lowered
        assert Schedule.parse(lowered.text) == lowered
        for rank in range(schedule.ranks):
            compute = [a for a in lowered.actions(rank) if a.op in "FB"]
            assert compute == schedule.actions(rank)


def test_each_message_is_sent_and_received_once_in_one_order() -> None:
    for schedule in every_plan(4, 5):
        rows, place = rows_of(schedule.lower()), schedule.placement
        for op, step in (("F", 1), ("B", -1)):
            for a in range(schedule.ranks):
                for b in range(schedule.ranks):
                    sent = [
                        (s + step, i)
                        for o, s, i in rows[a]
                        if o == f"SEND_{op}" and place[s + step] == b
                    ]
                    received = [
                        (s, i)
                        for o, s, i in rows[b]
                        if o == f"RECV_{op}" and place[s - step] == a
                    ]
                    assert sent == received
        for row in rows:
            for at, (op, stage, i) in enumerate(row):
                if op.startswith("SEND"):
                    # Right after its producer; only RECVs of the gap lie between.
                    back = at - 1
                    while row[back][0].startswith("RECV"):
                        back -= 1
                    assert row[back] == (op[-1], stage, i)
                if op.startswith("RECV"):
                    assert (op[-1], stage, i) in row[at + 1 :]


def test_receives_stand_where_unit_costs_put_them() -> None:
    assert plan("1f1b", 2, 3).lower().text.splitlines()[1:] == [
        "rank 0: 0F0 0SEND_F0 0F1 0RECV_B0 0SEND_F1 0B0 0F2 0RECV_B1 0SEND_F2 0B1 "
        "0RECV_B2 0B2 0REDUCE_GRAD OPTIM",
        "rank 1: 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1RECV_F2 1SEND_B1 1F2 1B2 "
        "1SEND_B2 1REDUCE_GRAD OPTIM",
    ]


def test_no_interleaving_of_a_planned_schedule_deadlocks() -> None:
    for schedule in every_plan(3, 3):
        rows = rows_of(schedule.lower())
        assert not deadlocks(rows, schedule.placement, pending=1), schedule


def test_the_brute_force_finds_deadlocks() -> None:
    # Both ranks send twice before they receive: one pending send is too few.
    rows = [
        [("F", 0, 0), ("SEND_F", 0, 0), ("F", 0, 1), ("SEND_F", 0, 1),
         ("RECV_B", 0, 0), ("B", 0, 0), ("RECV_B", 0, 1), ("B", 0, 1)],
        [("RECV_F", 1, 0), ("F", 1, 0), ("B", 1, 0), ("SEND_B", 1, 0),
         ("SEND_B", 1, 0), ("RECV_F", 1, 1), ("F", 1, 1), ("B", 1, 1)],
    ]  # fmt: skip
    assert deadlocks(rows, [0, 1], pending=1)


def test_messages_within_a_rank_are_none() -> None:
    text = (
        "schedule 1 kind=x ranks=2 stages=4 microbatches=1 placement=0,1,1,0\n"
        "rank 0: 0F0 3F0 3B0 0B0\nrank 1: 1F0 2F0 2B0 1B0\n"
    )
    assert Schedule.parse(text).lower().text.splitlines()[1:] == [
        "rank 0: 0F0 3RECV_F0 0SEND_F0 3F0 3B0 0RECV_B0 3SEND_B0 3REDUCE_GRAD 0B0 "
        "0REDUCE_GRAD OPTIM",
        "rank 1: 1RECV_F0 1F0 2F0 2RECV_B0 2SEND_F0 2B0 2REDUCE_GRAD 1B0 "
        "1SEND_B0 1REDUCE_GRAD OPTIM",
    ]


def test_an_order_that_cannot_run_is_refused_with_those_who_wait() -> None:
    # The last rank runs F1 first, as torch 2.14.1 writes its 1F1B.
    text = HEAD + "rank 0: 0F0 0B0 0F1 0B1\nrank 1: 1F1 1B1 1F0 1B0\n"
    with pytest.raises(ScheduleError, match="rank 0 waits at 0B0, rank 1 waits at 1F1"):
        Schedule.parse(text).lower()
    text = HEAD + "rank 0: 0F0 0F0\nrank 1:\n"
    with pytest.raises(ScheduleError, match="each action once, but got 0F0 twice"):
        Schedule.parse(text).lower()
