# SPDX-License-Identifier: Apache-2.0
"""Idle time and peak of every planned schedule, against their formulas.

The simulated half runs every plan on paper for p in {2, 3, 4, 5, 8}, v in 1 to 4, m in
1 to 4p and three sets of costs, wherever the formula is valid, and compares bubble,
peak and idle time. The measured half runs plans over Gloo with stages that sleep, and
compares the time of a step with the formula.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from _pipeline_formulas import Case, cases
from _pipeline_sleep import makespan
from _report import Figure, arguments, finish

from torch_sm3.pipeline import Costs, plan, simulate

RANKS = (2, 3, 4, 5, 8)
CHUNKS = (1, 2, 3, 4)
TRIPLES = ((1.0, 1.0, 1.0), (1.0, 2.0, 1.0), (3.0, 4.0, 2.0))
EXACT = 1e-9
MEASURED = 1.05

Measured = tuple[list[Figure], dict[str, Any]]


@dataclasses.dataclass
class Worst:
    """Largest deviations of one kind.

    Attributes:
        cases: how many were run.
        bubble: of the bubble, or by how much it is above its bound.
        peak: of the peak.
        idle: of the own idle time, or by how much a rank's is above its bound.
    """

    cases: int = 0
    bubble: float = 0.0
    peak: float = 0.0
    idle: float = 0.0


def run(case: Case, worst: Worst) -> None:
    """Simulate one plan and note its deviations."""
    f, i, w = (cost / case.v for cost in case.costs)
    costs = Costs(
        F=f, I=i, W=w, pair=case.pair, latency=case.link, activation_bytes=1.0
    )
    schedule = plan(
        case.kind,
        case.p,
        case.m,
        chunks=case.v,
        costs=costs,
        link_cost=case.link,
    )
    found = simulate(schedule, costs)
    worst.cases += 1
    above = found.makespan - case.work - case.bubble
    worst.bubble = max(worst.bubble, above if case.at_most else abs(above))
    if isinstance(case.peak, list):
        off = max(abs(a - b) for a, b in zip(found.peak_bytes, case.peak, strict=True))
        worst.peak = max(worst.peak, off)
    elif case.peak is not None:
        worst.peak = max(worst.peak, abs(max(found.peak_bytes) - case.peak))
    if case.own_idle is not None:
        for idle, wanted in zip(found.own_idle, case.own_idle, strict=True):
            worst.idle = max(worst.idle, abs(idle - wanted))
    if case.idle is not None:
        for idle, most in zip(found.idle, case.idle, strict=True):
            worst.idle = max(worst.idle, idle - most)


def grid(ranks: tuple[int, ...]) -> Iterator[Case]:
    """Give every case of the simulated half."""
    for p, v, triple in itertools.product(ranks, CHUNKS, TRIPLES):
        for m in range(1, 4 * p + 1):
            yield from cases(p, m, v, triple)


def simulated(options: argparse.Namespace) -> Measured:
    """Compare the simulator with every formula."""
    kinds: dict[str, Worst] = {}
    for case in grid((2, 4) if options.quick else RANKS):
        run(case, kinds.setdefault(case.kind, Worst()))
    figures = [
        Figure(f"{kind}: {what}, largest deviation", value, limit=EXACT)
        for kind, worst in kinds.items()
        for what, value in (
            ("bubble", worst.bubble),
            ("peak", worst.peak),
            ("idle time", worst.idle),
        )
    ]
    counts = {kind: worst.cases for kind, worst in kinds.items()}
    figures.append(Figure("plans compared with their formula", sum(counts.values())))
    return figures, {"cases": counts}


def measured(options: argparse.Namespace) -> Measured:
    """Measure steps of four processes whose stages sleep."""
    p, m, seconds = 4, 8, (0.02, 0.02, 0.02)
    wanted = {("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb_h1", 1)}
    wanted |= {("zbv", 2), ("v_half", 2)}
    if options.quick:
        wanted = {("1f1b", 1), ("zbv", 2)}
    chosen = [
        case
        for v in (1, 2)
        for case in cases(p, m, v, seconds)
        if (case.kind, v) in wanted and not case.link
    ]
    figures, times = [], {}
    for case in chosen:
        taken = makespan(case.kind, p, m, case.v, seconds)
        times[case.kind] = taken
        figures.append(
            Figure(
                f"{case.kind}: measured makespan over formula, p = {p}, m = {m}",
                taken / (case.work + case.bubble),
                limit=MEASURED,
            )
        )
    return figures, {"seconds": times}


HALVES: dict[str, Callable[[argparse.Namespace], Measured]] = {
    "simulated": simulated,
    "measured": measured,
}


def main() -> None:
    """Parse the command line, compare, print the figures and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--half",
        choices=tuple(HALVES),
        action="append",
        help="may be given twice; the simulated one by default",
    )
    arguments(parser)
    options = parser.parse_args()
    figures: list[Figure] = []
    found: dict[str, Any] = {}
    for half in options.half or ["simulated"]:
        own, more = HALVES[half](options)
        figures += own
        found[half] = more
    finish(figures, options, found)


if __name__ == "__main__":
    main()
