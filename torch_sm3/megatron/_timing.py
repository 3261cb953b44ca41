# SPDX-License-Identifier: Apache-2.0
"""Megatron's timers, which have had levels and barriers since August 2022."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch_sm3.pipeline.schedule import Action

# Times of single actions are what timers of this level are for.
DETAILS = 2
# The timer of what an action does, and of what it waits for.
_RUNS = {"B": "backward-compute", "I": "backward-compute", "W": "backward-compute"}
_RUNS.update(SEND_F="forward-send", SEND_B="backward-send")
_WAITS = {"F": "forward-recv", "B": "backward-recv", "I": "backward-recv"}


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
    try:
        yield
    finally:
        # A timer that still runs could not be started in the next step.
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


def wants_details(timers: Any) -> bool:
    """Whether timers of single actions run."""
    return timers is not None and getattr(timers, "_log_level", DETAILS) >= DETAILS


def add_actions(timers: Any, actions: Iterable[tuple[Action, float, float]]) -> None:
    """Give timers what single actions took; Megatron's forward step has its own.

    Args:
        timers: Megatron's.
        actions: each with the seconds that it waited and ran.
    """
    for action, waited, ran in actions:
        for names, seconds in ((_WAITS, waited), (_RUNS, ran)):
            if action.op in names:
                _add(timers, names[action.op], seconds)


def _add(timers: Any, name: str, seconds: float) -> None:
    timer = timers(name, log_level=DETAILS) if has_levels(timers) else timers(name)
    for attribute in ("elapsed_", "_elapsed", "_active_time"):
        if hasattr(timer, attribute):
            setattr(timer, attribute, getattr(timer, attribute) + seconds)
