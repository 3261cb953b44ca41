# SPDX-License-Identifier: Apache-2.0
"""What the commands print."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from torch_sm3.pipeline.action import Candidate
from torch_sm3.pipeline.schedule import Schedule
from torch_sm3.pipeline.simulator import Simulation


def print_json(content: dict[str, Any]) -> None:
    """Print one JSON object."""
    print(json.dumps(content, indent=1))


def about(schedule: Schedule) -> dict[str, Any]:
    """Return what a schedule is, for JSON."""
    return {
        "kind": schedule.kind,
        "ranks": schedule.ranks,
        "stages": schedule.stages,
        "microbatches": schedule.microbatches,
        "placement": schedule.placement,
    }


def headline(schedule: Schedule) -> str:
    """Return what a schedule is, in a line."""
    sizes = {
        "rank": schedule.ranks,
        "stage": schedule.stages,
        "microbatch": schedule.microbatches,
    }
    endings = {"rank": "s", "stage": "s", "microbatch": "es"}
    return ", ".join(
        [
            schedule.kind,
            *(f"{n} {x}{endings[x] if n != 1 else ''}" for x, n in sizes.items()),
        ]
    )


def candidates(found: Sequence[Candidate]) -> str:
    """Return a table of what a search looked at."""
    wide = max(len(one.plan) for one in found)
    lines = [f"{'':2}{'plan':{wide}} {'makespan':>12} {'peak bytes':>14}"]
    for one in found:
        figures = one.refused or f"{one.makespan:>12.6g} {one.peak_bytes:>14.6g}"
        lines.append(f"{'*' if one.chosen else '':2}{one.plan:{wide}} {figures}")
    return "\n".join(lines)


def table(schedule: Schedule, ran: Simulation, in_bytes: bool) -> str:
    """Return a table of what a simulation found.

    Args:
        schedule: what ran.
        ran: how.
        in_bytes: whether its peaks are bytes; in microbatches of a rank otherwise.
    """
    peak = "peak bytes" if in_bytes else "peak activations"
    lines = [
        headline(schedule),
        f"makespan {ran.makespan:.6g}, at least {ran.lower_bound:.6g}",
        f"{'rank':>4} {'busy':>12} {'idle':>12} {'own idle':>12} {'bubble':>8} "
        f"{peak:>16}",
    ]
    for rank in range(schedule.ranks):
        share = 100 * ran.idle[rank] / ran.makespan if ran.makespan else 0.0
        lines.append(
            f"{rank:>4} {ran.busy[rank]:>12.6g} {ran.idle[rank]:>12.6g} "
            f"{ran.own_idle[rank]:>12.6g} {abs(share):>6.1f} % "
            f"{ran.peak_bytes[rank]:>16.6g}"
        )
    return "\n".join(lines)
