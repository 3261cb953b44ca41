# SPDX-License-Identifier: Apache-2.0
"""Planner, verifier and simulator as Python sees them."""

from __future__ import annotations

import itertools
import math
import pickle
import warnings

import pytest

from torch_sm3.pipeline import (
    Costs,
    Report,
    Schedule,
    ScheduleError,
    kinds,
    live_bytes,
    partition,
    plan,
    simulate,
    verify,
)


def stuck() -> Schedule:
    """Write an order that needs two pending sends: rank 0 sends four times first."""
    text = "schedule 1 kind=x ranks=2 stages=2 microbatches=4 placement=loop\n"
    sends = [f"0F{i} 0SEND_F{i}" for i in range(4)]
    takes = [f"0RECV_B{i} 0B{i}" for i in range(4)]
    text += " ".join(["rank 0:", *sends, *takes, "0REDUCE_GRAD OPTIM\n"])
    turns = [f"1RECV_F{i} 1F{i} 1B{i} 1SEND_B{i}" for i in range(4)]
    text += " ".join(["rank 1:", *turns, "1REDUCE_GRAD OPTIM\n"])
    return Schedule.parse(text)


# --- verify ----------------------------------------------------------------------


def test_a_plan_is_valid_and_says_nothing() -> None:
    report = verify(plan("zb_h1", 3, 4))
    assert report == Report("none", "", "", "", [0.0] * 3, [""] * 3)
    assert report.valid
    report.raise_if_invalid()


def test_links_decide_what_is_a_deadlock() -> None:
    schedule = stuck()
    assert verify(schedule, links="posted").valid
    assert verify(schedule, max_pending=2).valid
    for report in (verify(schedule), verify(schedule, links="blocking")):
        assert not report.valid and report.rule == "deadlock"
        assert "rank 1, which is stuck at 1SEND_B" in report.message
        with pytest.raises(ScheduleError) as caught:
            report.raise_if_invalid()
        assert str(caught.value) == f"{report.message}\n{report.grid}"


@pytest.mark.parametrize("kind", ["interleaved", "zbv"])
def test_one_order_holds_for_both_classes_of_a_link(kind: str) -> None:
    # Rank 0 sends activations and gradients to rank 1; only their order is told.
    schedule = plan(kind, 2, 4).lower()
    received = [a.text for a in schedule.actions(1) if a.op.startswith("RECV")]
    assert verify(schedule).valid
    swapped = 0
    for first, second in itertools.pairwise(received):
        if ("RECV_F" in first) != ("RECV_F" in second):
            # Both stand early enough for what they bring.
            text = schedule.text.replace(f" {second}", "")
            text = text.replace(f" {first}", f" {second} {first}")
            report = verify(Schedule.parse(text))
            assert report.rule == "messages", report.message
            assert "in the order of sending" in report.message
            swapped += 1
    assert swapped >= 3


def test_the_full_grid_is_drawn_if_asked_for() -> None:
    text = plan("gpipe", 2, 40).text.replace("0B39", ".")
    report = verify(Schedule.parse(text), full_grid=True)
    assert report.rule == "counts" and len(report.full_grid) > len(report.grid) > 0
    assert verify(Schedule.parse(text)).full_grid == ""


def test_memory_is_counted_and_limited() -> None:
    schedule = plan("1f1b", 3, 5)
    memory = Costs(activation_bytes=10, static_bytes=[1, 2, 3])
    report = verify(schedule, memory=memory)
    assert report.peak_bytes == [31.0, 22.0, 13.0]
    assert report.peak_actions == ["0F2", "1F1", "2F0"]
    assert verify(schedule, memory=memory, memory_limit=31).valid
    assert verify(schedule, memory=memory, memory_limit=[31, 22, 13]).valid
    over = verify(schedule, memory=memory, memory_limit=[31, 21, 13])
    assert over.rule == "memory" and "on rank 1, but got 22 at 1F1" in over.message


def test_live_bytes_are_those_of_each_action() -> None:
    memory = Costs(activation_bytes=10, boundary_bytes=1, static_bytes=100)
    row = plan("1f1b", 2, 3).lower().actions(0)
    counted = live_bytes(plan("1f1b", 2, 3), 0, memory)
    assert len(counted) == len(row)
    peak = verify(plan("1f1b", 2, 3), memory=memory).peak_bytes[0]
    assert peak >= max(counted) >= counted[-1] >= 100
    with pytest.raises(ValueError, match="a rank from 0 to 1, but got 2"):
        live_bytes(plan("1f1b", 2, 3), 2, memory)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"links": "gloo"}, "verify: expected links in {posted, rendezvous, blocking}"),
        ({"max_pending": 0}, "verify: expected max_pending of at least 1, but got 0"),
        (
            {"memory": Costs(activation_bytes=1), "memory_limit": [1, 2, 3]},
            "(argument 'memory_limit')",
        ),
        (
            {"memory": Costs(activation_bytes=1), "memory_limit": -1},
            "verify: expected a memory limit of 0 or more, but got -1 (argument",
        ),
        (
            {"memory": Costs(activation_bytes=1), "memory_limit": [1, math.nan]},
            "verify: expected a memory limit of 0 or more, but got nan (argument",
        ),
        (
            {"memory": Costs(activation_bytes=1), "memory_limit": []},
            "verify: expected one limit, or one for each rank, but got none",
        ),
        ({"memory_limit": 4}, "expected bytes beside a memory limit, but got none"),
        ({"memory_limit": 4, "memory": Costs()}, "but got none (argument 'memory')"),
    ],
)
def test_wrong_options_are_no_schedule_errors(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match="expected") as caught:
        verify(plan("1f1b", 2, 2), **options)
    assert message in str(caught.value)
    assert not isinstance(caught.value, ScheduleError)


# --- simulate --------------------------------------------------------------------


def test_a_simulation_tells_all_of_its_lowered_schedule() -> None:
    schedule = plan("1f1b", 2, 2)
    found = simulate(schedule, Costs(F=1, I=1, W=1))
    assert found.schedule == schedule.lower()
    assert (found.makespan, found.lower_bound) == (9.0, 9.0)
    assert found.busy == [6.0, 6.0] and found.idle == [3.0, 3.0]
    assert found.own_idle == [3.0, 0.0]
    rows = [found.schedule.actions(rank) for rank in range(2)]
    spans = found.timeline()
    assert [len(row) for row in spans] == [len(row) for row in rows]
    ran = {
        action.text: span
        for actions, row in zip(rows, spans, strict=True)
        for action, span in zip(actions, row, strict=True)
        if action.op in "FB"
    }
    assert ran["0F0"] == (0.0, 1.0) and ran["1F0"] == (1.0, 2.0)
    assert ran["1B0"] == (2.0, 4.0) and ran["0B0"] == (4.0, 6.0)
    assert ran["0B1"] == (7.0, 9.0)


def test_what_cannot_run_is_not_simulated() -> None:
    with pytest.raises(ScheduleError, match="waits at"):
        simulate(stuck())
    assert simulate(stuck(), max_pending=2).makespan > 0
    with pytest.raises(ValueError, match="simulate: expected links in"):
        simulate(plan("1f1b", 2, 2), links="gloo")


# --- plan ------------------------------------------------------------------------


def test_the_row_of_one_rank_is_that_of_the_whole() -> None:
    for kind in kinds():
        if kind == "none":
            continue
        whole = plan(kind, 4, 8)
        for rank in range(4):
            one = plan(kind, 4, 8, rank=rank)
            assert one.placement == whole.placement and one.stages == whole.stages
            for r in range(4):
                assert one.actions(r) == (whole.actions(r) if r == rank else [])


def test_options_reach_the_planner() -> None:
    slow = plan("1f1b", 4, 8, costs=Costs(F=1, I=1, W=1), link_cost=1.5)
    assert slow == plan("1f1b", 4, 8, warmup=2) != plan("1f1b", 4, 8)
    assert plan("1f1b", 4, 8, link_cost=1.5, warmup=1) == plan("1f1b", 4, 8)
    assert plan("1f1b", 4, 8, split=2, via="direct").routes == [(1, 3)]
    assert plan("1f1b", 4, 8, split=2).routes == []
    assert plan("interleaved", 2, 4, group_size=4) != plan("interleaved", 2, 4)
    limited = plan(
        "1f1b", 4, 8, warmup=2, costs=Costs(activation_bytes=1), memory_limit=[4] * 4
    )
    assert verify(limited, memory=Costs(activation_bytes=1), memory_limit=4).valid


@pytest.mark.parametrize("rank", [None, 0])
def test_what_a_forced_group_loses_is_a_warning(rank: int | None) -> None:
    with pytest.warns(UserWarning, match=r"9\D.*4\.5"):
        plan("interleaved", 4, 5, chunks=2, group_size=4, rank=rank)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan("interleaved", 4, 5, chunks=2)
    with pytest.raises(ScheduleError, match=r"step +rank 0"):
        plan("interleaved", 4, 5, chunks=3, group_size=4)


def test_what_lacks_nothing_is_lowered_by_nobody() -> None:
    """Neither ``lower`` nor ``simulate`` runs or copies what is lowered already."""
    lowered = plan("zbv", 3, 7).lower()
    assert lowered.lower() is lowered
    assert simulate(lowered).schedule is lowered
    searched = plan("auto", 2, 4)
    assert searched.lower() is not searched
    partly = Schedule.parse(lowered.text.replace(" OPTIM", ""))
    assert partly.lower() == lowered and partly.lower() is not partly


def test_a_search_says_what_it_looked_at() -> None:
    costs = Costs(F=1, I=1, W=1, activation_bytes=8)
    found = plan("auto", 2, 4, costs=costs, memory_limit=1000)
    chosen = [candidate for candidate in found.alternatives if candidate.chosen]
    assert len(chosen) == 1 and chosen[0].refused == ""
    assert found.costs is not None
    assert simulate(found, found.costs).makespan == pytest.approx(chosen[0].makespan)
    assert any(candidate.plan.startswith("gpipe") for candidate in found.alternatives)
    assert min(c.makespan for c in found.alternatives if not c.refused) == (
        chosen[0].makespan
    )
    row = plan("auto", 2, 4, costs=costs, memory_limit=1000, rank=1)
    assert row.alternatives == found.alternatives and row.costs == found.costs
    assert row.actions(1) == found.actions(1) and row.actions(0) == []
    again = pickle.loads(pickle.dumps(found))
    assert again == found and again.alternatives == [] and again.costs is None
    with pytest.raises(ScheduleError):
        plan("auto", 2, 4, costs=costs, memory_limit=1)


def test_partition_passes_all_on() -> None:
    assert partition([1, 2, 3, 4], 2) == [0, 3]
    assert partition((4, 1, 1), 3, memory=[1, 1, 1], limit=1) == [0, 1, 2]
    with pytest.raises(ScheduleError):
        partition([1, 1, 1], 2, memory=[5, 5, 5], limit=4)
    assert partition([1, 1, 1, 3], 2) == partition([1, 1, 1, 3], 2, memory=[1] * 4)
    # Two cuts have a largest stage of 4; memory decides.
    assert partition([2, 2, 0, 4], 2, memory=[1, 1, 2, 1]) == [0, 2]
    assert partition([2, 2, 0, 4], 2, memory=[1, 1, 1, 4]) == [0, 3]
    with pytest.raises(ValueError, match="partition: expected"):
        partition([1], 2)
    with pytest.raises(ValueError, match=r"beside a limit, but got none \(argument 'm"):
        partition([1, 1], 2, limit=4)
