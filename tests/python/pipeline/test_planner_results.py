# SPDX-License-Identifier: Apache-2.0
"""Bubble and peak of every planned kind, by a simulator that shares no code with ours.

One test per row of the table "Exact results" of the specification's section 3. Costs
F, I and W are those of a whole rank: a stage of v chunks takes 1/v of them. The full
grid runs on compute actions alone; a part of it again with messages, where a rank
waits at its second unmatched send. Our own simulator finds the same each time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from reference.pipeline_costs import Costs
from reference.pipeline_simulation import Result, simulate

from torch_sm3 import pipeline
from torch_sm3.pipeline import Costs as PlanCosts
from torch_sm3.pipeline import Schedule, plan

RANKS = (1, 2, 3, 4, 5, 8)
TRIPLES = ((1.0, 1.0, 1.0), (1.0, 2.0, 1.0), (3.0, 4.0, 2.0))
# Where other terms of the bubbles of split backwards are the largest.
MORE = (*TRIPLES, (1.0, 1.0, 3.0), (2.0, 1.0, 1.0), (1.0, 1.0, 6.0), (0.5, 2.5, 1.0))
EXACT = 1e-9


def sizes(ranks: tuple[int, ...] = RANKS) -> Iterator[tuple[int, int]]:
    """Give p and m from 1 to 4p."""
    for p in ranks:
        for m in range(1, 4 * p + 1):
            yield p, m


def run(
    schedule: Schedule, triple: tuple[float, ...], messages: bool = False
) -> Result:
    chunks = schedule.stages // schedule.ranks
    each = [cost / chunks for cost in triple]
    costs = Costs(*each, activation=1.0)
    lowered = schedule.lower() if messages else schedule
    rows = [lowered.actions(rank) for rank in range(schedule.ranks)]
    result = simulate(rows, schedule.placement, costs)
    # Ours, with messages and one pending send; where W takes very long, with two.
    told = PlanCosts(*each, activation_bytes=1)
    pending = 1 if triple in TRIPLES else 2
    ours = pipeline.simulate(schedule, told, max_pending=pending)
    assert abs(ours.makespan - result.makespan) < EXACT
    assert ours.peak_bytes == result.peak
    for mine, wanted in zip(ours.own_idle, result.own_idle, strict=True):
        assert abs(mine - wanted) < EXACT
    return result


def bubble(result: Result, schedule: Schedule, triple: tuple[float, ...]) -> float:
    return result.makespan - schedule.microbatches * sum(triple)


def looped_bubble(p: int, v: int, m: int, work: float) -> float:
    return ((p - 1) + (v - 1) * max(0, p - m)) * work / v


@pytest.mark.parametrize("triple", TRIPLES)
def test_gpipe(triple: tuple[float, ...]) -> None:
    for p, m in sizes():
        schedule = plan("gpipe", p, m)
        result = run(schedule, triple)
        assert abs(bubble(result, schedule, triple) - (p - 1) * sum(triple)) < EXACT
        assert result.peak == [m] * p


@pytest.mark.parametrize("triple", TRIPLES)
def test_1f1b(triple: tuple[float, ...]) -> None:
    for p, m in sizes():
        schedule = plan("1f1b", p, m)
        result = run(schedule, triple)
        assert abs(bubble(result, schedule, triple) - (p - 1) * sum(triple)) < EXACT
        assert result.peak == [min(p - r, m) for r in range(p)]


@pytest.mark.parametrize("triple", TRIPLES)
def test_1f1b_with_slow_links(triple: tuple[float, ...]) -> None:
    f, b, w = triple
    for p, m in sizes():
        for share in (0.1, 1 / 6, 0.5, 0.7, 1.3):
            link = share * sum(triple)
            told = PlanCosts(F=f, I=b, W=w)
            schedule = plan("1f1b", p, m, costs=told, link_cost=link)
            costs = Costs(f, b, w, activation=1.0, latency=link)
            rows = [schedule.actions(rank) for rank in range(p)]
            result = simulate(rows, schedule.placement, costs)
            expected = (p - 1) * sum(triple) + 2 * link * (p - 1)
            found = bubble(result, schedule, triple)
            assert abs(found - expected) < EXACT, (p, m, share)
            rounds = 1 + math.ceil(2 * share - EXACT)
            assert result.peak == [min(m, 1 + (p - 1 - r) * rounds) for r in range(p)]


@pytest.mark.parametrize("triple", TRIPLES)
@pytest.mark.parametrize("v", [1, 2, 3, 4])
def test_interleaved(v: int, triple: tuple[float, ...]) -> None:
    for p, m in sizes():
        schedule = plan("interleaved", p, m, chunks=v)
        result = run(schedule, triple)
        found = bubble(result, schedule, triple)
        assert abs(found - looped_bubble(p, v, m, sum(triple))) < EXACT, (p, m)
        fits = (n for n in range(p, m + 1) if m % n == 0 or m % n >= p)
        n = m if m <= p else next(fits)
        each = [min(m * v, 2 * (p - 1 - r) + (v - 1) * n + 1) for r in range(p)]
        assert result.peak == each, (p, m)
        if m >= p:
            worst = p + (p - 1) / v + (v - 1) * (n - p) / v
            assert abs(max(each) / v - min(m, worst)) < EXACT
        else:
            assert max(each) == m * v


@pytest.mark.parametrize("triple", TRIPLES)
@pytest.mark.parametrize("v", [1, 2, 3, 4])
def test_looped_bfs(v: int, triple: tuple[float, ...]) -> None:
    for p, m in sizes():
        schedule = plan("looped_bfs", p, m, chunks=v)
        result = run(schedule, triple)
        found = bubble(result, schedule, triple)
        assert abs(found - looped_bubble(p, v, m, sum(triple))) < EXACT, (p, m)
        assert result.peak == [m * v] * p


@pytest.mark.parametrize("triple", TRIPLES)
@pytest.mark.parametrize("v", [1, 2, 3, 4])
def test_forward(v: int, triple: tuple[float, ...]) -> None:
    for p, m in sizes():
        schedule = plan("forward", p, m, chunks=v)
        result = run(schedule, triple)
        found = result.makespan - m * triple[0]
        assert abs(found - looped_bubble(p, v, m, triple[0])) < EXACT, (p, m)
        # No activation outlives its send: one at a time.
        assert result.peak == [1.0] * p


@pytest.mark.parametrize("triple", MORE)
def test_zb_h1(triple: tuple[float, ...]) -> None:
    f, b, w = triple
    for p, m in sizes():
        schedule = plan("zb_h1", p, m)
        result = run(schedule, triple)
        found = bubble(result, schedule, triple)
        if m >= p:
            assert abs(found - (p - 1) * max(f, b, f + b - w)) < EXACT, (p, m)
            assert result.peak == [p] * p
        assert found <= (p - 1) * sum(triple) + EXACT, "slower than 1f1b"


@pytest.mark.parametrize("triple", MORE)
def test_zb_h2(triple: tuple[float, ...]) -> None:
    f, b, w = triple
    for p, m in sizes():
        schedule = plan("zb_h2", p, m)
        result = run(schedule, triple)
        found = bubble(result, schedule, triple)
        if m >= 2 * p - 1:
            assert abs(found - (p - 1) * max(f, b - f, f + b - 2 * w)) < EXACT
            each = max(0.0, b - f, f + b - 2 * w)
            for r, own in enumerate(result.own_idle):
                assert abs(own - (p - 1 - r) * each) < EXACT, (p, m, r)
            assert result.peak == [2 * p - 1] * p
        h1 = plan("zb_h1", p, m)
        assert found <= bubble(run(h1, triple), h1, triple) + EXACT, (p, m)
        assert found <= (p - 1) * sum(triple) + EXACT, "slower than 1f1b"


@pytest.mark.parametrize("triple", MORE)
def test_zbv(triple: tuple[float, ...]) -> None:
    for p, m in sizes():
        schedule = plan("zbv", p, m)
        result = run(schedule, triple)
        found = bubble(result, schedule, triple)
        assert max(result.peak) == 2 * min(p, m)
        assert found <= (p - 1) * sum(triple) + EXACT, "slower than 1f1b"
        if m >= 2 * p and triple == (1.0, 1.0, 1.0):
            assert abs(found - (p - 1) / 2) < EXACT, (p, m)
            assert max(result.own_idle) < EXACT, (p, m)
            h1 = plan("zb_h1", p, m)
            assert abs(found - bubble(run(h1, triple), h1, triple) / 2) < EXACT


@pytest.mark.parametrize("ranks", [(2, 3, 4, 5), (6, 7), (8, 9), (10, 12)])
def test_v_half_and_v_min(ranks: tuple[int, ...]) -> None:
    for p, m in sizes(ranks=ranks):
        if p > 8 and m not in (2 * p, 2 * p + 1, 3 * p, 4 * p):
            continue
        for kind, valid, most, chunks in (
            ("v_half", p >= 3, 1.5 * p - (3.5 if p % 2 == 0 else 2), (p + 2) // 2),
            ("v_min", p >= 2, 2 * p - (2.5 if p % 3 else 3.5), (p + 4) // 3),
        ):
            schedule = plan(kind, p, m)
            result = run(schedule, (1.0, 1.0, 1.0))
            assert max(result.peak) <= 2 * chunks, (kind, p, m)
            if m >= 2 * p and valid:
                found = bubble(result, schedule, (1.0, 1.0, 1.0))
                assert found <= most + EXACT, (kind, p, m)
                assert max(result.peak) == 2 * chunks, (kind, p, m)


def test_dualpipe_v_by_the_cost_of_a_pair() -> None:
    for p in (1, 2, 3, 4, 5, 8):
        for m in sorted({2 * p, 2 * p + 1, 3 * p, 4 * p}):
            schedule = plan("dualpipe_v", p, m)
            rows = [schedule.actions(rank) for rank in range(p)]
            for q in (2.0, 2.3, 3.0):
                costs = Costs(pair=q, activation=1.0)
                result = simulate(rows, schedule.placement, costs)
                for r, idle in enumerate(result.idle):
                    assert idle <= (p - 1) * (2 * q - 4) + r * (3 - q) + EXACT
                assert result.idle[-1] <= (p - 1) * (q - 1) + EXACT
                assert max(result.peak) == 2 * p + 1
            unfused = simulate(rows, schedule.placement, Costs(activation=1.0))
            assert unfused.makespan - 6 * m <= (p - 1) + EXACT
            assert max(unfused.peak) == 2 * p + 1


@pytest.mark.parametrize("p", [2, 3, 4, 5])
def test_messages_change_nothing(p: int) -> None:
    for kind in (
        "gpipe",
        "1f1b",
        "forward",
        "interleaved",
        "looped_bfs",
        "zb_h1",
        "zb_h2",
        "zbv",
        "v_half",
        "v_min",
        "dualpipe_v",
    ):
        for m in sorted({1, p - 1, p, p + 1, 2 * p, 2 * p + 1, 4 * p}):
            if m < (2 * p if kind == "dualpipe_v" else 1):
                continue
            schedule = plan(kind, p, m)
            for triple in TRIPLES:
                bare, sent = (run(schedule, triple, sends) for sends in (False, True))
                assert abs(bare.makespan - sent.makespan) < EXACT, (kind, m)


@pytest.mark.parametrize("p", [2, 3, 4, 5])
@pytest.mark.parametrize("ratio", [1.0, 2.5])
def test_unequal_stages(p: int, ratio: float) -> None:
    forward = [1.0 + (7 * s % 5) / 2 for s in range(p)]
    work = [f * (1 + 2 * ratio) for f in forward]
    half = [f * ratio for f in forward]
    costs = Costs(forward, half, half, activation=1.0)
    for m in range(1, 4 * p + 1):
        results = {}
        for kind in ("gpipe", "1f1b"):
            schedule = plan(kind, p, m)
            rows = [schedule.actions(rank) for rank in range(p)]
            results[kind] = simulate(rows, schedule.placement, costs)
        biggest = max(forward) + max(2 * h for h in half)
        gpipe = results["gpipe"]
        assert abs(gpipe.makespan - sum(work) - (m - 1) * biggest) < EXACT
        assert gpipe.peak == [m] * p
        found = results["1f1b"]
        least = max(m * t + sum(work[:s]) for s, t in enumerate(work))
        assert found.makespan >= least - EXACT
        assert found.makespan <= sum(work) + (m - 1) * max(work) + EXACT
        assert found.peak == [min(p - r, m) for r in range(p)]
