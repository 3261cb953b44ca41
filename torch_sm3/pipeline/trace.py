# SPDX-License-Identifier: Apache-2.0
"""Traces: when every action of every rank ran, measured and predicted."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from torch_sm3.pipeline import _perfetto
from torch_sm3.pipeline._measured import costs_of
from torch_sm3.pipeline._recorder import Offset, Recorder, Stamps, estimate_offset
from torch_sm3.pipeline.costs import Costs
from torch_sm3.pipeline.schedule import Action, Schedule
from torch_sm3.pipeline.simulator import Simulation, simulate

__all__ = ["Offset", "Recorder", "Trace", "collect", "estimate_offset", "load_trace"]

_ROUNDS = 16


class Trace:
    r"""Hold the stamps of the same steps from all ranks, on one clock.

    Args:
        schedule: what ran, with its messages.
        steps: of each rank the stamps of its steps; those that not all have are left
            out.
        errors: how wrong each rank's clock may be, in nanoseconds.
        max_pending: messages of a link that may be under way.

    Attributes:
        schedule: as passed.
        steps: of each rank the stamps of its steps, from a common zero.
        errors: as passed.
        max_pending: as passed.

    Example::

        >>> import tempfile, torch
        >>> from torch_sm3.pipeline import PipelineRunner, Stage, plan
        >>> from torch_sm3.pipeline.trace import Trace
        >>> runner = PipelineRunner(
        ...     [Stage(torch.nn.Linear(4, 1), 0)], plan("none", 1, 2),
        ...     loss_fn=torch.nn.functional.mse_loss, trace=True)
        >>> result = runner.step(torch.randn(6, 4), target=torch.randn(6, 1))
        >>> with tempfile.NamedTemporaryFile(suffix=".json") as file:
        ...     runner.save_trace(file.name)
        ...     trace = Trace.load(file.name)
        >>> runner.close()
        >>> trace.schedule == plan("none", 1, 2).lower(), len(trace.steps[0])
        (True, 1)
    """

    def __init__(
        self,
        schedule: Schedule,
        steps: Sequence[Sequence[Stamps]],
        errors: Sequence[int] | None = None,
        max_pending: int = 1,
    ) -> None:
        common = set.intersection(*({x.step for x in own} for own in steps))
        kept = [[x for x in own if x.step in common] for own in steps]
        starts = [t for own in kept for x in own for t in x.begin if t]
        # The first action begins at one microsecond: a stamp of 0 means never.
        shift = 1000 - min(starts, default=1000)
        self.schedule = schedule
        rows = [schedule.actions(rank) for rank in range(schedule.ranks)]
        self.steps = [
            [_without_gaps(row, x.shifted(shift)) for x in own]
            for row, own in zip(rows, kept, strict=True)
        ]
        self.errors = list(errors) if errors is not None else [0] * len(kept)
        self.max_pending = max_pending

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        r"""Read a trace that :meth:`save` wrote.

        Args:
            path: the file.

        Returns:
            The trace.

        Raises:
            ValueError: if it is no such file.
        """
        return cls(*_perfetto.read(path))

    def save(self, path: str | Path, costs: Costs | None = None) -> None:
        r"""Write the trace as JSON for ui.perfetto.dev and chrome://tracing.

        Every rank has a lane of what was measured and one of what the simulator
        predicts, arrows for the messages, and counters of live activation bytes and
        of pending sends.

        Args:
            path: the file.
            costs: to predict with; those of the trace itself if None.
        """
        predicted = self.simulate(costs).timeline() if self._complete() else None
        _perfetto.write(
            path, self.schedule, self.steps, self.errors, predicted, self.max_pending
        )

    def costs(self) -> Costs:
        r"""Return what the actions took, in seconds: medians over the steps.

        A full backward is no measure of its halves; each is taken as half of it, so
        that a schedule with split backwards can be planned. The latency of a link is
        measured where its receiver waited for a message; links on which nobody ever
        waited get the median of the others. Bytes are those that the rank counted:
        with them :func:`torch_sm3.pipeline.simulator.live_bytes` tells what it had in
        use after each action, static bytes aside.
        """
        return costs_of(self.schedule, self.steps)

    def simulate(self, costs: Costs | None = None) -> Simulation:
        r"""Predict the step.

        Args:
            costs: of the actions; those of the trace itself if None.
        """
        return simulate(
            self.schedule,
            self.costs() if costs is None else costs,
            max_pending=self.max_pending,
        )

    def latest(self) -> list[Stamps]:
        r"""Return the stamps of each rank in the latest step that all completed.

        Raises:
            ValueError: if there is none.
        """
        for step in reversed(list(zip(*self.steps, strict=True))):
            if all(all(stamps.end) for stamps in step):
                return list(step)
        raise ValueError("Trace: expected a complete step, but got none")

    def _complete(self) -> bool:
        return any(
            all(all(x.end) for x in step) for step in zip(*self.steps, strict=True)
        )


def load_trace(path: str | Path) -> Costs:
    r"""Read the costs of a traced step back, so that it can be planned anew.

    Args:
        path: what ``PipelineRunner.save_trace`` wrote.

    Returns:
        :class:`Costs` in seconds; see :meth:`Trace.costs`.

    Raises:
        ValueError: if the file is no such trace.

    Example::

        >>> import tempfile
        >>> from torch_sm3.pipeline.trace import load_trace
        >>> import torch
        >>> from torch_sm3.pipeline import PipelineRunner, Stage, plan
        >>> runner = PipelineRunner(
        ...     [Stage(torch.nn.Linear(4, 1), 0)], plan("none", 1, 2),
        ...     loss_fn=torch.nn.functional.mse_loss, trace=True)
        >>> result = runner.step(torch.randn(6, 4), target=torch.randn(6, 1))
        >>> with tempfile.NamedTemporaryFile(suffix=".json") as file:
        ...     runner.save_trace(file.name)
        ...     schedule = plan("1f1b", 4, 8, costs=load_trace(file.name))
        >>> schedule.ranks
        4
        >>> runner.close()
    """
    return Trace.load(path).costs()


def _without_gaps(row: Sequence[Action], stamps: Stamps) -> Stamps:
    """Let idle slots, which nobody runs, pass in no time where the one before ended."""
    start = next((t for t in stamps.begin if t), 0)
    live = pending = 0
    for index, action in enumerate(row):
        if action.op == ".":
            stamps.begin[index] = stamps.ready[index] = stamps.end[index] = start
            stamps.live[index] = stamps.peak[index] = live
            stamps.pending[index] = pending
        start = stamps.end[index]
        live, pending = stamps.live[index], stamps.pending[index]
    return stamps


# --- collection ------------------------------------------------------------


class Talk(Protocol):
    """A channel for small values between ranks."""

    def tell(self, peer: int, value: Any) -> None:
        """Send a value."""

    def hear(self, peer: int) -> Any:
        """Wait for a value."""


def collect(
    recorder: Recorder,
    schedule: Schedule,
    rank: int,
    links: Talk | None,
    everywhere: bool = False,
    max_pending: int = 1,
) -> Trace | None:
    r"""Bring the stamps of all ranks together; every rank calls it.

    Clocks are aligned with that of the last stage's rank first, by messages there and
    back; all control messages go there or come from there.

    Args:
        recorder: that of this rank.
        schedule: what ran, with its messages.
        rank: this rank.
        links: to the other ranks, None if there are none.
        everywhere: whether all ranks get the trace.
        max_pending: messages of a link that may be under way.

    Returns:
        The trace on rank 0, or everywhere; None elsewhere.
    """
    own, hub = list(recorder.steps), schedule.placement[-1]
    readers = range(schedule.ranks) if everywhere else (0,)
    packed = [_pack(own, 0)]
    if links is not None and rank == hub:
        others = [peer for peer in range(schedule.ranks) if peer != hub]
        for peer in others:
            _answer(peer, links)
        heard = {peer: links.hear(peer) for peer in others} | {hub: packed[0]}
        packed = [heard[peer] for peer in range(schedule.ranks)]
        for peer in readers:
            if peer != hub:
                links.tell(peer, packed)
    elif links is not None:
        offset = _align(hub, links)
        moved = [stamps.shifted(offset.nanoseconds) for stamps in own]
        links.tell(hub, _pack(moved, offset.error))
        packed = links.hear(hub) if rank in readers else []
    if rank not in readers:
        return None
    steps = [[_unpack(*stamps) for stamps in each] for _, each in packed]
    return Trace(schedule, steps, [error for error, _ in packed], max_pending)


def _align(hub: int, links: Talk) -> Offset:
    """Return how far the hub's clock is ahead of this one."""
    samples = []
    for _ in range(_ROUNDS):
        t0 = time.monotonic_ns()
        links.tell(hub, None)
        t1, t2 = links.hear(hub)
        samples.append((t0, t1, t2, time.monotonic_ns()))
    return estimate_offset(samples)


def _answer(peer: int, links: Talk) -> None:
    for _ in range(_ROUNDS):
        links.hear(peer)
        arrived = time.monotonic_ns()
        links.tell(peer, (arrived, time.monotonic_ns()))


def _pack(steps: Sequence[Stamps], error: int) -> tuple[int, list[Any]]:
    columns = [
        (x.step, [torch.tensor(column, dtype=torch.int64) for column in x[1:]])
        for x in steps
    ]
    return error, list(columns)


def _unpack(step: int, columns: Sequence[torch.Tensor]) -> Stamps:
    return Stamps(step, *(array("q", column.tolist()) for column in columns))
