# SPDX-License-Identifier: Apache-2.0
"""CSV: what torch writes, what it reads, and what only we can say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers.torch_schedules import (
    IN_A_V,
    LOOPED,
    torch_csv,
    torch_reads,
    torch_single_csv,
)

from torch_sm3.pipeline import Schedule, ScheduleError, kinds, plan, verify


def planned(p_max: int, m_max: int) -> list[Schedule]:
    """Plan every kind wherever it is legal."""
    plans = []
    for kind in kinds():
        for p in range(1, p_max + 1):
            for m in range(1, m_max + 1):
                for v in (None, 1, 2, 3):
                    try:
                        plans.append(plan(kind, p, m, chunks=v))
                    except ValueError:
                        continue
    return plans


def cells_of(schedule: Schedule, rank: int) -> list[str]:
    """Write the cells of a row as torch does."""
    cells = []
    row = iter(schedule.actions(rank))
    for action in row:
        text = action.text.replace(".", "")
        if action.paired:
            text = f"({text};{next(row).text})OVERLAP_F_B"
        cells.append(text)
    return cells


# --- what torch writes -----------------------------------------------------------


@pytest.mark.parametrize("name", LOOPED + IN_A_V)
@pytest.mark.parametrize("messages", [False, True])
def test_what_torch_writes_is_read(name: str, messages: bool) -> None:
    for p, v in [(2, 2), (3, 2), (4, 2), (2, 3)]:
        v = 2 if name in IN_A_V else v
        for m in (2 * p, 4 * p):
            text = torch_csv(name, p, m, v, messages=messages)
            schedule = Schedule.from_csv(text, kind=name)
            stages = p * v
            assert schedule.kind == name
            assert (schedule.ranks, schedule.stages) == (p, stages)
            assert schedule.microbatches == m
            assert schedule.placement == [
                2 * p - 1 - s if name in IN_A_V and s >= p else s % p
                for s in range(stages)
            ]
            rows = [cells_of(schedule, rank) for rank in range(p)]
            assert rows == [line.split(",") for line in text.splitlines()]
            assert schedule.to_csv(dialect="torch") == text
            lowered = schedule.lower()
            if messages:
                # Of what torch wrote nothing is lost or moved, only OPTIM is added.
                assert [row[:-1] for row in map(lowered.actions, range(p))] == [
                    schedule.actions(rank) for rank in range(p)
                ]
            verify(lowered).raise_if_invalid()


def test_torch_pairs_are_pairs() -> None:
    schedule = Schedule.from_csv(torch_csv("ScheduleDualPipeV", 2, 4))
    pairs = [a for a in schedule.actions(0) if a.paired]
    assert [a.text for a in pairs] == ["0F3", "3F2", "3F3"]


def test_torch_gpipe_is_ours() -> None:
    for p, m in [(2, 3), (4, 8)]:
        read = Schedule.from_csv(torch_single_csv("ScheduleGPipe", p, m))
        for rank in range(p):
            actions = [a for a in read.actions(rank) if a.op != "REDUCE_GRAD"]
            assert actions == plan("gpipe", p, m).actions(rank)


def test_an_order_that_cannot_run_is_refused_with_the_grid() -> None:
    # torch 2.14.1 writes F1 ... Fm for the last rank of its 1F1B.
    text = torch_single_csv("Schedule1F1B", 3, 4)
    if text.splitlines()[2].startswith("2F0"):
        text = "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n"
    with pytest.raises(ScheduleError) as caught:
        Schedule.from_csv(text)
    lines = str(caught.value).splitlines()
    assert re.fullmatch(r"step +rank 0 +rank 1.*", lines[1]), lines
    assert any("[" in line for line in lines[2:]), lines


@pytest.mark.parametrize(
    ("text", "marked"),
    [
        ("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n", "[0B0]"),
        ("0F0,1B0\n,\n", ""),
        (
            "0F0,0SEND_F0,0B0,0F1,0SEND_F1,0B1\n1RECV_F1,1F1,1B1,1RECV_F0,1F0,1B0\n",
            "[",
        ),
    ],
)
def test_orders_that_nobody_can_run_are_refused(text: str, marked: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        Schedule.from_csv(text)
    assert marked in str(caught.value)


# --- what torch reads ------------------------------------------------------------


def test_every_plan_comes_back_through_both_dialects() -> None:
    plans = planned(4, 9)
    assert {schedule.kind for schedule in plans} >= {"1f1b", "zbv", "dualpipe_v"}
    for schedule in plans:
        text = schedule.to_csv(dialect="torch")
        assert torch_reads(text) == [
            cells_of(schedule, rank) for rank in range(schedule.ranks)
        ]
        assert Schedule.from_csv(text, kind=schedule.kind) == schedule
        assert Schedule.from_csv(schedule.to_csv()) == schedule


def test_lowered_plans_come_back_through_our_own() -> None:
    for schedule in planned(3, 4):
        lowered = schedule.lower()
        assert Schedule.from_csv(lowered.to_csv()) == lowered
    direct = plan("1f1b", 4, 3, split=2, via="direct").with_ties([(0, 3)]).lower()
    assert direct.routes == [(1, 3)]
    assert Schedule.from_csv(direct.to_csv()) == direct


@pytest.mark.parametrize(
    ("schedule", "named"),
    [
        (plan("1f1b", 2, 1).lower(), "'OPTIM' in row 0, column 5"),
        (plan("gpipe", 3, 2).with_routes([(1, 2)]), "'1F0' in row 1, column 0"),
        (plan("gpipe", 2, 2).with_ties([(0, 1)]), "'0B0' in row 0, column 2"),
    ],
)
def test_what_torch_cannot_say_is_refused(schedule: Schedule, named: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        schedule.to_csv(dialect="torch")
    assert f"torch.distributed.pipelining knows, but got {named}" in str(caught.value)


def test_messages_alone_are_within_torch_s_words() -> None:
    lowered = plan("forward", 2, 2, chunks=2).lower()
    text = lowered.to_csv(dialect="torch")
    assert text.startswith("0F0,0SEND_F0,0F1,2RECV_F0,0SEND_F1,")
    assert Schedule.from_csv(text, kind="forward") == lowered


def test_what_no_cell_says_is_refused_too() -> None:
    head = "schedule 1 kind=x ranks=3 stages=2 microbatches=2 placement=loop\n"
    schedule = Schedule.parse(head + "rank 0: 0F0\nrank 1: 1F0\nrank 2:\n")
    with pytest.raises(ScheduleError, match="2 ranks, 2 stages and 1 microbatches"):
        schedule.to_csv(dialect="torch")
    with pytest.raises(ValueError, match=r"dialect in .*, but got 'excel'"):
        schedule.to_csv(dialect="excel")


# --- files -----------------------------------------------------------------------


def test_our_own_dialect_is_one_comment_and_the_rows() -> None:
    schedule = Schedule.from_csv("0F0,,0B0,\n,1F0,1B0\n", kind="tiny")
    assert schedule.text == (
        "schedule 1 kind=tiny ranks=2 stages=2 microbatches=1 placement=loop\n"
        "rank 0: 0F0 . 0B0 .\nrank 1: . 1F0 1B0\n"
    )
    assert schedule.to_csv() == (
        "# schedule 1 kind=tiny ranks=2 stages=2 microbatches=1 placement=loop\r\n"
        "0F0,,0B0,\r\n,1F0,1B0\r\n"
    )


def test_spaces_quotes_and_comments_do_not_matter() -> None:
    text = '# a plan\n"0F0" , "0B0"\n# of two\n\t1F0,  1B0 \n\n\n'
    assert Schedule.from_csv(text, kind="gpipe") == plan("gpipe", 2, 1)


def test_rows_without_cells_and_of_one_idle_slot_are_told_apart() -> None:
    head = "schedule 1 kind=x ranks=3 stages=1 microbatches=1 placement=1\n"
    schedule = Schedule.parse(head + "rank 0:\nrank 1: 0F0 0B0\nrank 2: .\n")
    assert schedule.to_csv().splitlines()[1:] == ["", "0F0,0B0", '""']
    assert Schedule.from_csv(schedule.to_csv()) == schedule
    text = schedule.to_csv(dialect="torch")
    assert Schedule.from_csv(text, kind="x") == schedule


def test_files_are_told_from_text_and_their_form_from_the_first_line(
    tmp_path: Path,
) -> None:
    schedule = plan("zbv", 2, 4)
    for name in ("s.csv", "s.txt"):
        schedule.save(tmp_path / name)
        assert Schedule.load(tmp_path / name) == schedule
    assert (tmp_path / "s.txt").read_text() == schedule.text
    assert schedule.to_csv(tmp_path / "t", dialect="torch").startswith("0F0,0F1,")
    for source in (tmp_path / "t", str(tmp_path / "t")):
        assert Schedule.from_csv(source, kind="zbv") == schedule
    assert Schedule.load(tmp_path / "t").kind == "csv"
    one = plan("none", 1, 1)
    (tmp_path / "one").write_text("0F0,0B0")
    assert Schedule.load(tmp_path / "one").lower() != one.lower()
    assert Schedule.from_csv(tmp_path / "one", kind="none") == one
    (tmp_path / "t.txt").write_text("# mine\n\n" + schedule.text)
    assert Schedule.load(tmp_path / "t.txt") == schedule


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n", "a cell with a stage, but got none"),
        (",OPTIM\n", "a cell with a stage, but got none"),
        ("0F0,0X0\n", "but got '0X0' in row 0, column 1"),
        ("0F0\n0F1,1F0\n", "stage 0 in row 0 only, but got '0F1' in row 1, column 0"),
        ("0F0\n2F0\n", "actions of each stage below 3, but got none of stage 1"),
        ("0TIE_REDUCE0\n", "a first line with the ties, but got '0TIE_REDUCE0' in row"),
        ("1SEND_F0>0\n", "a route to a later stage, but got '1SEND_F0>0' in row 0"),
        ("0SEND_F0>9\n", "actions of stage 9, but got only messages to it"),
        ("0F0,0B0,(0F1;0F2)OVERLAP_F_B\n", "in row 0, column 2"),
        ("0F4294967295\n", "fewer microbatches, but got '0F4294967295' in row 0"),
        (
            "# schedule 1 kind=x ranks=1 stages=1 microbatches=1 placement=loop\n"
            "0F0,0B0\n0F0\n",
            "1 rows, but got '0F0' in row 1, column 0",
        ),
        ("# schedule 2 kind=x\n0F0\n", "'schedule 1 ...' in the first line"),
    ],
)
def test_unreadable_cells_are_named(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=r"^Schedule(.from_csv)?: ") as caught:
        Schedule.from_csv(text)
    assert message in str(caught.value)
