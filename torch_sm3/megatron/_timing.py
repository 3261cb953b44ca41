# SPDX-License-Identifier: Apache-2.0
"""Megatron's timers, which have had levels and barriers since August 2022."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def has_levels(timers: Any) -> bool:
    """Whether timers have levels."""
    return hasattr(timers, "_log_level")


@contextmanager
def timed(
    timers: Any, name: str | None, level: int = 0, barrier: bool = False
) -> Iterator[None]:
    """Time a block.

    Args:
        timers: Megatron's, or None.
        name: of the timer; None to time nothing.
        level: how much must be asked for until it runs, where timers have levels.
        barrier: whether ranks wait for each other first, where timers can.
    """
    if timers is None or name is None:
        yield
        return
    start(timers, name, level, barrier)
    yield
    timers(name).stop()


def start(timers: Any, name: str, level: int = 0, barrier: bool = False) -> None:
    """Start a timer; see :func:`timed`."""
    if has_levels(timers):
        timers(name, log_level=level).start(barrier=barrier)
    else:
        timers(name).start()


def elapsed(timers: Any, name: str) -> float:
    """Return the seconds of a timer and begin anew."""
    options = {"barrier": True} if has_levels(timers) else {}
    return float(timers(name).elapsed(**options))
