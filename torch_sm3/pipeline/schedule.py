# SPDX-License-Identifier: Apache-2.0
"""Schedules: what every rank does, in order."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch_sm3 import _ops
from torch_sm3.pipeline._errors import ScheduleError, checked, words
from torch_sm3.pipeline.action import Action, Candidate
from torch_sm3.pipeline.costs import Costs

__all__ = ["Action", "Candidate", "Schedule", "ScheduleError", "checked"]


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

    def __init__(
        self,
        native: Any,
        alternatives: Sequence[Candidate] = (),
        costs: Costs | None = None,
    ) -> None:
        # torch.classes.torch_sm3.PipelineSchedule
        self.native = native
        self._text: str | None = None
        self._alternatives = list(alternatives)
        self._costs = costs

    @classmethod
    def parse(cls, text: str) -> Schedule:
        r"""Read the text form of a schedule.

        Args:
            text: a line ``schedule 1 kind=1f1b ranks=2 stages=2 microbatches=3
                placement=loop``, then a line ``rank 0: 0F0 0F1 …`` for each rank;
                ``.`` is an idle slot and ``#`` starts a comment.

        Returns:
            The schedule; its :attr:`text` reads back as an equal one.

        Raises:
            ScheduleError: naming row, column and cell of what cannot be read.

        Example::

            >>> from torch_sm3.pipeline import Schedule
            >>> schedule = Schedule.parse(
            ...     "schedule 1 kind=mine ranks=1 stages=1 microbatches=1 "
            ...     "placement=loop\n"
            ...     "rank 0: 0F0 0B0  # one of each\n")
            >>> [action.op for action in schedule.actions(0)]
            ['F', 'B']
        """
        text = words("Schedule", text, "text")
        return checked(lambda: cls(_ops.pipeline_schedule_class().parse(text)))

    @classmethod
    def from_csv(cls, source: str | os.PathLike[str], *, kind: str = "csv") -> Schedule:
        r"""Read a schedule from CSV: one row per rank, one cell per slot.

        Reads what :meth:`to_csv` writes and what ``torch.distributed.pipelining``
        writes, with and without communication actions. Unless the first line is
        ``# schedule 1 …``, ranks, stages, microbatches and placement are inferred from
        the cells.

        Args:
            source: the path of a file, or text with at least one line break.
            kind: name for a schedule whose file does not say it.

        Returns:
            The schedule, with idle slots where cells are empty.

        Raises:
            ScheduleError: naming row, column and cell of what cannot be read, or with
                a counter-example if the order cannot run.

        Example::

            >>> from torch_sm3.pipeline import Schedule
            >>> print(Schedule.from_csv("0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n").text)
            schedule 1 kind=csv ranks=2 stages=2 microbatches=2 placement=loop
            rank 0: 0F0 0F1 . 0B0 0B1
            rank 1: . 1F0 1B0 1F1 1B1
            <BLANKLINE>
        """
        text = source if isinstance(source, str) and "\n" in source else None
        if text is None:
            text = Path(source).read_text(encoding="utf-8")
        kind = words("Schedule.from_csv", kind, "kind")
        native = _ops.pipeline_schedule_class()
        return checked(lambda: cls(native.from_csv(text, kind)))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Schedule:
        r"""Read a schedule from a file in the text form or in CSV.

        Args:
            path: the file; what it holds is told from its first line.

        Returns:
            The schedule.

        Raises:
            ScheduleError: naming row, column and cell of what cannot be read.
        """
        text = Path(path).read_text(encoding="utf-8")
        for line in text.splitlines():
            if line.split("#")[0].strip():
                if line.split()[0] == "schedule":
                    return cls.parse(text)
                break
        return cls.from_csv(text + "\n")

    def save(self, path: str | os.PathLike[str]) -> None:
        r"""Write the schedule to a file, as CSV if its name ends in ``.csv``.

        Args:
            path: the file.
        """
        csv = Path(path).suffix == ".csv"
        text = self.to_csv() if csv else self.text
        Path(path).write_text(text, encoding="utf-8", newline="")

    def to_csv(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        dialect: str = "torch_sm3",
    ) -> str:
        r"""Write the schedule as CSV: one row per rank, one cell per slot.

        Args:
            path: a file to write it to as well.
            dialect: ``torch_sm3``, which loses nothing, or ``torch``, the words that
                ``torch.distributed.pipelining`` reads.

        Returns:
            The text.

        Raises:
            ScheduleError: if the dialect lacks a word, naming the first action that
                needs it.

        Example::

            >>> from torch_sm3.pipeline import plan
            >>> plan("1f1b", ranks=2, microbatches=1).to_csv(dialect="torch")
            '0F0,0B0\r\n1F0,1B0\r\n'
        """
        text: str = checked(lambda: self.native.to_csv(dialect))
        if path is not None:
            Path(path).write_text(text, encoding="utf-8", newline="")
        return text

    def with_routes(self, routes: Iterable[tuple[int, int]]) -> Schedule:
        r"""Return the schedule with values that skip stages.

        Args:
            routes: source and target stage of each, the target later; they take the
                place of those there are.

        Raises:
            ScheduleError: naming what is wrong, or if the schedule holds messages.

        Example::

            >>> from torch_sm3.pipeline import plan
            >>> schedule = plan("gpipe", ranks=3, microbatches=1).with_routes([(0, 2)])
            >>> print(*[action.text for action in schedule.lower().actions(2)])
            2RECV_F0<0 2RECV_F0 2F0 2B0 2SEND_B0 2SEND_B0>0 2REDUCE_GRAD OPTIM
        """
        pairs = [(int(source), int(target)) for source, target in routes]
        return checked(lambda: Schedule(self.native.with_routes(pairs, self.ties)))

    def with_ties(self, ties: Iterable[Sequence[int]]) -> Schedule:
        r"""Return the schedule with weights that several stages hold.

        Args:
            ties: the stages that hold each; they take the place of those there are.

        Raises:
            ScheduleError: naming what is wrong, or if the schedule holds messages.

        Example::

            >>> from torch_sm3.pipeline import plan
            >>> schedule = plan("1f1b", ranks=2, microbatches=1).with_ties([(0, 1)])
            >>> print(*[action.text for action in schedule.lower().actions(1)])
            1RECV_F0 1F0 1B0 1SEND_B0 1TIE_REDUCE0 1REDUCE_GRAD OPTIM
        """
        members = [[int(stage) for stage in tie] for tie in ties]
        return checked(lambda: Schedule(self.native.with_routes(self.routes, members)))

    def lower(self) -> Schedule:
        r"""Add the messages and collectives that a compute-only schedule lacks.

        Each SEND stands right after its producer, each RECV before the first action
        that starts, if all took one unit of time but B three where ranks have several
        stages, when or after the message is sent. REDUCE_GRAD follows the last weight
        gradient of its stage, or the TIE_REDUCE that it waits for; OPTIM is last. What
        is there already stays as it is; a schedule that lacks nothing is returned
        itself.

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
        if self.native.complete():
            return self
        return checked(lambda: Schedule(self.native.lower()))

    @property
    def text(self) -> str:
        r"""Text form; :meth:`parse` reads it back without loss."""
        if self._text is None:
            self._text = str(self.native.text())
        return self._text

    @property
    def kind(self) -> str:
        r"""Name of the plan, for example ``1f1b``."""
        return str(self.native.kind())

    @property
    def ranks(self) -> int:
        r"""Number of ranks p."""
        return int(self.native.ranks())

    @property
    def stages(self) -> int:
        r"""Number of stages, chunks of all ranks together."""
        return int(self.native.stages())

    @property
    def microbatches(self) -> int:
        r"""Number of microbatches m."""
        return int(self.native.microbatches())

    @property
    def placement(self) -> list[int]:
        r"""Rank of each stage."""
        return list(self.native.placement())

    @property
    def routes(self) -> list[tuple[int, int]]:
        r"""Source and target stage of each value that skips stages."""
        return list(self.native.routes())

    @property
    def ties(self) -> list[list[int]]:
        r"""Stages that hold each tied weight."""
        return list(self.native.ties())

    @property
    def alternatives(self) -> list[Candidate]:
        r"""What the search of ``plan("auto", …)`` looked at; not part of the text."""
        return list(self._alternatives)

    @property
    def costs(self) -> Costs | None:
        r"""Costs of this schedule's stages, if a search put them together."""
        return self._costs

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
            for op, stage, microbatch, route, paired in self.native.actions(rank)
        ]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return f"Schedule.parse({self.text!r})"

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return Schedule.parse, (self.text,)
