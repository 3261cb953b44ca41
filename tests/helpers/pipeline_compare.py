# SPDX-License-Identifier: Apache-2.0
"""Our simulator and verifier against the oracle, to the bit."""

from __future__ import annotations

import random
from typing import Any

from reference.pipeline_costs import Costs as OracleCosts
from reference.pipeline_simulation import simulate as oracle

from torch_sm3.pipeline import Costs, Schedule, simulate, verify

# What the oracle calls otherwise.
NAMES = {
    "forward": "F",
    "input": "I",
    "weight": "W",
    "backward": "B",
    "activation": "activation_bytes",
    "released": "released_at_input",
    "shared": "shared_bytes",
    "boundary": "boundary_bytes",
    "transient": "transient_bytes",
    "static": "static_bytes",
}


def links_of(draw: random.Random) -> dict[str, Any]:
    """Return some model of the links."""
    return {
        "links": draw.choice(["posted", "rendezvous", "blocking"]),
        "max_pending": draw.choice([1, 1, 2, 3]),
    }


def rows_of(schedule: Schedule) -> list[list[Any]]:
    """Return the rows as the oracle takes them."""
    return [schedule.actions(rank) for rank in range(schedule.ranks)]


def compare(schedule: Schedule, costs: dict[str, Any], links: dict[str, Any]) -> None:
    """Fail unless simulator, verifier and oracle say the same of a schedule."""
    ours = Costs(**{NAMES.get(name, name): value for name, value in costs.items()})
    found = simulate(schedule, ours, **links)
    lowered = found.schedule
    wanted = oracle(
        rows_of(lowered),
        lowered.placement,
        OracleCosts(**costs),
        routes=lowered.routes,
        **links,
    )
    assert found.timeline() == wanted.spans
    assert found.makespan == wanted.makespan
    assert found.busy == wanted.busy
    assert found.idle == wanted.idle
    assert found.own_idle == wanted.own_idle
    assert found.peak_bytes == wanted.peak
    assert found.lower_bound <= wanted.makespan * (1 + 1e-12)
    report = verify(schedule, memory=ours, **links)
    assert report.valid, report.message
    assert report.peak_bytes == wanted.peak
