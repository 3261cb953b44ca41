# SPDX-License-Identifier: Apache-2.0
"""Costs, and that each of them reaches the library."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from reference.pipeline_costs import Costs as OracleCosts
from reference.pipeline_simulation import simulate as oracle

from torch_sm3.pipeline import Costs, Schedule, plan, simulate, verify

# What the oracle calls the costs.
NAMES = {
    "F": "forward",
    "I": "input",
    "W": "weight",
    "B": "backward",
    "activation_bytes": "activation",
    "released_at_input": "released",
    "shared_bytes": "shared",
    "boundary_bytes": "boundary",
    "transient_bytes": "transient",
    "static_bytes": "static",
}
OF_STAGES = (
    "F I W B pair recompute reduce optimizer activation_bytes released_at_input "
    "boundary_bytes transient_bytes static_bytes"
).split()


def random_costs(schedule: Schedule, rng: random.Random) -> dict[str, Any]:
    """Draw every cost, as a number or one for each."""
    p, stages = schedule.ranks, schedule.stages

    def number() -> float:
        return rng.randrange(1, 9) / 4

    def some(count: int) -> Any:
        return [number() for _ in range(count)] if rng.random() < 0.7 else number()

    costs: dict[str, Any] = {name: some(stages) for name in OF_STAGES}
    costs["released_at_input"] = rng.choice([0.25, -0.5])
    costs["shared_bytes"] = rng.choice([0.0, 0.25])
    for name in ("B", "pair"):
        if rng.random() < 0.5:
            costs[name] = None
    costs["route_bytes"] = some(max(1, len(schedule.routes)))
    costs["tie"] = some(max(1, len(schedule.ties)))
    costs["latency"] = [[number() for _ in range(p)] for _ in range(p)]
    costs["bandwidth"] = [[number() for _ in range(p)] for _ in range(p)]
    costs["speed"] = some(p)
    costs["serial_links"] = rng.random() < 0.5
    costs["optimizer_waits"] = rng.random() < 0.5
    costs["jitter"], costs["seed"] = number(), rng.randrange(1000)
    return costs


def cases() -> list[Schedule]:
    return [
        plan("1f1b", 3, 5).with_routes([(0, 2)]).with_ties([(0, 2), (1, 2)]),
        plan("zbv", 2, 5).with_ties([(0, 3)]),
        plan("dualpipe_v", 2, 4),
        plan("interleaved", 2, 4).with_routes([(0, 1), (1, 3)]),
        plan("forward", 3, 4, chunks=2),
    ]


@pytest.mark.parametrize("seed", range(4))
def test_every_cost_reaches_the_simulator(seed: int) -> None:
    rng = random.Random(seed)
    for schedule in cases():
        given = random_costs(schedule, rng)
        links = rng.choice(["posted", "rendezvous", "blocking"])
        pending = rng.choice([1, 2])
        found = simulate(schedule, Costs(**given), links=links, max_pending=pending)
        rows = [found.schedule.actions(rank) for rank in range(schedule.ranks)]
        wanted = oracle(
            rows,
            schedule.placement,
            OracleCosts(**{NAMES.get(name, name): c for name, c in given.items()}),
            links=links,
            max_pending=pending,
            routes=schedule.routes,
        )
        assert found.schedule == schedule.lower()
        assert found.makespan == pytest.approx(wanted.makespan, rel=1e-12)
        assert found.busy == pytest.approx(wanted.busy, rel=1e-12)
        assert found.idle == pytest.approx(wanted.idle, rel=1e-9, abs=1e-9)
        assert found.own_idle == pytest.approx(wanted.own_idle, rel=1e-9, abs=1e-9)
        assert found.peak_bytes == pytest.approx(wanted.peak, rel=1e-12)
        assert found.lower_bound <= found.makespan * (1 + 1e-12)
        for spans, expected in zip(found.timeline(), wanted.spans, strict=True):
            starts = [start for start, _ in expected]
            assert [start for start, _ in spans] == pytest.approx(starts, rel=1e-12)
        report = verify(
            schedule, links=links, max_pending=pending, memory=Costs(**given)
        )
        assert report.valid and report.peak_bytes == found.peak_bytes


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "zb_h1"])
def test_the_lower_bound_is_work_and_the_ways_to_and_from_it(kind: str) -> None:
    forward, first, second = [1.0, 4.0, 2.0, 3.0], [2.0, 1.0, 5.0, 1.0], 1.5
    speed, m = [1.0, 2.0, 1.0, 0.5], 3
    latency = [[abs(3 * a - 2 * b) / 4 for b in range(4)] for a in range(4)]
    costs = Costs(forward, first, second, latency=latency, speed=speed)
    wanted, there, back = 0.0, 0.0, 0.0
    split = kind == "zb_h1"
    for r in range(4):
        # Weight gradients of a split backward keep nobody else waiting.
        chained = forward[r] + first[r] + (0 if split else second)
        busy = m * (forward[r] + first[r] + second) / speed[r]
        wanted = max(wanted, there + max(busy, m * chained / speed[r] + back))
        if r < 3:
            there += forward[r] / speed[r] + latency[r][r + 1]
            back += (chained - forward[r]) / speed[r] + latency[r + 1][r]
    ran = simulate(plan(kind, 4, m), costs)
    assert ran.lower_bound == pytest.approx(wanted, rel=1e-12)
    assert ran.makespan >= wanted


def test_costs_compare_hash_and_come_back_from_json(tmp_path: Path) -> None:
    costs = Costs(
        1, [1, 2], (3, 4), latency=[[0, 1], [2, 0]], serial_links=True, seed=7
    )
    same = Costs(F=1.0, I=(1.0, 2.0), W=[3, 4], latency=((0, 1), (2, 0)),
                 serial_links=True, seed=7)  # fmt: skip
    assert costs == same and hash(costs) == hash(same) and costs != Costs()
    assert Costs.from_json(costs.to_json()) == costs
    assert set(json.loads(costs.to_json())) == {
        "I", "W", "latency", "serial_links", "seed"
    }  # fmt: skip
    costs.save(tmp_path / "costs.json")
    assert Costs.load(tmp_path / "costs.json") == costs
    assert Costs.from_json("{}") == Costs()
    with pytest.raises(dataclasses.FrozenInstanceError):
        costs.F = 2.0  # type: ignore[misc]


def test_values_are_lists_by_name_and_come_back() -> None:
    costs = Costs(F=[1, 2], pair=3, latency=[[0, 1], [2, 0]], jitter=0.5, seed=9)
    values = costs.values()
    assert values["F"] == [1.0, 2.0] and values["pair"] == [3.0] and "B" not in values
    assert values["latency"] == [0.0, 1.0, 2.0, 0.0]
    flat = dataclasses.replace(costs, latency=(0, 1, 2, 0))
    assert Costs.from_values(values) == flat


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"F": -1}, "finite numbers of 0 or more, but got -1 (argument 'F')"),
        ({"I": float("nan")}, "but got nan (argument 'I')"),
        ({"W": "1"}, None),
        ({"W": "one"}, "but got 'one' (argument 'W')"),
        ({"F": None}, "but got None (argument 'F')"),
        ({"B": [1, None]}, "but got None (argument 'B')"),
        ({"pair": [None]}, "but got None (argument 'pair')"),
        ({"F": []}, "one number or more, but got [] (argument 'F')"),
        ({"seed": "x"}, "a number, but got 'x' (argument 'seed')"),
        ({"jitter": [1]}, "a number, but got [1] (argument 'jitter')"),
    ],
)
def test_costs_that_are_none_are_refused(arguments: dict, message: str | None) -> None:
    if message is None:
        assert Costs(**arguments) == Costs()
        return
    with pytest.raises(ValueError, match=r"^Costs: expected ") as caught:
        Costs(**arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        (Costs(F=[1, 2]), "(argument 'stages')"),
        (Costs(F=[1, 2, 3], I=[1, 2]), "one for each of 3 stages, but got 2"),
        (Costs(latency=[1, 2]), "(argument 'latency')"),
        (Costs(speed=[1, 2]), "(argument 'speed')"),
        (Costs(speed=0), "speed from 1e-60 to 1e+60, but got 0 (argument 'speed')"),
        (Costs(bandwidth=1e-99), "bandwidth from 1e-60 to 1e+60, but got 1e-99"),
        (Costs(W=1e308), "costs from 0 to 1e+60, but got 1e+308 (argument 'weight')"),
        (Costs(latency=1e61), "costs from 0 to 1e+60, but got 1e+61 (argument 'la"),
        (Costs(jitter=-1), "costs from 0 to 1e+60, but got -1 (argument 'jitter')"),
        (Costs(jitter=math.nan), "but got nan (argument 'jitter')"),
        (Costs(seed=-1), "a whole number from 0 to 2^53, but got -1"),
        (Costs(seed=2**60), "(argument 'seed')"),
        (Costs(seed=0.5), "(argument 'seed')"),
    ],
)
def test_costs_that_do_not_fit_the_schedule_are_refused(
    costs: Costs, message: str
) -> None:
    with pytest.raises(ValueError, match=r": expected ") as caught:
        simulate(plan("1f1b", 3, 2), costs)
    assert message in str(caught.value)


def test_the_largest_costs_overflow_nothing() -> None:
    most = 1e60
    costs = Costs(most, most, most, latency=most, jitter=most, speed=1e-60, seed=3)
    costs = dataclasses.replace(
        costs, bandwidth=1e-60, boundary_bytes=most, activation_bytes=most
    )
    found = simulate(plan("1f1b", 3, 9), costs)
    assert all(map(math.isfinite, [found.makespan, found.lower_bound, *found.idle]))
    best = plan("auto", 2, 3, costs=costs, link_cost=most)
    assert best.costs is not None
    assert math.isfinite(simulate(best, best.costs).makespan)
    with pytest.raises(
        ValueError, match=r"a link cost from 0 to 1e\+60, but got 1e\+308"
    ):
        plan("auto", 2, 3, link_cost=1e308)


@pytest.mark.parametrize("text", ["[]", '{"G": 1}', '{"F": -1}', "F=1", ""])
def test_json_of_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^Costs: expected .*\(argument '\w+'\)$"):
        Costs.from_json(text)


def test_recomputation_is_part_of_each_backward() -> None:
    again = Costs(F=1, I=2, W=3, recompute=0.5)
    assert simulate(plan("none", 1, 4), again).busy == [4 * (1 + 2 + 3 + 0.5)]
    assert simulate(plan("zb_h1", 1, 4), again).busy == [4 * (1 + 2 + 3 + 0.5)]
    # A full backward that was measured holds its own.
    whole = dataclasses.replace(again, B=4)
    assert simulate(plan("none", 1, 4), whole).busy == [4 * (1 + 4)]
    # The search knows it, and shares it out among chunks.
    best = plan("auto", 2, 4, costs=again)
    same = plan("auto", 2, 4, costs=Costs(F=1, I=2.5, W=3))
    assert best == same and best.costs is not None
    assert simulate(best, best.costs).makespan == pytest.approx(
        simulate(same, same.costs).makespan
    )
