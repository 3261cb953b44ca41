# SPDX-License-Identifier: Apache-2.0
"""Check schedules and run them on paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch_sm3.pipeline._errors import ScheduleError, checked, instance, whole, words
from torch_sm3.pipeline.costs import Costs
from torch_sm3.pipeline.planner import limits_of, values_of
from torch_sm3.pipeline.schedule import Schedule


@dataclass(frozen=True)
class Report:
    r"""Hold what :func:`verify` found.

    Attributes:
        rule: what the schedule breaks: ``counts``, ``dependencies``, ``messages``,
            ``deadlock``, ``collectives``, ``memory``, or ``none``.
        message: what is wrong, in words.
        grid: a counter-example: columns are ranks, rows steps, stuck cells marked;
            three steps around each.
        full_grid: the same with all steps, if asked for.
        peak_bytes: most memory in use on each rank; exact.
        peak_actions: text of the action at which it is; empty without bytes.

    Example::

        >>> from torch_sm3.pipeline import Costs, plan, verify
        >>> report = verify(plan("1f1b", 2, 4), memory=Costs(activation_bytes=8))
        >>> report.peak_bytes, report.peak_actions
        ([16.0, 8.0], ['0F1', '1F0'])
    """

    rule: str
    message: str
    grid: str
    full_grid: str
    peak_bytes: list[float]
    peak_actions: list[str]

    @property
    def valid(self) -> bool:
        r"""Whether nothing is wrong."""
        return self.rule == "none"

    def raise_if_invalid(self) -> None:
        r"""Raise what is wrong, if anything is.

        Raises:
            ScheduleError: with the message and the grid.
        """
        if not self.valid:
            raise ScheduleError("\n".join(filter(None, (self.message, self.grid))))


def verify(
    schedule: Schedule,
    *,
    links: str = "rendezvous",
    max_pending: int = 1,
    memory: Costs | None = None,
    memory_limit: float | Sequence[float] | None = None,
    full_grid: bool = False,
) -> Report:
    r"""Check that a schedule can run, whatever its actions cost.

    Checks that each stage and microbatch has its actions, that each message has its
    SEND and RECV in one order per link, that nobody waits for ever, that collectives
    come once, late enough and in one order, and the exact peak of memory. A schedule
    without messages or collectives is lowered first. Takes time linear in the number
    of actions.

    Args:
        schedule: the schedule.
        links: ``posted``: a SEND never waits; ``rendezvous``: a rank with
            ``max_pending`` unmatched sends on a link waits at its next SEND;
            ``blocking``: a rank waits at each SEND until it is matched.
        max_pending: bound on unmatched sends.
        memory: bytes of each stage, for the peaks.
        memory_limit: bytes of each rank; one number for all.
        full_grid: whether to draw all steps too.

    Returns:
        A :class:`Report`.

    Raises:
        ValueError: naming the argument that is wrong.
        TypeError: likewise.

    Example::

        >>> from torch_sm3.pipeline import Schedule, verify
        >>> report = verify(Schedule.parse(
        ...     "schedule 1 kind=x ranks=1 stages=1 microbatches=1 placement=loop\n"
        ...     "rank 0: 0B0 0F0\n"))
        >>> report.valid, report.rule
        (False, 'counts')
    """
    instance("verify", schedule, Schedule, "schedule")
    return Report(
        *checked(
            lambda: schedule.native.verify(
                *_links("verify", links, max_pending),
                values_of("verify", memory, "memory"),
                limits_of("verify", memory_limit),
                full_grid,
            )
        )
    )


def live_bytes(
    schedule: Schedule,
    rank: int,
    memory: Costs,
    *,
    links: str = "rendezvous",
    max_pending: int = 1,
) -> list[float]:
    r"""Count the bytes in use on a rank after each action of its lowered row.

    Args:
        schedule: the schedule.
        rank: the rank.
        memory: bytes of each stage.
        links: as for :func:`verify`.
        max_pending: as for :func:`verify`.

    Returns:
        One number for each action of ``schedule.lower().actions(rank)``.

    Raises:
        ValueError: naming the argument that is wrong.
        TypeError: likewise.
        ScheduleError: if the schedule is not valid.

    Example::

        >>> from torch_sm3.pipeline import Costs, live_bytes, plan
        >>> live_bytes(plan("gpipe", 1, 2), 0, Costs(activation_bytes=8))
        [8.0, 16.0, 8.0, 0.0, 0.0, 0.0]
    """
    instance("live_bytes", schedule, Schedule, "schedule")
    return list(
        checked(
            lambda: schedule.native.live_bytes(
                whole("live_bytes", rank, "rank"),
                instance("live_bytes", memory, Costs, "memory").values(),
                *_links("live_bytes", links, max_pending),
            )
        )
    )


@dataclass(frozen=True)
class Simulation:
    r"""Hold what :func:`simulate` found, in the unit of the costs.

    Attributes:
        schedule: the lowered schedule that ran.
        makespan: when the last action ends.
        busy: of each rank: time in actions.
        idle: of each rank: makespan less busy.
        own_idle: of each rank: from its first start to its last end, less busy.
        peak_bytes: of each rank.
        lower_bound: the largest of each rank's work plus the shortest way to and from
            it.

    Example::

        >>> from torch_sm3.pipeline import plan, simulate
        >>> ran = simulate(plan("1f1b", 2, 1))
        >>> ran.makespan, ran.busy, ran.own_idle
        (6.0, [3.0, 3.0], [3.0, 0.0])
        >>> row = zip(ran.schedule.actions(1), ran.timeline()[1])
        >>> [(action.text, span) for action, span in row if action.op in "FB"]
        [('1F0', (1.0, 2.0)), ('1B0', (2.0, 4.0))]
    """

    schedule: Schedule
    makespan: float
    busy: list[float]
    idle: list[float]
    own_idle: list[float]
    peak_bytes: list[float]
    lower_bound: float
    _arguments: tuple[Any, ...]

    def timeline(self) -> list[list[tuple[float, float]]]:
        r"""Return start and end of each action of each rank of :attr:`schedule`."""
        found = checked(lambda: self.schedule.native.simulate(*self._arguments, True))
        return [list(zip(flat[::2], flat[1::2], strict=True)) for flat in found[-1]]


def simulate(
    schedule: Schedule,
    costs: Costs | None = None,
    *,
    links: str = "rendezvous",
    max_pending: int = 1,
) -> Simulation:
    r"""Run a schedule on paper, in time linear in the number of its actions.

    A schedule without messages or collectives is lowered first. Latency counts from
    the SEND.

    .. math::
        \text{idle}_r = \text{makespan} - \text{busy}_r, \qquad
        \text{own\_idle}_r = \text{last end}_r - \text{first start}_r - \text{busy}_r

    Args:
        schedule: the schedule.
        costs: of its actions and links; F = I = W = 1 if None.
        links: as for :func:`verify`.
        max_pending: as for :func:`verify`.

    Returns:
        A :class:`Simulation`.

    Raises:
        ValueError: naming the argument that is wrong.
        TypeError: likewise.
        ScheduleError: if the schedule cannot run to its end, with a grid.

    Example::

        >>> from torch_sm3.pipeline import Costs, plan, simulate
        >>> simulate(plan("1f1b", 4, 8), Costs(F=1, I=1, W=1)).makespan
        33.0
    """
    lowered = _lowered(instance("simulate", schedule, Schedule, "schedule"))
    arguments = (
        values_of("simulate", costs, "costs"),
        *_links("simulate", links, max_pending),
    )
    found = checked(lambda: lowered.native.simulate(*arguments, False))
    makespan, busy, idle, own_idle, peak_bytes, lower_bound, _ = found
    return Simulation(
        lowered, makespan, busy, idle, own_idle, peak_bytes, lower_bound, arguments
    )


def _lowered(schedule: Schedule) -> Schedule:
    try:
        return schedule.lower()
    except ScheduleError:
        verify(schedule).raise_if_invalid()  # says it with a grid
        raise


def _links(op: str, links: str, max_pending: int) -> tuple[str, int]:
    return words(op, links, "links"), whole(op, max_pending, "max_pending")
