# SPDX-License-Identifier: Apache-2.0
"""Recorders: stamps, spans of the profiler, and clocks that agree."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_sm3.pipeline import plan
from torch_sm3.pipeline._recorder import Recorder, estimate_offset


def test_a_recorder_stamps_in_order() -> None:
    schedule = plan("1f1b", 2, 2).lower()
    recorder = Recorder(schedule, 0, keep=2)
    count = len(schedule.actions(0))
    for step in (1, 2, 3):
        recorder.start(step)
        for index in range(count):
            recorder.begin(index)
            recorder.ready()
            recorder.end(live_bytes=10 * index, pending_sends=index)
    assert [x.step for x in recorder.steps] == [2, 3]
    stamps = recorder.steps[0]
    flat = [t for t3 in zip(*stamps[1:4], strict=True) for t in t3]
    assert flat == sorted(flat) and flat[0] > 0
    assert list(stamps.live) == [10 * i for i in range(count)]
    assert list(stamps.pending) == list(range(count))


def test_an_action_that_never_waits_is_ready_when_it_begins() -> None:
    recorder = Recorder(plan("none", 1, 1).lower(), 0)
    recorder.start(1)
    recorder.begin(0)
    recorder.end()
    assert recorder.steps[0].begin[0] == recorder.steps[0].ready[0]


def test_stamps_of_another_language_are_taken_whole() -> None:
    schedule = plan("none", 1, 2).lower()
    count = len(schedule.actions(0))
    recorder = Recorder(schedule, 0)
    recorder.start(7)
    columns = [[100 * c + i for i in range(count)] for c in range(5)]
    recorder.fill(*columns)
    assert [list(column) for column in recorder.steps[0][1:]] == columns
    with pytest.raises(ValueError, match=f"fill: expected {count} stamps, but got 1"):
        recorder.fill(*[[1]] * 5)


def test_without_steps_to_keep_nothing_is_stamped() -> None:
    recorder = Recorder(plan("none", 1, 1).lower(), 0, keep=0)
    recorder.start(1)
    recorder.begin(0)
    recorder.ready()
    recorder.end()
    recorder.fill(*[[1]] * 5)
    assert recorder.steps == []


@pytest.mark.parametrize("keep", [0, 8])
def test_actions_are_spans_of_the_profiler(keep: int) -> None:
    schedule = plan("none", 1, 2).lower()
    recorder = Recorder(schedule, 0, keep)
    names = [action.text for action in schedule.actions(0)]
    with torch.profiler.profile() as profiled:
        recorder.start(1)
        for index in range(len(names)):
            recorder.begin(index)
            torch.ones(3)
            recorder.end()
    spans = [x.name for x in profiled.events() if x.name.startswith("torch_sm3.pipe")]
    assert spans == [f"torch_sm3.pipeline {name}" for name in names]


def test_a_step_that_broke_off_closes_its_span() -> None:
    recorder = Recorder(plan("none", 1, 1).lower(), 0)
    with torch.profiler.profile() as profiled:
        recorder.start(1)
        recorder.begin(0)
        recorder.start(2)
        recorder.begin(0)
        recorder.end()
    assert len([x for x in profiled.events() if x.name.endswith(" 0F0")]) == 2


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
