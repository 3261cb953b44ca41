# SPDX-License-Identifier: Apache-2.0
"""Simulator and verifier against the oracles, on random schedules and costs.

Everything is compared to the bit: the rules say in which order numbers are added.
"""

from __future__ import annotations

import random

import pytest
from helpers.pipeline_compare import compare, links_of, rows_of
from helpers.pipeline_random import Plan, random_costs, random_plan
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.pipeline_simulation import simulate as oracle

from torch_sm3.pipeline import (
    Costs,
    Schedule,
    ScheduleError,
    kinds,
    plan,
    simulate,
    verify,
)

RANDOM = settings(max_examples=150, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1)


@RANDOM
@given(seeds)
def test_random_schedules_equal_the_oracle(seed: int) -> None:
    draw = random.Random(seed)
    random_one = random_plan(draw)
    schedule = Schedule.parse(random_one.text())
    compare(schedule, random_costs(draw, random_one), links_of(draw))


@RANDOM
@given(seeds)
def test_planned_schedules_equal_the_oracle(seed: int) -> None:
    draw = random.Random(seed)
    kind = draw.choice([kind for kind in kinds() if kind not in ("none", "auto")])
    p = draw.randint(1, 4)
    schedule = plan(kind, p, draw.randint(2 * p, 3 * p))
    shape = Plan(schedule.placement, schedule.microbatches, rows=[[]] * p)
    compare(schedule, random_costs(draw, shape), links_of(draw))


def change(rows: list[str], draw: random.Random) -> list[str]:
    """Swap, move, drop or double a cell or two."""
    cells = [row.split() for row in rows]
    how = draw.choice(["swap", "move", "move", "drop", "double"])
    for _ in range(draw.choice([1, 1, 2])):
        row = draw.choice(cells)
        if len(row) < 4:
            continue
        i, j = draw.randrange(2, len(row)), draw.randrange(2, len(row))
        if how == "swap":
            row[i], row[j] = row[j], row[i]
        elif how == "move":
            row.insert(max(2, i + draw.randint(-4, 4)), row.pop(i))
        elif how == "drop":
            row.pop(i)
        else:
            row.insert(j, row[i])
    return [" ".join(row) for row in cells]


@settings(max_examples=400, deadline=None, derandomize=True)
@given(seeds)
def test_what_is_valid_runs_and_what_is_stuck_does_not(seed: int) -> None:
    draw = random.Random(seed)
    head, *rows = Schedule.parse(random_plan(draw).text()).lower().text.splitlines()
    changed = Schedule.parse("\n".join([head, *change(rows, draw), ""]))
    links = links_of(draw)
    report = verify(changed, **links)
    # One that lost all of its messages or collectives gets them anew.
    changed = simulate(changed, **links).schedule if report.valid else changed
    try:
        oracle(rows_of(changed), changed.placement, routes=changed.routes, **links)
        runs = True
    except ValueError as error:
        assert "deadlock" in str(error)
        runs = False
    if report.valid:
        assert runs
        return
    # Pairs are checked as one action here, and run as two in the oracle.
    if report.rule in ("deadlock", "dependencies") and "OVERLAP" not in changed.text:
        assert not runs, report.message
    assert "but got" in report.message
    if report.rule == "collectives":
        return  # simulate() adds those that lack
    with pytest.raises(ScheduleError, match="expected"):
        simulate(changed, **links)


def test_every_rule_is_met_by_some_change() -> None:
    met = set()
    for seed in range(400):
        draw = random.Random(seed)
        schedule = Schedule.parse(random_plan(draw).text()).lower()
        head, *rows = schedule.text.splitlines()
        changed = Schedule.parse("\n".join([head, *change(rows, draw), ""]))
        met.add(verify(changed, links="blocking").rule)
    assert met >= {"none", "counts", "dependencies", "messages", "collectives"}


def test_unfused_pairs_send_their_forward_first() -> None:
    rows = "rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 (1F1;1B0)OVERLAP_F_B 1B1\n"
    text = "schedule 1 kind=x ranks=2 stages=2 microbatches=2 placement=loop\n" + rows
    schedule = Schedule.parse(text)
    assert simulate(schedule, Costs(1, 1, 1)).makespan == 9.0
    assert simulate(schedule, Costs(1, 1, 1, pair=2.0)).busy[1] == 5.0


def test_memory_limit_names_rank_action_and_bytes() -> None:
    schedule = plan("1f1b", 3, 6)
    costs = Costs(activation_bytes=[100, 200, 300], boundary_bytes=8)
    good = verify(schedule, memory=costs, memory_limit=[400, 500, 400])
    assert good.valid
    over = verify(schedule, memory=costs, memory_limit=[400, 400, 400])
    assert over.rule == "memory"
    assert "at most 400 bytes on rank 1, but got " in over.message
    assert over.peak_bytes == good.peak_bytes
    with pytest.raises(ScheduleError, match="memory_limit"):
        over.raise_if_invalid()


def test_long_schedules_take_no_longer_per_action() -> None:
    found = simulate(plan("1f1b", 64, 4096), Costs(1, 1, 1))
    assert found.makespan == 3 * (4096 + 63)
