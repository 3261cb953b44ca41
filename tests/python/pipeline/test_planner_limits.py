# SPDX-License-Identifier: Apache-2.0
"""Memory limits and searched plans, by simulators that share no code with ours."""

from __future__ import annotations

import itertools
import math
import operator
import re
from inspect import signature

import pytest
from reference.pipeline_costs import Costs
from reference.pipeline_simulation import Result, simulate

from torch_sm3.pipeline import Costs as PlanCosts
from torch_sm3.pipeline import PipelineRunner, Schedule, ScheduleError, kinds, plan

EXACT = 1e-9


def run(schedule: Schedule, costs: Costs, pending: int = 2) -> Result:
    lowered = schedule.lower()
    rows = [lowered.actions(rank) for rank in range(lowered.ranks)]
    return simulate(
        rows, lowered.placement, costs, routes=lowered.routes, max_pending=pending
    )


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_1f1b_keeps_a_limit_that_counts_messages(p: int) -> None:
    told = PlanCosts(activation_bytes=10, boundary_bytes=3, static_bytes=5)
    costs = Costs(activation=10.0, boundary=3.0, static=5.0)
    for m, warmup in itertools.product((1, 4, 9), (1, 2)):
        before = 1e9
        for limit in range(15, 120, 7):
            try:
                schedule = plan(
                    "1f1b", p, m, costs=told, memory_limit=limit, warmup=warmup
                )
            except ScheduleError as error:
                assert limit < 5 + 10 + 6 * 3, error
                continue
            result = run(schedule, costs)
            assert max(result.peak) <= limit
            # More memory never makes it slower at equal costs.
            assert result.makespan <= before + EXACT or warmup > 1
            before = result.makespan
        free = plan("1f1b", p, m, costs=told, warmup=warmup)
        assert schedule.text == free.text or max(run(free, costs).peak) > limit


def test_each_rank_keeps_its_own_limit() -> None:
    told = PlanCosts(activation_bytes=1)
    limits = [4, 2, 9, 9]
    schedule = plan("1f1b", 4, 8, costs=told, memory_limit=limits)
    assert run(schedule, Costs(activation=1.0)).peak == [4, 2, 2, 1]
    with pytest.raises(ScheduleError, match=r"at least 8 bytes on rank 1 .* got 2"):
        plan("gpipe", 4, 8, costs=told, memory_limit=[8, 2, 8, 8])


@pytest.mark.filterwarnings("ignore:plan. group_size 4 leaves a bubble of 9")
def test_forced_groups_that_cannot_run_or_lose_time() -> None:
    refused = r"(?s)got 4 \(argument 'group_size'\); .*waits .*\nstep  rank 0 .*\["
    with pytest.raises(ScheduleError, match=refused):
        plan("interleaved", 4, 5, chunks=3, group_size=4)
    third = Costs(0.5, 0.5, 0.5)
    slow = plan("interleaved", 4, 5, chunks=2, group_size=4)
    fast = plan("interleaved", 4, 5, chunks=2)
    assert abs(run(slow, third).makespan - 5 * 3 - 9) < EXACT
    assert abs(run(fast, third).makespan - 5 * 3 - 4.5) < EXACT


def test_lists_leave_room_for_what_input_gradients_keep_more() -> None:
    # Three quarters of an activation on top, from I to W.
    told = PlanCosts(F=1, I=1.5, W=1, activation_bytes=8, released_at_input=-6)
    costs = Costs(1.0, 1.5, 1.0, activation=8.0, released=-6.0)
    for p, limit in itertools.product((1, 2, 4), (14, 17, 24, 33)):
        best = plan("auto", p, 9, costs=told, memory_limit=limit, chunks=1)
        assert max(run(best, costs).peak) <= limit
        lists = {x.plan: x for x in best.alternatives if x.plan.startswith("list")}
        # No message takes room, so the first try holds the limit, and each
        # budget holds as many microbatches as it says and one such rest.
        assert not lists["list budget=limit try=1"].refused
        assert "list budget=limit try=2" not in lists
        budgets = [re.fullmatch(r"list budget=([\d.]+)", name) for name in lists]
        assert any(budgets)
        for budget in filter(None, budgets):
            most = 8 * float(budget[1]) + 6
            assert lists[budget[0]].peak_bytes <= most, (p, limit, budget[0])


def test_a_rank_without_a_limit_does_not_lift_those_of_others() -> None:
    told = PlanCosts(activation_bytes=8)
    for limits in ([math.inf, 20, 20], [20, math.inf, 20], [math.inf] * 3):
        best = plan("auto", 3, 6, costs=told, memory_limit=limits, chunks=1)
        peaks = run(best, Costs(activation=8.0)).peak
        assert all(map(operator.le, peaks, limits))
        tried = {x.plan: x.refused for x in best.alternatives}
        assert tried["list budget=limit try=1"] == ""


@pytest.mark.parametrize("limit", [None, 44, 26])
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 5), (3, 6), (4, 8)])
def test_auto_is_never_worse_than_a_named_kind(
    p: int, m: int, limit: float | None
) -> None:
    link, weight = 0.2, 10.0
    told = PlanCosts(F=1, I=1.5, W=1, activation_bytes=weight, boundary_bytes=1)
    options = {"costs": told, "link_cost": link, "memory_limit": limit}

    def of_stage(v: int) -> Costs:
        return Costs(
            1 / v, 1.5 / v, 1 / v, activation=weight / v, boundary=1.0, latency=link
        )

    best = plan("auto", p, m, **options)
    found = run(best, of_stage(best.stages // p), pending=1)
    peak = max(run(best, of_stage(best.stages // p)).peak)
    assert limit is None or peak <= limit
    chosen = next(c for c in best.alternatives if c.chosen)
    assert abs(found.makespan - chosen.makespan) < EXACT
    assert abs(peak - chosen.peak_bytes) < EXACT
    for kind in kinds():
        if kind in ("auto", "forward") or (kind == "none" and p > 1):
            continue
        if kind == "dualpipe_v" and m < 2 * p:
            continue
        named = plan(kind, p, m, link_cost=link)
        costs = of_stage(named.stages // p)
        if limit is None or max(run(named, costs).peak) <= limit:
            assert found.makespan <= run(named, costs, pending=1).makespan + EXACT, kind


def test_sends_under_way_count_as_in_a_runner() -> None:
    defaults = [
        signature(of).parameters["max_pending"] for of in (plan, PipelineRunner)
    ]
    assert defaults[0].default == defaults[1].default == 2
    told = PlanCosts(activation_bytes=10, boundary_bytes=4)
    costs = Costs(activation=10.0, boundary=4.0)
    for kind, pending in itertools.product(("gpipe", "1f1b", "zb_h1"), (1, 2, 3)):
        free = plan(kind, 3, 9)
        least = max(run(free, costs, pending).peak)
        options = {"costs": told, "max_pending": pending}
        assert plan(kind, 3, 9, memory_limit=least, **options) == free
        if kind == "1f1b":
            fitted = plan(kind, 3, 9, memory_limit=least - 1, **options)
            assert max(run(fitted, costs, pending).peak) < least
            continue
        with pytest.raises(ScheduleError, match=f"at least {least:g} bytes on rank"):
            plan(kind, 3, 9, memory_limit=least - 1, **options)
