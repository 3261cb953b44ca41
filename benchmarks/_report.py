# SPDX-License-Identifier: Apache-2.0
"""Measured figures beside what is required of them."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Figure:
    """One measured ratio or count.

    Attributes:
        name: what was measured, over what.
        value: the measured value.
        limit: what it may be at most, None where nothing is required.
        least: what it must be at least, None where nothing is required.
    """

    name: str
    value: float
    limit: float | None = None
    least: float | None = None

    @property
    def holds(self) -> bool:
        """Whether the requirement is met."""
        return (self.limit is None or self.value <= self.limit) and (
            self.least is None or self.value >= self.least
        )

    def line(self) -> str:
        """Return one line of the table."""
        asked = "" if self.limit is None else f"  (at most {self.limit:g})"
        asked += "" if self.least is None else f"  (at least {self.least:g})"
        verdict = "" if self.holds else "  <-- NOT MET"
        return f"{self.name:72} {self.value:12.4f}{asked}{verdict}"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add what all benchmarks of this kind take."""
    parser.add_argument("--quick", action="store_true", help="sizes of some seconds")
    parser.add_argument(
        "--check", action="store_true", help="fail where a requirement is not met"
    )
    parser.add_argument("--json", type=Path, help="file to write the figures to")


def finish(
    figures: list[Figure], options: argparse.Namespace, measured: dict[str, Any]
) -> None:
    """Print the figures, write them as JSON, and fail if that is asked for."""
    print("\n".join(figure.line() for figure in figures), flush=True)
    if options.json:
        content = {
            "options": {key: str(value) for key, value in vars(options).items()},
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            **measured,
            "figures": [{**asdict(f), "holds": f.holds} for f in figures],
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    missed = [figure.name for figure in figures if not figure.holds]
    if options.check and missed:
        sys.exit("not met: " + "; ".join(missed))
