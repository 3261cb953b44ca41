# SPDX-License-Identifier: Apache-2.0
"""Schedules: what every rank does, in order."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch_sm3 import _ops


class ScheduleError(ValueError):
    r"""Say that a schedule cannot be read or cannot run."""


class Action(NamedTuple):
    r"""Say what a rank does in one slot of a schedule.

    Attributes:
        op: ``F``, ``B``, ``I``, ``W``, ``SEND_F``, ``RECV_F``, ``SEND_B``, ``RECV_B``,
            ``REDUCE_GRAD``, ``TIE_REDUCE``, ``OPTIM``, ``VALIDATE``, ``UNSHARD``,
            ``RESHARD``, or ``.`` for an idle slot.
        stage: the stage; 0 for ``OPTIM``, ``VALIDATE`` and ``.``.
        microbatch: the microbatch; the number of the tie for ``TIE_REDUCE``.
        route: source and target stage of a message that skips stages, else None.
        paired: whether this and the next action are one cell,
            ``(0F3;5B1)OVERLAP_F_B``.
    """

    op: str
    stage: int
    microbatch: int
    route: tuple[int, int] | None = None
    paired: bool = False

    @property
    def text(self) -> str:
        r"""Text of the action alone, for example ``2F0`` or ``0SEND_F3>2``."""
        if self.op in (".", "OPTIM", "VALIDATE"):
            return self.op
        if self.op in ("REDUCE_GRAD", "UNSHARD", "RESHARD"):
            return f"{self.stage}{self.op}"
        text = f"{self.stage}{self.op}{self.microbatch}"
        if self.route is None:
            return text
        source, target = self.route
        arrow = ">" if self.op.startswith("SEND") else "<"
        return f"{text}{arrow}{target if self.stage == source else source}"


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
        r"""Add the messages and collectives that a compute-only schedule lacks.

        Each SEND stands right after its producer, each RECV before the first action
        that starts, if every cell took one unit of time, when or after the message is
        sent. REDUCE_GRAD follows the last weight gradient of its stage, or the
        TIE_REDUCE that it waits for; OPTIM is last. What is there already stays as it
        is.

        Raises:
            ScheduleError: if the order cannot run, with the actions at which the
                ranks wait for each other.

        Example::

            >>> from torch_sm3.pipeline import plan
            >>> print(plan("1f1b", ranks=2, microbatches=1).lower().text, end="")
            schedule 1 kind=1f1b ranks=2 stages=2 microbatches=1 placement=loop
            rank 0: 0F0 0RECV_B0 0SEND_F0 0B0 0REDUCE_GRAD OPTIM
            rank 1: 1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE_GRAD OPTIM
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

    @property
    def routes(self) -> list[tuple[int, int]]:
        r"""Source and target stage of each value that skips stages."""
        return list(self._native.routes())

    @property
    def ties(self) -> list[list[int]]:
        r"""Stages that hold each tied weight."""
        return list(self._native.ties())

    def actions(self, rank: int) -> list[Action]:
        r"""Return the actions of a rank in order.

        Args:
            rank: the rank.

        Raises:
            ValueError: if there is no such rank.

        Example::

            >>> from torch_sm3.pipeline import plan
            >>> print(*[a.text for a in plan("1f1b", 2, 1).lower().actions(1)])
            1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE_GRAD OPTIM
        """
        routes = [*self.routes, None]  # -1 is the last one
        return [
            Action(op, stage, microbatch, routes[route], paired)
            for op, stage, microbatch, route, paired in self._native.actions(rank)
        ]

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
        >>> [a.text for a in plan("gpipe", ranks=2, microbatches=2).actions(1)]
        ['1F0', '1F1', '1B0', '1B1']

    GPipe: Huang et al., 2019, https://arxiv.org/abs/1811.06965; 1F1B: Narayanan et
    al., 2021, https://arxiv.org/abs/2104.04473.
    """
    if chunks == 0:  # which stands for None in C++
        raise ValueError(
            "plan: expected chunks of at least 1, but got 0 (argument 'chunks')"
        )
    chunks = 0 if chunks is None else chunks
    return Schedule(_ops.pipeline_schedule_class()(kind, ranks, chunks, microbatches))
