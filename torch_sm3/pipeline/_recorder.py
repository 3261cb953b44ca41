# SPDX-License-Identifier: Apache-2.0
"""Stamps of a rank's actions, and clocks that agree."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch_sm3.pipeline.schedule import Action, Schedule


class Stamps(NamedTuple):
    """What one rank noted in one step, by the index of the action in its row.

    Attributes:
        step: number of the step.
        begin: when the action began, in nanoseconds; 0 if it never did.
        ready: when its inputs were there.
        end: when it ended.
        live: bytes of activations and messages that were in use afterwards.
        pending: sends that were under way afterwards.
        peak: most of these bytes meanwhile.
        made: bytes of the messages that a computation made, or of the one that left.
        kept: bytes that a backward found kept for it.
        shared: part of them that is the stage's output as well; -1 if that cannot be
            told, since the output still waited to be sent.
    """

    step: int
    begin: array[int]
    ready: array[int]
    end: array[int]
    live: array[int]
    pending: array[int]
    peak: array[int]
    made: array[int]
    kept: array[int]
    shared: array[int]

    @classmethod
    def empty(cls, step: int, actions: int) -> Stamps:
        """Return stamps of which none is set."""
        return cls(step, *(array("q", bytes(8 * actions)) for _ in cls._fields[1:]))

    def shifted(self, nanoseconds: int) -> Stamps:
        """Return the stamps on another clock; what never began stays 0."""

        def moved(column: array[int]) -> array[int]:
            pairs = zip(column, self.begin, strict=True)
            return array("q", (t + nanoseconds if begun else 0 for t, begun in pairs))

        times = moved(self.begin), moved(self.ready), moved(self.end)
        return Stamps(self.step, *times, *(column[:] for column in self[4:]))


class Recorder:
    """Keeps the stamps of the latest steps of one rank.

    Args:
        schedule: a lowered schedule.
        rank: the rank.
        keep: most steps that are kept.
    """

    def __init__(self, schedule: Schedule, rank: int, keep: int = 8) -> None:
        texts = [action.text for action in schedule.actions(rank)]
        self._places = {text: index for index, text in enumerate(texts) if text != "."}
        self._size = len(texts)
        self.steps: deque[Stamps] = deque(maxlen=keep)

    def add(
        self, step: int, row: Sequence[Action], columns: Sequence[Sequence[int]]
    ) -> None:
        """Keep the stamps of one more step.

        Args:
            step: number of the step.
            row: what the rank ran; what its row of the schedule does not have is left
                out.
            columns: of each action what :class:`Stamps` holds, in its order.
        """
        stamps = Stamps.empty(step, self._size)
        places = [self._places.get(action.text, -1) for action in row]
        for own, column in zip(stamps[1:], columns, strict=True):
            for place, value in zip(places, column, strict=True):
                if place >= 0:
                    own[place] = value
        self.steps.append(stamps)


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
