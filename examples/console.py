# SPDX-License-Identifier: Apache-2.0
"""What rank 0 prints while it trains: a progress bar and aligned lines."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

try:
    from tqdm import tqdm
except ImportError:
    tqdm = None

MIB, KIB = 2**20, 2**10


class Console:
    """Prints on rank 0 only; lines and the progress bar do not disturb each other."""

    HEADING = (
        f"{'step':>5} {'loss':>8} {'held-out':>8} {'lr':>8} {'tokens/s':>9} "
        f"{'peak MiB':>9} {'state KiB':>10}"
    )

    def __init__(self, rank: int) -> None:
        self.quiet = rank != 0

    def line(self, text: str = "") -> None:
        """Print one line above the progress bar."""
        if self.quiet:
            return
        if tqdm is None:
            print(text, flush=True)
        else:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()

    @contextmanager
    def progress(self, done: int, steps: int) -> Iterator[Any]:
        """Show a bar with an ``update`` method; a plain counter without tqdm."""
        self.line(self.HEADING)
        if tqdm is None or self.quiet:
            yield _NoBar()
            return
        # ``disable=None`` leaves it out where nobody watches, as in a log file.
        with tqdm(
            total=steps, initial=done, unit="step", leave=False, disable=None
        ) as bar:
            yield bar

    def log_line(self, entry: dict[str, float], held_out: float | None) -> None:
        """Print one step: what ``HEADING`` names, the peak and state of this rank."""
        validation = "" if held_out is None else f"{held_out:.4f}"
        self.line(
            f"{entry['step']:>5.0f} {entry['loss']:>8.4f} {validation:>8} "
            f"{entry['lr']:>8.2g} {entry['tokens_per_second']:>9,.0f} "
            f"{entry['peak_bytes'] / MIB:>9.1f} {entry['state_bytes'] / KIB:>10,.1f}"
        )


class _NoBar:
    """Stands where no bar is shown."""

    def update(self, steps: int) -> None:
        """Do nothing."""
