# SPDX-License-Identifier: Apache-2.0
"""Stamps of a rank's actions, and clocks that agree."""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from torch_sm3.pipeline.schedule import Schedule

#: Before the name of an action, in traces and in torch's profiler.
PREFIX = "torch_sm3.pipeline "


class Stamps(NamedTuple):
    """What one rank noted in one step, by the index of the action in its row.

    Attributes:
        step: number of the step.
        begin: when the action began, in nanoseconds; 0 if it never did.
        ready: when its inputs were there.
        end: when it ended.
        live: bytes of activations that were kept afterwards.
        pending: sends that were under way afterwards.
    """

    step: int
    begin: array[int]
    ready: array[int]
    end: array[int]
    live: array[int]
    pending: array[int]

    @classmethod
    def empty(cls, step: int, actions: int) -> Stamps:
        """Return stamps of which none is set."""
        return cls(step, *(array("q", bytes(8 * actions)) for _ in range(5)))

    def shifted(self, nanoseconds: int) -> Stamps:
        """Return the stamps on another clock; what never began stays 0."""

        def moved(column: array[int]) -> array[int]:
            pairs = zip(column, self.begin, strict=True)
            return array("q", (t + nanoseconds if begun else 0 for t, begun in pairs))

        times = moved(self.begin), moved(self.ready), moved(self.end)
        return Stamps(self.step, *times, live=self.live, pending=self.pending)


class Recorder:
    """Takes the time of every action of one rank.

    While torch's profiler is on, each action is also a ``record_function`` span.
    Times are those of :func:`time.monotonic_ns`, which on Linux is the clock of C++'s
    ``std::chrono::steady_clock``, so that C++ may take them by itself: see
    :meth:`fill`.

    Args:
        schedule: a lowered schedule.
        rank: the rank whose row is run.
        keep: steps that are kept, the latest; 0 takes no time at all.
    """

    def __init__(self, schedule: Schedule, rank: int, keep: int = 8) -> None:
        self._names = [PREFIX + action.text for action in schedule.actions(rank)]
        self._steps: deque[Stamps] = deque(maxlen=keep)
        self._keep = keep
        self._now: Stamps | None = None
        self._index = 0
        self._span: torch.profiler.record_function | None = None

    @property
    def steps(self) -> list[Stamps]:
        """Stamps of the steps that are kept, the earliest first."""
        return list(self._steps)

    def start(self, step: int) -> None:
        """Begin a step; a step that failed stays with the stamps that it has."""
        self._leave()
        if self._keep:
            self._now = Stamps.empty(step, len(self._names))
            self._steps.append(self._now)

    def begin(self, index: int) -> None:
        """Note that an action begins."""
        self._index = index
        if torch._C._autograd._profiler_enabled():
            self._leave()
            self._span = torch.profiler.record_function(self._names[index])
            self._span.__enter__()
        if self._now is not None:
            self._now.begin[index] = self._now.ready[index] = time.monotonic_ns()

    def ready(self) -> None:
        """Note that the inputs of the action are there: it waits no longer."""
        if self._now is not None:
            self._now.ready[self._index] = time.monotonic_ns()

    def end(self, live_bytes: int = 0, pending_sends: int = 0) -> None:
        """Note that the action ends.

        Args:
            live_bytes: activations that are kept now.
            pending_sends: sends that are under way now.
        """
        if self._now is not None:
            self._now.end[self._index] = time.monotonic_ns()
            self._now.live[self._index] = live_bytes
            self._now.pending[self._index] = pending_sends
        self._leave()

    def fill(self, *columns: Sequence[int]) -> None:
        """Set all stamps of the step at once.

        Args:
            *columns: begin, ready, end, live and pending, each as long as the row.
        """
        if self._now is None:
            return
        for own, column in zip(self._now[1:], columns, strict=True):
            if len(column) != len(self._names):
                raise ValueError(
                    f"fill: expected {len(self._names)} stamps, but got {len(column)}"
                )
            own[:] = array("q", column)

    def _leave(self) -> None:
        if self._span is not None:
            self._span.__exit__(None, None, None)
            self._span = None


class Offset(NamedTuple):
    """How far another clock is ahead of this one, and by how much that may be wrong."""

    nanoseconds: int
    error: int


def estimate_offset(samples: Iterable[tuple[int, int, int, int]]) -> Offset:
    r"""Estimate the offset of another clock from messages there and back.

    A message leaves at :math:`t_0` on this clock and arrives at :math:`t_1` on the
    other; the answer leaves at :math:`t_2` on the other and arrives at :math:`t_3` on
    this. Neither travels back in time, so that

    .. math::
        t_2 - t_3 \le \theta \le t_1 - t_0.

    The estimate is the middle of what all samples leave of this interval.

    Args:
        samples: :math:`(t_0, t_1, t_2, t_3)` of each pair of messages.

    Raises:
        ValueError: if there is none.
    """
    bounds = [(t2 - t3, t1 - t0) for t0, t1, t2, t3 in samples]
    if not bounds:
        raise ValueError("estimate_offset: expected a sample, but got none")
    low = max(low for low, _ in bounds)
    high = min(high for _, high in bounds)
    # Of a clock that drifts the intervals may miss each other.
    return Offset((low + high) // 2, abs(high - low + 1) // 2)
