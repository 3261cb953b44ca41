# SPDX-License-Identifier: Apache-2.0
"""Recorders, and clocks that agree."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_sm3.pipeline import Action, Schedule, plan
from torch_sm3.pipeline._recorder import Recorder, Stamps, estimate_offset

COLUMNS = len(Stamps._fields) - 1


def test_the_latest_steps_are_kept() -> None:
    schedule = plan("none", 1, 2).lower()
    row = schedule.actions(0)
    recorder = Recorder(schedule, 0, keep=2)
    columns = [[100 * c + i for i in range(len(row))] for c in range(COLUMNS)]
    for step in (1, 2, 3):
        recorder.add(step, row, columns)
    assert [x.step for x in recorder.steps] == [2, 3]
    assert [list(column) for column in recorder.steps[0][1:]] == columns
    with pytest.raises(ValueError):
        recorder.add(4, row, [[1]] * COLUMNS)
    with pytest.raises(ValueError):
        recorder.add(4, row, columns[:-1])


def test_what_a_runner_adds_or_leaves_out_moves_no_stamp() -> None:
    schedule = Schedule.parse(
        "schedule 1 kind=x ranks=1 stages=1 microbatches=1 placement=loop\n"
        "rank 0: . 0F0 . 0B0\n"
    )
    forward, backward = plan("none", 1, 1).actions(0)
    row = [forward, Action("VALIDATE", 0, 0), backward, Action("REDUCE_GRAD", 0, 0)]
    recorder = Recorder(schedule, 0)
    recorder.add(1, row, [[5, 6, 7, 8]] * COLUMNS)
    assert list(recorder.steps[0].end) == [0, 5, 0, 7]


# --- clocks ----------------------------------------------------------------


@given(
    st.integers(-(10**15), 10**15),
    st.lists(st.tuples(*[st.integers(0, 10**7)] * 4), min_size=1, max_size=20),
)
def test_the_offset_lies_within_its_error(
    offset: int, delays: list[tuple[int, int, int, int]]
) -> None:
    samples = []
    now = 0
    for there, inside, back, pause in delays:
        t0 = now + pause
        t1 = t0 + there + offset
        t2 = t1 + inside
        t3 = t2 - offset + back
        samples.append((t0, t1, t2, t3))
        now = t3
    found = estimate_offset(samples)
    assert abs(found.nanoseconds - offset) <= found.error
    best = min(there for there, *_ in delays) + min(back for _, _, back, _ in delays)
    assert found.error <= best // 2 + 1


def test_an_offset_needs_a_sample() -> None:
    with pytest.raises(ValueError, match="expected a sample, but got none"):
        estimate_offset([])
