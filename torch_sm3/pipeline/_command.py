# SPDX-License-Identifier: Apache-2.0
"""Arguments that several commands share: schedules, costs and links."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from pathlib import Path
from typing import Any

from torch_sm3.pipeline.costs import Costs
from torch_sm3.pipeline.schedule import Schedule, ScheduleError


def numbers(text: str) -> list[float]:
    """Read numbers with commas between them."""
    return [float(part) for part in text.split(",")]


def read_schedule(name: str) -> Schedule:
    """Read a schedule in its text form or in CSV.

    Args:
        name: of the file; ``-`` for standard input.

    Raises:
        ScheduleError: if it is none.
    """
    try:
        if name != "-":
            return Schedule.load(name)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "schedule"
            path.write_text(sys.stdin.read(), encoding="utf-8")
            return Schedule.load(path)
    except UnicodeError:
        raise ScheduleError(
            f"Schedule: expected a text, but got other bytes in {name!r} "
            "(argument 'schedule')"
        ) from None


def add_schedule(command: argparse.ArgumentParser, more: str = "") -> None:
    """Let a command take a schedule."""
    text = f"file with a schedule, .csv or .txt, {more + ', ' if more else ''}or -"
    command.add_argument("schedule", help=text)


def add_costs(command: argparse.ArgumentParser, links: bool = True) -> None:
    """Let a command take what actions, and perhaps links, cost."""
    group = command.add_argument_group("costs")
    group.add_argument(
        "--costs",
        metavar="F,I,W[,B]",
        help="time of a forward, of the gradients of inputs and of weights, and of a "
        "full backward if it is not their sum; or a .json file that Costs.save or "
        "profile made (default: 1,1,1)",
    )
    if links:
        group.add_argument(
            "--link-latency", type=float, metavar="TIME", help="of a message one way"
        )
        group.add_argument(
            "--link-bandwidth",
            type=float,
            metavar="RATE",
            help="bytes per unit of time (default: without limit)",
        )


def costs_from(options: argparse.Namespace) -> Costs | None:
    """Return the costs of the command line, None if it names none.

    Raises:
        ValueError: if they cannot be read.
    """
    text = options.costs
    latency = getattr(options, "link_latency", None)
    bandwidth = getattr(options, "link_bandwidth", None)
    if text is None and latency is None and bandwidth is None:
        return None
    if text is not None and text.endswith(".json"):
        costs = Costs.load(text)
    else:
        costs = Costs() if text is None else _times(text)
    changes: dict[str, Any] = {}
    if latency is not None:
        changes["latency"] = latency
    if bandwidth is not None:
        changes["bandwidth"] = bandwidth
    return dataclasses.replace(costs, **changes)


def _times(text: str) -> Costs:
    try:
        found = numbers(text)
    except ValueError:
        found = []
    if len(found) not in (3, 4) or min(found) < 0:
        raise ValueError(
            "costs: expected three or four times F,I,W[,B] or a .json file, but got "
            f"{text!r} (argument '--costs')"
        )
    forward, first, second, *full = found
    return Costs(forward, first, second, full[0] if full else None)


def add_links(command: argparse.ArgumentParser) -> None:
    """Let a command take how messages are posted and matched."""
    group = command.add_argument_group("links")
    group.add_argument(
        "--links",
        choices=("posted", "rendezvous", "blocking"),
        default="rendezvous",
        help="whether a rank waits for its sends: never, when --max-pending are "
        "unmatched, or at each (default: %(default)s)",
    )
    group.add_argument(
        "--max-pending",
        type=int,
        default=1,
        help="unmatched sends of a link (default: %(default)s)",
    )


def links_from(options: argparse.Namespace) -> dict[str, Any]:
    """Return the links of the command line as keyword arguments."""
    return {"links": options.links, "max_pending": options.max_pending}
