# SPDX-License-Identifier: Apache-2.0
"""What holds for any plan, whatever its kind, sizes, options and costs."""

from __future__ import annotations

import pickle
import random
import warnings
from typing import Any

import pytest
from helpers.pipeline_compare import compare, links_of
from helpers.pipeline_random import Plan, random_costs
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_sm3.pipeline import Costs, Schedule, ScheduleError, kinds, plan, verify

PLANS = settings(max_examples=200, deadline=None, derandomize=True)
ONE_CHUNK = ("none", "gpipe", "1f1b", "zb_h1", "zb_h2")
TWO_CHUNKS = ("zbv", "v_half", "v_min", "dualpipe_v")
NAMED = [kind for kind in kinds() if kind != "auto"]


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    """Give arguments of ``plan`` that are all right by themselves."""
    kind = draw(st.sampled_from(NAMED))
    p = 1 if kind == "none" else draw(st.integers(1, 5))
    m = draw(st.integers(2 * p if kind == "dualpipe_v" else 1, 3 * p + 2))
    given: dict[str, Any] = {"kind": kind, "ranks": p, "microbatches": m}
    chunks = 1 if kind in ONE_CHUNK else 2
    if kind not in ONE_CHUNK + TWO_CHUNKS:
        chunks = given["chunks"] = draw(st.integers(1, 4))
    if kind == "interleaved" and draw(st.booleans()):
        given["group_size"] = draw(st.integers(1, m + 1))
    if kind == "1f1b":
        given["warmup"] = draw(st.sampled_from(["auto", 0, 1, 2, 3]))
        given["link_cost"] = draw(st.sampled_from([0.0, 0.4, 3.0]))
    if p * chunks > 1 and draw(st.booleans()):
        given["split"] = draw(st.integers(1, p * chunks - 1))
        given["via"] = draw(st.sampled_from(["chain", "direct"]))
    return given


def planned(given: dict[str, Any]) -> Schedule | None:
    """Plan, or return None where a forced group cannot run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        try:
            return plan(**given)
        except ScheduleError as error:
            assert "group_size" in given and "step  rank 0" in str(error)
            return None


@PLANS
@given(options())
def test_texts_of_all_forms_come_back(given: dict[str, Any]) -> None:
    schedule = planned(given)
    if schedule is None:
        return
    lowered = schedule.lower()
    assert lowered.lower() == lowered
    # A forward of one rank lacks nothing, but only running it tells.
    assert lowered.lower() is lowered or lowered == schedule
    for one in (schedule, lowered):
        assert Schedule.parse(one.text) == one
        assert Schedule.from_csv(one.to_csv()) == one
        again = pickle.loads(pickle.dumps(one))
        assert again == one and again.lower() == lowered
    if not schedule.routes:
        text = schedule.to_csv(dialect="torch")
        assert Schedule.from_csv(text, kind=schedule.kind) == schedule


@PLANS
@given(options())
def test_plans_pass_with_one_pending_send_and_with_blocking_links(
    given: dict[str, Any],
) -> None:
    schedule = planned(given)
    if schedule is None:
        return
    for one in (schedule, schedule.lower()):
        for links in ("posted", "rendezvous", "blocking"):
            report = verify(one, links=links, max_pending=1)
            assert report.valid, report.message


@PLANS
@given(options(), st.integers(0, 2**32 - 1))
def test_plans_run_as_the_oracle_says(given: dict[str, Any], seed: int) -> None:
    schedule = planned(given)
    if schedule is None:
        return
    draw = random.Random(seed)
    shape = Plan(
        schedule.placement,
        schedule.microbatches,
        schedule.routes,
        rows=[[]] * schedule.ranks,
    )
    compare(schedule, random_costs(draw, shape), links_of(draw))


@PLANS
@given(options())
def test_stages_work_in_microbatch_order_and_rows_stand_alone(
    given: dict[str, Any],
) -> None:
    schedule = planned(given)
    if schedule is None:
        return
    for rank in range(schedule.ranks):
        row = schedule.actions(rank)
        seen: dict[tuple[str, int], list[int]] = {}
        for action in row:
            part = "BI" if action.op in "BI" else action.op
            seen.setdefault((part, action.stage), []).append(action.microbatch)
            if action.op in "BW":
                weights = seen.setdefault(("BW", action.stage), [])
                weights.append(action.microbatch)
        for (part, _), order in seen.items():
            wanted = range(schedule.microbatches)
            assert order == (list(wanted) if part != "W" else sorted(order))
        assert plan(**given, rank=rank).actions(rank) == row


@settings(max_examples=60, deadline=None, derandomize=True)
@given(options(), st.integers(1, 60), st.integers(1, 3))
def test_a_memory_limit_is_kept_or_the_least_one_is_named(
    given: dict[str, Any], limit: int, pending: int
) -> None:
    given.pop("group_size", None)
    given["max_pending"] = pending
    costs = Costs(activation_bytes=8, boundary_bytes=1, static_bytes=3)
    try:
        schedule = plan(**given, costs=costs, memory_limit=limit)
    except ScheduleError as error:
        assert "expected a memory limit of at least " in str(error)
        named = float(str(error).split("at least ")[1].split()[0])
        assert named > limit
        with pytest.raises(ScheduleError):
            plan(**given, costs=costs, memory_limit=named - 1)
        schedule = plan(**given, costs=costs, memory_limit=named)
        limit = int(named)
    for fewer in range(1, pending + 1):
        report = verify(schedule, max_pending=fewer, memory=costs, memory_limit=limit)
        assert report.valid and max(report.peak_bytes) <= limit
