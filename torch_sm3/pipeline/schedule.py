# SPDX-License-Identifier: Apache-2.0
"""Schedules: what every rank does, in order."""

from __future__ import annotations

from typing import Any

from torch_sm3 import _ops


class ScheduleError(ValueError):
    r"""Say that a schedule cannot be read or cannot run."""


class Schedule:
    r"""Hold what every rank does in one step: the program of a pipeline.

    Made by :func:`plan` or :meth:`parse`. Two schedules are equal if their texts
    are; pickling stores the text only.

    Example::

        >>> from torch_sm3.pipeline import plan
        >>> print(plan("1f1b", ranks=2, microbatches=3).text, end="")
        schedule 1 kind=1f1b ranks=2 stages=2 microbatches=3 placement=loop
        rank 0: 0F0 0F1 0B0 0F2 0B1 0B2
        rank 1: 1F0 1B0 1F1 1B1 1F2 1B2
    """

    def __init__(self, native: Any) -> None:
        self._native = native
        self._text: str = native.text()

    @classmethod
    def parse(cls, text: str) -> Schedule:
        r"""Read the text form of a schedule.

        Args:
            text: a line ``schedule 1 kind=1f1b ranks=2 stages=2 microbatches=3
                placement=loop``, then a line ``rank 0: 0F0 0F1 …`` for each rank;
                ``.`` is an idle slot and ``#`` starts a comment.

        Raises:
            ScheduleError: naming row, column and cell of what cannot be read.
        """
        try:
            return cls(_ops.pipeline_schedule_class().parse(text))
        except ValueError as error:
            raise ScheduleError(str(error)) from None

    def lower(self) -> Schedule:
        r"""Add the messages that a compute-only schedule lacks.

        Each SEND stands right after its producer, each RECV before the first action
        that starts, if every action took one unit of time, when or after the message
        is sent. A schedule that already holds messages comes back as it is.

        Raises:
            ScheduleError: if the order cannot run, with the actions at which the
                ranks wait for each other.

        Example::

            >>> from torch_sm3.pipeline import plan
            >>> print(plan("1f1b", ranks=2, microbatches=1).lower().text, end="")
            schedule 1 kind=1f1b ranks=2 stages=2 microbatches=1 placement=loop
            rank 0: 0F0 0RECV_B0 0SEND_F0 0B0
            rank 1: 1RECV_F0 1F0 1B0 1SEND_B0
        """
        try:
            return Schedule(self._native.lower())
        except ValueError as error:
            raise ScheduleError(str(error)) from None

    @property
    def text(self) -> str:
        r"""Text form; :meth:`parse` reads it back without loss."""
        return self._text

    @property
    def kind(self) -> str:
        r"""Name of the plan, for example ``1f1b``."""
        return str(self._native.kind())

    @property
    def ranks(self) -> int:
        r"""Number of ranks p."""
        return int(self._native.ranks())

    @property
    def stages(self) -> int:
        r"""Number of stages, chunks of all ranks together."""
        return int(self._native.stages())

    @property
    def microbatches(self) -> int:
        r"""Number of microbatches m."""
        return int(self._native.microbatches())

    @property
    def placement(self) -> list[int]:
        r"""Rank of each stage."""
        return list(self._native.placement())

    def actions(self, rank: int) -> list[tuple[str, int, int]]:
        r"""Return operation, stage and microbatch of each action of a rank.

        Args:
            rank: the rank.

        Raises:
            ValueError: if there is no such rank.
        """
        return list(self._native.actions(rank))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)

    def __repr__(self) -> str:
        return f"Schedule.parse({self._text!r})"

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return Schedule.parse, (self._text,)


def plan(
    kind: str, ranks: int, microbatches: int, *, chunks: int | None = None
) -> Schedule:
    r"""Plan a schedule of p ranks and m microbatches.

    .. math::
        \text{bubble of gpipe and 1f1b} = (p - 1)(F + B)

    Any m is legal. ``none`` (p = 1) runs forward and backward of each microbatch in
    turn; ``gpipe`` all forwards, then all backwards; ``1f1b`` warms up with
    :math:`\min(m, p - 1 - r)` forwards on rank r, alternates and drains, so that rank
    r never holds more than :math:`\min(p - r, m)` microbatches; ``forward`` runs
    forwards only, chunk after chunk.

    Args:
        kind: ``none``, ``gpipe``, ``1f1b`` or ``forward``.
        ranks: number of ranks p.
        microbatches: number of microbatches m.
        chunks: stages per rank; more than one only with ``forward``.

    Returns:
        A compute-only :class:`Schedule`.

    Raises:
        ValueError: naming the argument that is wrong.

    Example::

        >>> from torch_sm3.pipeline import plan
        >>> plan("gpipe", ranks=2, microbatches=2).actions(1)[:3]
        [('F', 1, 0), ('F', 1, 1), ('B', 1, 0)]

    GPipe: Huang et al., 2019, https://arxiv.org/abs/1811.06965; 1F1B: Narayanan et
    al., 2021, https://arxiv.org/abs/2104.04473.
    """
    chunks = 1 if chunks is None else chunks
    return Schedule(_ops.pipeline_schedule_class()(kind, ranks, chunks, microbatches))
