# SPDX-License-Identifier: Apache-2.0
"""Texts and files of any bytes are read or refused; nothing else ever happens."""

from __future__ import annotations

import random

import pytest
from helpers.pipeline_random import random_plan
from hypothesis import example, given, settings
from hypothesis import strategies as st

from torch_sm3.pipeline import Schedule, ScheduleError

FUZZ = settings(max_examples=400, deadline=None, derandomize=True)
HEAD = "schedule 1 kind=x ranks=1 stages=1 microbatches=1 placement=loop\n"
# What a schedule is made of, and what it is not.
WORDS = [
    *("schedule 1", "kind=x", "ranks=2", "stages=3", "microbatches=4294967295"),
    *("placement=loop", "placement=v", "placement=0,1,0", "routes=0>2", "ties=0+1"),
    *("rank 0:", "rank 1:", "rank 99999999999:", "rank", "# schedule 1 ", "#", "\n"),
    *("\r\n", ",", '"', " ", ".", "0F0", "1B0", "2I1", "0W4294967295", "65535F1"),
    *("(0F0;1B0)OVERLAP_F_B", "0SEND_F0>2", "2RECV_F0<0", "OPTIM", "VALIDATE"),
    *("0TIE_REDUCE1", "0REDUCE_GRAD", "0UNSHARD", "-1F0", "0F-1", "0F1e3", "\0", "é"),
]


def read(text: str) -> None:
    """Read a text in both forms; what is accepted must come back."""
    for reader in (Schedule.parse, lambda t: Schedule.from_csv(t + "\n")):
        try:
            schedule = reader(text)
        except ScheduleError as error:
            assert "expected" in str(error) and "but got" in str(error)
        else:
            assert Schedule.parse(schedule.text) == schedule


@FUZZ
@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    read(data.decode("latin-1"))
    read(HEAD + data.decode("latin-1"))


@FUZZ
@given(st.lists(st.sampled_from(WORDS), max_size=40), st.sampled_from(["", " "]))
@example(["# schedule 1 ", HEAD[11:], "0F0,0B0"], "")
def test_any_words(words: list[str], between: str) -> None:
    read(between.join(words))


@FUZZ
@given(st.integers(0, 2**32 - 1))
def test_spoiled_texts(seed: int) -> None:
    """Delete, double, swap and overwrite pieces of something right."""
    draw = random.Random(seed)
    schedule = Schedule.parse(random_plan(draw).text())
    schedule = draw.choice([schedule, schedule.lower()])
    text = draw.choice([schedule.text, schedule.to_csv()])
    for _ in range(draw.choice([1, 1, 2, 5])):
        i, j = sorted(draw.randrange(len(text) + 1) for _ in range(2))
        j = min(j, i + draw.choice([1, 1, 3, 40]))
        piece = text[i:j]
        other = draw.choice(
            ["", piece * 2, draw.choice(WORDS), chr(draw.randrange(256))]
        )
        text = text[:i] + other + text[j:]
    read(text)


@FUZZ
@given(st.integers(0, 2**32 - 1))
def test_a_spoiled_cell_is_named_with_its_place(seed: int) -> None:
    draw = random.Random(seed)
    schedule = Schedule.parse(random_plan(draw).text())
    rank = draw.choice([r for r in range(schedule.ranks) if schedule.actions(r)])
    bad = draw.choice(["0X0", "F", "0F", "(0F0)", "0f0", "..", "0F0>", "x" * 300, "é"])
    head, *rows = schedule.text.splitlines()
    _, _, *cells = rows[rank].split()
    column = draw.randrange(len(cells))
    cells[column] = bad
    rows[rank] = f"rank {rank}: {' '.join(cells)}"
    files = schedule.to_csv().splitlines()
    files[1 + rank] = ",".join(cells)
    for reader, text in (
        (Schedule.parse, "\n".join([head, *rows, ""])),
        (Schedule.from_csv, "\r\n".join([*files, ""])),
        # Without the head all is inferred from the cells.
        (Schedule.from_csv, "\r\n".join([*files[1:], ""])),
    ):
        if text.startswith(tuple("0123456789(,")) and schedule.ties:
            continue
        with pytest.raises(ScheduleError) as caught:
            reader(text)
        assert f"but got '{bad}' in row {rank}, column {column}" in str(caught.value)
