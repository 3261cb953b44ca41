# SPDX-License-Identifier: Apache-2.0
"""Fault drills: one rank of four raises, ends or falls silent somewhere in a step.

Raise, exit, SIGKILL and SIGSTOP, in data, forward, loss, backward, input and weight
gradient, send, receive, communication hook and optimizer, and between steps; in the
warm-up, the steady state and the cool-down of several kinds of schedules. Of each drill
is asked that all ranks raise the same error within ten seconds, that no gradient is
left, and that the next step has the bits of an undisturbed run: with the same runner
after an exception, with one of the ranks that are left after the loss of a process,
where the old runner must go on to raise the same error.
"""

from __future__ import annotations

import argparse
from typing import Any

from _crew import Crew
from _drills import FAULTS, Outcome, drills, perform
from _report import Figure, arguments, finish
from _triggers import RANKS, Drill

WITHIN = 10.0
PATIENCE = 100.0


def judge(drill: Drill, answers: dict[int, Any], struck: list[float]) -> list[str]:
    """Return what is not as asked."""
    alive = [r for r in range(RANKS) if r != drill.rank or drill.fault in KEEP]
    seen = {rank: answers.get(rank) for rank in alive}
    silent = [rank for rank, one in seen.items() if one is None]
    odd = {rank: one for rank, one in seen.items() if isinstance(one, str)}
    if silent or odd or not struck:
        return [f"no answer of ranks {silent}; {odd}; struck {len(struck)} times"]
    outcomes = [one for one in seen.values() if isinstance(one, Outcome)]
    wrong = []
    errors = {one.error for one in outcomes}
    if len(errors) > 1:
        wrong.append(f"errors differ: {errors}")
    if any(kind not in TYPES[drill.fault] for *_, kind, _, _ in errors):
        wrong.append(f"another type of error: {errors}")
    size = RANKS // 2 if drill.phase == "hook" else RANKS
    named = {error[0] + size * error[-1] for error in errors}
    if drill.fault != "stop" and named != {drill.rank}:
        wrong.append(f"another rank is named: {errors}")
    for name in ("clean", "again", "sound"):
        if not all(getattr(one, name) for one in outcomes):
            wrong.append(f"not {name}: {[getattr(one, name) for one in outcomes]}")
    taken = seconds(drill, answers, struck)
    if taken > WITHIN:
        wrong.append(f"{taken:.1f} s")
    return wrong


#: Faults after which the rank itself still answers.
KEEP = ("raise", "stop")
TYPES = {
    "raise": ("ArithmeticError", "KeyboardInterrupt"),
    "exit": ("PeerLost",),
    "kill": ("PeerLost",),
    "stop": ("TimeoutError",),
}


def seconds(drill: Drill, answers: dict[int, Any], struck: list[float]) -> float:
    """Return the time from the fault to the last rank's error."""
    others = [
        one.when
        for rank, one in answers.items()
        if isinstance(one, Outcome) and (rank != drill.rank or drill.fault == "raise")
    ]
    return max(others) - struck[0] if others and struck else 0.0


def hold(drill: Drill, crew: Crew) -> tuple[dict[int, Any], list[float]]:
    """Do a drill; return the answers of the ranks and when the fault came."""
    crew.call(perform, drill)
    if drill.fault != "stop":
        return crew.listen(range(RANKS), PATIENCE)
    others = [rank for rank in range(RANKS) if rank != drill.rank]
    answers, _ = crew.listen(others, PATIENCE)
    crew.wake(drill.rank)
    late, struck = crew.listen([drill.rank], PATIENCE)
    return {**answers, **late}, struck


def main() -> None:
    """Parse the command line, hold the drills, print the figures and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", choices=FAULTS, action="append", help="only these")
    parser.add_argument("--every", action="store_true", help="all combinations")
    parser.add_argument("--first", type=int, default=0, help="drills to leave out")
    parser.add_argument("--last", type=int, help="number of the first not to hold")
    arguments(parser)
    options = parser.parse_args()
    todo = [d for d in drills(options.every) if d.fault in (options.fault or FAULTS)]
    todo = todo[options.first : options.last][:: 10 if options.quick else 1]
    records: list[dict[str, Any]] = []
    crew: Crew | None = None
    for drill in todo:
        crew = crew or Crew(RANKS)
        answers, struck = hold(drill, crew)
        wrong = judge(drill, answers, struck)
        taken = seconds(drill, answers, struck)
        error = next((o.error for o in answers.values() if isinstance(o, Outcome)), ())
        records.append(
            {**drill._asdict(), "seconds": taken, "error": error, "wrong": wrong}
        )
        print(" ".join(map(str, drill)), f"{taken:.2f} s", *wrong, flush=True)
        if wrong or drill.fault != "raise":
            lost = () if drill.fault in KEEP else (drill.rank,)
            silent = {*range(RANKS)} - {*lost} - {r for r, x in answers.items() if x}
            print(*crew.show(silent), end="\n" * bool(silent), flush=True)
            crew.end()
            crew = None
    if crew is not None:
        crew.end()
    figures = []
    for fault in FAULTS:
        own = [record for record in records if record["fault"] == fault]
        if own:
            good = sum(not record["wrong"] for record in own)
            slowest = max(record["seconds"] for record in own)
            figures += [
                Figure(
                    f"{fault}: {good} of {len(own)} drills as asked, share",
                    good / len(own),
                    least=1.0,
                ),
                Figure(f"{fault}: slowest, seconds", slowest, limit=WITHIN),
            ]
    good = sum(not record["wrong"] for record in records)
    figures.append(Figure("drills as asked", good, least=len(records)))
    finish(figures, options, {"drills": records})


if __name__ == "__main__":
    main()
