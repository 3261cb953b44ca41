# SPDX-License-Identifier: Apache-2.0
"""Traces: their JSON, the costs that come back from it, ranks with other clocks."""

from __future__ import annotations

import json
import queue
import random
import threading
import time
from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.pipeline_traces import synthetic

from torch_sm3.pipeline import Costs, Schedule, plan, plot, simulate
from torch_sm3.pipeline._actions import consumers
from torch_sm3.pipeline.trace import Recorder, Trace, collect, load_trace

US = 1_000


COSTS = Costs([0.010, 0.012], [0.010, 0.014], [0.011, 0.009], latency=0.003)


@pytest.mark.parametrize("kind", ["1f1b", "gpipe", "zb_h1"])
def test_a_trace_survives_its_file(tmp_path: Path, kind: str) -> None:
    trace = synthetic(plan(kind, 2, 4), COSTS)
    trace.save(tmp_path / "t.json")
    again = Trace.load(tmp_path / "t.json")
    assert again.schedule == trace.schedule
    assert again.steps == trace.steps
    assert again.errors == trace.errors
    again.save(tmp_path / "u.json")
    assert (tmp_path / "u.json").read_bytes() == (tmp_path / "t.json").read_bytes()


@pytest.mark.parametrize("kind", ["zb_h1", "zb_h2"])
def test_costs_come_back_and_can_be_planned_with(tmp_path: Path, kind: str) -> None:
    schedule = plan(kind, 2, 6)
    synthetic(schedule, COSTS).save(tmp_path / "t.json")
    costs = load_trace(tmp_path / "t.json")
    for name in ("F", "I", "W"):
        assert getattr(costs, name) == pytest.approx(getattr(COSTS, name), abs=2e-9)
    assert costs.activation_bytes == (100, 100)
    assert costs.released_at_input == (40, 40)
    assert costs.latency[0][1] == pytest.approx(0.003, abs=1e-5)
    assert costs.latency[1][0] == pytest.approx(0.003, abs=1e-5)
    assert costs.latency[0][0] == 0
    measured = simulate(schedule, COSTS).makespan
    assert simulate(schedule, costs).makespan == pytest.approx(measured, rel=1e-3)
    assert simulate(plan("gpipe", 2, 6), costs).makespan > 0


def test_full_backwards_are_halved_for_split_schedules() -> None:
    costs = synthetic(plan("1f1b", 2, 4), COSTS).costs()
    assert costs.B == pytest.approx([0.021, 0.023], abs=2e-9)
    assert costs.I == costs.W == pytest.approx([0.0105, 0.0115], abs=2e-9)


def test_links_nobody_waited_for_get_the_usual_latency() -> None:
    # Backwards of rank 1 are far slower: rank 1 never waits for a second forward.
    costs = synthetic(
        plan("gpipe", 3, 4), Costs(0.01, 0.01, 0.0, latency=0.002)
    ).costs()
    assert all(
        costs.latency[a][b] == pytest.approx(0.002 if a != b else 0.0, abs=1e-5)
        for a in range(3)
        for b in range(3)
    )


def test_the_file_is_what_perfetto_reads(tmp_path: Path) -> None:
    schedule = plan("1f1b", 3, 4)
    trace = synthetic(schedule, Costs(0.01, 0.01, 0.01, latency=0.002), steps=2)
    trace.save(tmp_path / "t.json")
    content = json.loads((tmp_path / "t.json").read_text())
    events = content["traceEvents"]
    by_phase = Counter(event["ph"] for event in events)
    actions = sum(len(trace.schedule.actions(rank)) for rank in range(3))
    assert by_phase["X"] == 2 * 2 * actions  # two lanes, two steps
    messages = 2 * 2 * 4
    assert by_phase["s"] == by_phase["f"] == 2 * 2 * messages
    assert by_phase["C"] == 2 * 2 * actions
    names = {event["name"] for event in events if event["ph"] == "X"}
    assert "torch_sm3.pipeline 2F0" in names and "torch_sm3.pipeline OPTIM" in names
    lanes = {
        (event["pid"], event["args"]["name"])
        for event in events
        if event["name"] == "thread_name"
    }
    assert lanes == {(r, x) for r in range(3) for x in ("measured", "predicted")}
    counters = {event["name"] for event in events if event["ph"] == "C"}
    assert counters == {"live activation bytes", "pending sends"}


def test_arrows_lead_from_a_send_into_its_consumer(tmp_path: Path) -> None:
    trace = synthetic(plan("zbv", 2, 4), Costs(0.01, 0.01, 0.01, latency=0.002))
    trace.save(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]

    def around(flow: dict[str, Any]) -> list[str]:
        """Return the spans that hold the end of an arrow, within a nanosecond."""
        return [
            x["cat"]
            for x in spans
            if (x["pid"], x["tid"]) == (flow["pid"], flow["tid"])
            and x["ts"] - 1e-3 <= flow["ts"] <= x["ts"] + x["dur"] + 1e-3
        ]

    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert starts and starts.keys() == ends.keys()
    for key, start in starts.items():
        end = ends[key]
        assert start["pid"] != end["pid"] and start["tid"] == end["tid"]
        assert f"SEND_{start['cat']}" in around(start)
        users = {"F"} if start["cat"] == "F" else {"B", "I"}
        assert users & set(around(end))
        assert end["ts"] - start["ts"] > 1_900  # latency, in microseconds


def test_prediction_begins_with_each_measured_step(tmp_path: Path) -> None:
    trace = synthetic(plan("gpipe", 2, 3), COSTS)
    trace.save(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    first = [
        (event["tid"], event["ts"])
        for event in events
        if event["ph"] == "X" and event["name"].endswith(" 0F0")
    ]
    measured = [ts for lane, ts in first if lane == 1]
    predicted = [ts for lane, ts in first if lane == 2]
    assert len(measured) == 2 and measured == predicted


def test_a_step_that_failed_is_kept_but_tells_nothing(tmp_path: Path) -> None:
    trace = synthetic(plan("1f1b", 2, 3), COSTS, steps=2)
    broken = trace.steps[1][1]
    for column in broken[1:]:
        column[4:] = array("q", bytes(8 * (len(column) - 4)))
    assert trace.latest()[0].step == 1
    trace.save(tmp_path / "t.json")
    again = Trace.load(tmp_path / "t.json")
    assert again.steps[1][1] == broken
    assert again.costs().F == pytest.approx(COSTS.F, abs=2e-9)
    del trace.steps[0][0], trace.steps[1][0]
    with pytest.raises(ValueError, match="expected a complete step, but got none"):
        trace.latest()
    trace.save(tmp_path / "u.json")  # without a prediction
    lanes = (tmp_path / "u.json").read_text().count('"predicted"')
    assert lanes == 0


def test_steps_that_not_all_ranks_have_are_left_out() -> None:
    trace = synthetic(plan("1f1b", 2, 3), COSTS, steps=3)
    short = Trace(trace.schedule, [trace.steps[0], trace.steps[1][1:]])
    assert [[x.step for x in own] for own in short.steps] == [[2, 3], [2, 3]]
    assert min(x.begin[0] for own in short.steps for x in own) == US


REFUSED = "load_trace: expected a trace that Pipeline"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"otherData": {"format": "x"}}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(ValueError, match=REFUSED):
        load_trace(tmp_path / "t.json")


def _pieces(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield where the pieces of a JSON value are."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in pairs:
        yield (*path, key)
        if isinstance(item, (dict, list)):
            yield from _pieces(item, (*path, key))


@pytest.mark.parametrize("other", ["lost", None, "x", -(10**30), 1e300, [], {}])
def test_damaged_traces_are_read_or_refused(tmp_path: Path, other: Any) -> None:
    schedule = plan("none", 1, 1)
    synthetic(schedule, Costs(0.01, 0.01, 0.01), steps=1).save(tmp_path / "t.json")
    text = (tmp_path / "t.json").read_text()
    refused = 0
    for *path, key in list(_pieces(json.loads(text))):
        content = json.loads(text)
        place = content
        for step in path:
            place = place[step]
        if other == "lost":
            del place[key]
        else:
            place[key] = other
        (tmp_path / "t.json").write_text(json.dumps(content))
        try:
            Trace.load(tmp_path / "t.json")
        except ValueError as error:
            assert REFUSED in str(error)
            refused += 1
    assert refused >= 10


def test_a_trace_is_drawn_with_two_lanes_for_each_rank() -> None:
    schedule = plan("1f1b", 2, 4)
    svg = plot(synthetic(schedule, COSTS)).svg()
    assert svg.count('class="lane"') == 4
    assert svg.count(">predicted<") == 2 and svg.count(">rank 1 measured<") == 1
    for kind in "FB":
        assert svg.count(f'class="box {kind}"') == 2 * 2 * 4
    assert svg.count('class="box WAIT"') > 0
    assert " ms<" in svg


# --- collection ------------------------------------------------------------


@pytest.mark.parametrize("everywhere", [False, True])
def test_traces_of_ranks_with_other_clocks_come_together(
    monkeypatch: pytest.MonkeyPatch, everywhere: bool
) -> None:
    ranks, ahead = 3, [0, 7_000_000_000, -3_000_000_000]
    real = time.monotonic_ns
    local = threading.local()
    monkeypatch.setattr(
        "time.monotonic_ns", lambda: real() + getattr(local, "ahead", 0)
    )
    reference = synthetic(plan("1f1b", ranks, 4), Costs(0.01, 0.01, 0.01), start=real())
    pipes: dict[tuple[int, int], queue.Queue[Any]] = {
        (a, b): queue.Queue() for a in range(ranks) for b in range(ranks)
    }
    found: list[Any] = [None] * ranks

    def work(rank: int) -> None:
        local.ahead = ahead[rank]
        noise = random.Random(rank)

        class Links:
            def tell(self, peer: int, value: Any) -> None:
                time.sleep(noise.random() * 1e-4)
                pipes[rank, peer].put(value)

            def hear(self, peer: int) -> Any:
                return pipes[peer, rank].get(timeout=60)

        recorder = Recorder(reference.schedule, rank)
        row = reference.schedule.actions(rank)
        for stamps in reference.steps[rank]:
            recorder.add(stamps.step, row, stamps.shifted(ahead[rank])[1:])
        found[rank] = collect(recorder, reference.schedule, rank, Links(), everywhere)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [trace is not None for trace in found] == [True] + [everywhere] * 2
    trace = found[0]
    hub = reference.schedule.placement[-1]
    assert [error > 0 for error in trace.errors] == [rank != hub for rank in range(3)]
    for rank in range(ranks):
        own, wanted = trace.steps[rank][0], reference.steps[rank][0]
        for got, said in zip(own.begin, wanted.begin, strict=True):
            assert abs(got - said) <= max(trace.errors) + 1_000
    if everywhere:
        assert [x.steps for x in found] == [trace.steps] * ranks


def test_pairs_and_mixed_backwards_come_back() -> None:
    schedule = plan("dualpipe_v", 2, 6)
    costs = Costs(0.010, 0.011, 0.009, pair=[0.025, 0.026, 0.027, 0.028])
    found = synthetic(schedule, costs).costs()
    assert found.F == pytest.approx((0.010,) * 4, abs=2e-9)
    assert found.I == pytest.approx((0.011,) * 4, abs=2e-9)
    assert found.W == pytest.approx((0.009,) * 4, abs=2e-9)
    assert found.B == pytest.approx((0.020,) * 4, abs=2e-9)
    firsts = {
        action.stage
        for rank in range(2)
        for action in schedule.actions(rank)
        if action.paired
    }
    for stage in range(4):
        wanted = 0.025 + 0.001 * stage if stage in firsts else 0.030
        assert found.pair[stage] == pytest.approx(wanted, abs=2e-9)


def test_idle_slots_take_no_time_and_leave_no_span(tmp_path: Path) -> None:
    head = "schedule 1 kind=x ranks=1 stages=1 microbatches=2 placement=loop\n"
    schedule = Schedule.parse(head + "rank 0: . 0F0 0F1 . 0B0 . 0B1 .\n").lower()
    assert [action.text for action in schedule.actions(0)] == [
        *(".", "0F0", "0F1", ".", "0B0", ".", "0B1", "0REDUCE_GRAD", ".", "OPTIM"),
    ]
    recorder = Recorder(schedule, 0)
    ends = [20, 40, 60, 90, 91, 92]
    begins = [10, *ends[:-1]]
    live, none = [1, 2, 1, 0, 0, 0], [0] * 6
    columns = begins, [12, *begins[1:]], ends, live, none, live, none, none, none
    recorder.add(1, plan("gpipe", 1, 2).lower().actions(0), columns)
    trace = Trace(schedule, [list(recorder.steps)])
    (stamps,) = trace.latest()
    wanted = [0, 0, 10, 30, 30, 50, 50, 80, 81, 81]
    assert list(stamps.begin) == [US + t for t in wanted]
    assert list(stamps.end) == [US + t for t in [0, *wanted[2:], 82]]
    assert list(stamps.live) == [0, 1, 2, 2, 1, 1, 0, 0, 0, 0]
    trace.save(tmp_path / "t.json")
    assert '"torch_sm3.pipeline ."' not in (tmp_path / "t.json").read_text()
    assert Trace.load(tmp_path / "t.json").steps == trace.steps
    assert trace.costs().F == pytest.approx((14e-9,), abs=1e-12)


def test_a_message_that_was_asked_for_late_does_not_make_its_link_slow() -> None:
    trace = synthetic(plan("gpipe", 2, 4), COSTS)
    row = trace.schedule.actions(1)
    for stamps in trace.steps[1]:
        for index, used in consumers(row).items():
            # All were sent long before; each arrives a millisecond after its RECV.
            stamps.begin[index] = stamps.end[index] = stamps.ready[used] - 1_000 * US
    assert trace.costs().latency[0][1] == pytest.approx(0.001, abs=1e-6)
