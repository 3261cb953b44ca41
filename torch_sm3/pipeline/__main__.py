# SPDX-License-Identifier: Apache-2.0
"""Plan, verify, simulate and draw schedules from the command line.

``python -m torch_sm3.pipeline plan --kind zbv -p 4 -m 8 -o s.csv`` writes a schedule;
``verify``, ``simulate`` and ``plot`` read one. The exit status is 0 if all is well, 1
if a schedule is invalid or none fits, 2 if the command line is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from torch_sm3.pipeline._command import (
    add_costs,
    add_links,
    add_schedule,
    costs_from,
    links_from,
    numbers,
    read_schedule,
)
from torch_sm3.pipeline._memory import has_bytes, parts_of
from torch_sm3.pipeline._printing import about, candidates, headline, print_json, table
from torch_sm3.pipeline.costs import Costs
from torch_sm3.pipeline.planner import kinds, plan
from torch_sm3.pipeline.plot import plot
from torch_sm3.pipeline.schedule import Schedule, ScheduleError
from torch_sm3.pipeline.simulator import Simulation, simulate, verify
from torch_sm3.pipeline.trace import Trace

_GOOD, _INVALID = 0, 1


def _plan(options: argparse.Namespace) -> int:
    with warnings.catch_warnings(record=True) as advice:
        warnings.simplefilter("always")
        schedule = _planned(options)
    for warning in advice:
        print(f"warning: {warning.message}", file=sys.stderr)
    found = schedule.alternatives
    if options.lower:
        schedule = schedule.lower()
    if options.output is not None:
        schedule.save(options.output)
    if options.json:
        content = about(schedule) | {"text": schedule.text}
        if found:
            content["alternatives"] = [x._asdict() for x in found]
        print_json(content)
        return _GOOD
    if found:
        print(candidates(found), file=sys.stderr)
    if options.output is None:
        print(schedule.text, end="")
    return _GOOD


def _planned(options: argparse.Namespace) -> Schedule:
    return plan(
        options.kind,
        options.ranks,
        options.microbatches,
        chunks=options.chunks,
        group_size=options.group_size,
        costs=costs_from(options),
        link_cost=options.link_cost,
        memory_limit=options.memory_limit,
        max_pending=options.max_pending,
        split=options.split,
        via=options.via,
        warmup=options.warmup,
        rank=options.rank,
    )


def _verify(options: argparse.Namespace) -> int:
    schedule = read_schedule(options.schedule)
    found = verify(
        schedule,
        **links_from(options),
        memory=costs_from(options),
        memory_limit=options.memory_limit,
        full_grid=options.full,
    )
    if options.json:
        print_json(
            about(schedule)
            | {
                "valid": found.valid,
                "rule": found.rule,
                "message": found.message,
                "grid": found.full_grid if options.full else found.grid,
                "peak_bytes": list(found.peak_bytes),
            }
        )
    elif found.valid:
        print(f"valid: {headline(schedule)}")
        if any(found.peak_bytes):
            print("peak bytes:", *(f"{peak:.6g}" for peak in found.peak_bytes))
    else:
        print(f"invalid ({found.rule}): {found.message}")
        print(found.full_grid if options.full else found.grid)
    return _GOOD if found.valid else _INVALID


def _simulate(options: argparse.Namespace) -> int:
    schedule = read_schedule(options.schedule)
    costs = costs_from(options) or Costs()
    in_bytes = has_bytes(costs)
    if not in_bytes:
        # What costs nothing takes no time, but has a place to be counted.
        costs = dataclasses.replace(costs, activation_bytes=parts_of(schedule))
    ran = simulate(schedule, costs, **links_from(options))
    if options.json:
        peaks = [round(peak, 9) for peak in ran.peak_bytes]
        print_json(
            about(schedule)
            | {
                "makespan": ran.makespan,
                "lower_bound": ran.lower_bound,
                "busy": list(ran.busy),
                "idle": list(ran.idle),
                "own_idle": list(ran.own_idle),
                "peak_bytes": peaks if in_bytes else None,
                "peak_activations": None if in_bytes else peaks,
            }
        )
    else:
        print(table(schedule, ran, in_bytes))
    return _GOOD


def _plot(options: argparse.Namespace) -> int:
    source: Simulation | Trace
    costs = costs_from(options)
    if Path(options.schedule).suffix == ".json":
        source = Trace.load(options.schedule)
    else:
        schedule = read_schedule(options.schedule)
        source = simulate(schedule, costs, **links_from(options))
    plot(
        source,
        options.output,
        costs=costs,
        title=options.title,
        width=options.width,
        messages=options.messages,
        memory=options.memory,
    )
    if options.json:
        print_json({"output": options.output})
    return _GOOD


# --- command line ----------------------------------------------------------


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def _count_or_auto(text: str) -> int | str:
    return text if text == "auto" else int(text)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    top = argparse.ArgumentParser(
        prog="python -m torch_sm3.pipeline",
        description=__doc__.split("\n\n")[0],
        epilog="exit status: 0 good, 1 invalid schedule or none that fits, 2 bad usage",
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(
        name: str, run: Callable[[argparse.Namespace], int], text: str, example: str
    ) -> argparse.ArgumentParser:
        made = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            epilog=f"example: python -m torch_sm3.pipeline {name} {example}",
        )
        made.set_defaults(run=run)
        made.add_argument("--json", action="store_true", help="print one JSON object")
        return made

    _plan_options(
        command("plan", _plan, "plan a schedule", "--kind zbv -p 4 -m 8 -o s.csv")
    )
    check = command(
        "verify", _verify, "check a schedule and print what is wrong", "s.csv"
    )
    add_schedule(check)
    add_links(check)
    add_costs(check)
    check.add_argument(
        "--memory-limit",
        type=numbers,
        metavar="BYTES",
        help="of a rank: one number for all or one for each, with commas",
    )
    check.add_argument(
        "--full", action="store_true", help="show all steps of a counter-example"
    )
    paper = command(
        "simulate",
        _simulate,
        "run a schedule on paper and print its times",
        "s.csv --costs 1,1,1 --link-latency 0.1",
    )
    add_schedule(paper)
    add_links(paper)
    add_costs(paper)
    chart = command(
        "plot", _plot, "draw a schedule or a trace as SVG or PNG", "s.csv -o s.svg"
    )
    add_schedule(chart, "a trace .json")
    add_links(chart)
    add_costs(chart)
    chart.add_argument("-o", "--output", required=True, help="file .svg or .png")
    chart.add_argument("--title", help="headline; the kind and the sizes if not given")
    chart.add_argument("--width", type=float, default=1200, help="pixels")
    chart.add_argument(
        "--messages", action="store_true", help="draw an arrow for each message"
    )
    chart.add_argument(
        "--memory", action="store_true", help="draw what each rank holds over time"
    )
    return top


def _plan_options(made: argparse.ArgumentParser) -> None:
    made.add_argument("--kind", required=True, help=", ".join(kinds()))
    made.add_argument("-p", "--ranks", type=_count, required=True, help="ranks")
    made.add_argument(
        "-m", "--microbatches", type=_count, required=True, help="microbatches"
    )
    made.add_argument("--chunks", type=_count, help="stages per rank")
    made.add_argument(
        "--group-size",
        type=_count_or_auto,
        default="auto",
        help="microbatches per group of interleaved",
    )
    add_costs(made, links=False)
    made.add_argument(
        "--link-cost", type=float, default=0.0, help="time of a message one way"
    )
    made.add_argument(
        "--memory-limit",
        type=numbers,
        metavar="BYTES",
        help="of a rank: one number for all or one for each, with commas",
    )
    made.add_argument(
        "--max-pending",
        type=_count,
        default=2,
        help="sends of a link whose bytes count against the limit "
        "(default: %(default)s)",
    )
    made.add_argument("--split", type=_count, help="stages of the encoder")
    made.add_argument(
        "--via",
        choices=("chain", "direct"),
        default="chain",
        help="how the encoder's output reaches the decoder's stages",
    )
    made.add_argument(
        "--warmup", type=_count_or_auto, default="auto", help="rounds of 1f1b's warm-up"
    )
    made.add_argument("--rank", type=int, help="plan the row of this rank alone")
    made.add_argument("--lower", action="store_true", help="add the messages")
    made.add_argument("-o", "--output", type=Path, help="file .csv or .txt")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: the command line, that of the process if None.

    Returns:
        The exit status.
    """
    top = parser()
    options = top.parse_args(arguments)

    def misused(error: Exception) -> NoReturn:
        top.exit(2, f"{top.prog} {options.command}: error: {error}\n")

    try:
        status = int(options.run(options))
        sys.stdout.flush()
        return status
    except ScheduleError as error:
        if options.json:
            print_json({"valid": False, "message": str(error)})
        else:
            print(error, file=sys.stderr)
        return _INVALID
    except BrokenPipeError:
        # Who reads has seen enough; Python flushes once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _GOOD
    except (ValueError, OSError) as error:
        misused(error)


if __name__ == "__main__":
    sys.exit(main())
