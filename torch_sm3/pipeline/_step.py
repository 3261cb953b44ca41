# SPDX-License-Identifier: Apache-2.0
"""One run through a rank's actions: C++ runs them and asks here for user code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from torch_sm3 import _ops
from torch_sm3.pipeline._faults import Failure, GroupLostError, LinksLostError
from torch_sm3.pipeline._links import Links
from torch_sm3.pipeline._values import pack, unpack
from torch_sm3.pipeline._work import CALLBACKS, COLLECTIVES, Work
from torch_sm3.pipeline.schedule import Action

Packed = tuple[str, list[torch.Tensor]]

# What no rank can go on after.
LOST = (LinksLostError, GroupLostError)
# How a run of the library stands when it returns; see pipeline/src/runtime/machine.h.
_WAIT, _DONE, _LOST, _PAIR = 0, 2, 3, 4
# Waits are cut into slices of this length, in seconds, so that Ctrl-C is served.
_SLICE = 0.2
_SPLITS: dict[bool | str, str] = {"auto": "auto", True: "always", False: "never"}


class Machines:
    """Runs of the rows of one rank, each made once.

    Args:
        rank: this rank.
        placement: rank of each stage.
        routes: source and target of values that skip stages.
        links: links to the other ranks, None if there are none.
        splits: of each stage of this rank, whether its backward runs in two parts.
        weights: of each stage of this rank; in a trace their gradients are no
            activations.
        max_pending: messages of a link that may be under way.
        fused: stages of this rank that run a forward and a backward in one call.
    """

    def __init__(
        self,
        rank: int,
        placement: Sequence[int],
        routes: Sequence[tuple[int, int]],
        links: Links | None,
        splits: Mapping[int, bool | str],
        weights: Mapping[int, Sequence[torch.Tensor]] | None = None,
        max_pending: int = 1,
        fused: Iterable[int] = (),
    ) -> None:
        self.rank = rank
        self.last = len(placement) - 1
        self.targets = {stage: [b for a, b in routes if a == stage] for stage in splits}
        self._placement = list(placement)
        self._routes = list(routes)
        self._transport = None if links is None else links.native
        self._splits = splits
        self._weights = weights or {}
        self._max_pending = max_pending
        self._fused = list(fused)
        self._made: dict[tuple[bool, tuple[Action, ...]], Any] = {}
        # The row that ran last; it need not be compared with those of before.
        self._latest: tuple[bool, Sequence[Action], Any] | None = None

    def of(self, row: Sequence[Action], trace: bool) -> Any:
        """Return the machine of a row.

        Args:
            row: actions of this rank.
            trace: whether its runs are stamped.
        """
        if self._latest is not None:
            traced, known, machine = self._latest
            if known is row and traced == trace:
                return machine
        key = trace, tuple(row)
        if key not in self._made:
            items = [
                (op, stage, i, pair if route is None else self._routes.index(route) + 1)
                for op, stage, i, route, pair in row
            ]
            made = _ops.pipeline_machine_class()(
                self._placement,
                self._routes,
                self.rank,
                items,
                self._transport,
                [*COLLECTIVES, *CALLBACKS, "VALIDATE"],
            )
            for stage, split in self._splits.items():
                made.set_split(stage, _SPLITS[split])
            for stage in self._fused:
                made.set_fused(stage)
            if trace:
                pairs = [(s, x) for s, own in self._weights.items() for x in own]
                made.trace(
                    self._max_pending, [s for s, _ in pairs], [x for _, x in pairs]
                )
            self._made[key] = made
        self._latest = trace, row, self._made[key]
        return self._made[key]


class StepRun:
    """State of one step or eval on one rank.

    A failure does not end the run: the rank sends poison in place of every message
    that it owes and takes every message that it is owed, without computing. Then no
    neighbour waits for ever, and the links are as they were before the step.

    Args:
        machines: of this rank.
        training: whether backwards follow.
        trace: whether to stamp the actions.

    Attributes:
        work: user code.
        anew: whether the step is to begin anew, since the one before it was wrong;
            then the rest of the run was communication only.
    """

    work: Work

    def __init__(self, machines: Machines, training: bool, trace: bool = False) -> None:
        self.failure: tuple[Failure, int] | None = None
        self.cause: BaseException | None = None
        self.anew = False
        self._machines = machines
        self._training = training
        self._trace = trace
        self._stamps: list[list[int]] = []
        self._poisoned = False
        self._weighted = False

    def fail(self, failure: Failure, index: int, cause: BaseException) -> None:
        """Note that this rank failed; what follows is only communication."""
        self.failure = failure, index
        self.cause = cause

    def run(self, row: Sequence[Action]) -> None:
        """Do all actions in order.

        Args:
            row: actions of this rank.

        Raises:
            LinksLostError: if a peer is gone; then the links are of no use any more.
            GroupLostError: if a rank of another group is gone.
        """
        machine = self._machines.of(row, self._trace)
        # A rank that is to send poison only may have no losses.
        weights = self.work.weights() if self.failure is None else []
        self._weighted = bool(weights)
        machine.begin(self._training, weights)
        if self.failure is not None:
            machine.fail_before(pack(tuple(self.failure[0]), "")[0])
        kind = _WAIT
        answer, resume = machine.answer, machine.resume
        while kind != _DONE:
            try:
                kind, index, failed, values = resume(_SLICE)
                if kind == _LOST:
                    raise LinksLostError
                if kind not in (_WAIT, _DONE):
                    beside = machine.overlap if kind == _PAIR else None
                    # Not kept here: the library knows when its memory is to go.
                    answer(self._ask(machine, row[index], failed, values, beside))
                del values
            except LOST:
                raise
            except BaseException as error:
                if kind == _DONE:
                    raise
                self._note(machine, error)
        self._poisoned = machine.failed()
        self._stamps = machine.stamps() if self._trace else []

    def stamps(self) -> list[list[int]]:
        """Return of each action what :class:`._recorder.Stamps` holds, in its order.

        The clock is that of :func:`time.monotonic_ns`.
        """
        return self._stamps

    def attempt(self, place: Failure, index: int, call: Callable[[], None]) -> None:
        """Do what follows the row, unless this rank failed.

        Args:
            place: rank, stage, microbatch and action of a failure.
            index: in place of the action's.
            call: what to do.
        """
        if self.failed:
            return
        try:
            call()
        except LOST:
            raise
        except BaseException as error:
            name, text = type(error).__name__, str(error)
            self.fail(place._replace(error_type=name, message=text), index, error)

    @property
    def failed(self) -> bool:
        """Whether this rank failed or was poisoned."""
        return self.failure is not None or self._poisoned

    def report(self) -> tuple[Any, ...] | None:
        """Return this rank's own failure and the index of its action, if it failed."""
        if self.failure is None:
            return None
        failure, index = self.failure
        return (*failure, index)

    def cause_of(self, failure: Failure) -> BaseException | None:
        """Return the exception behind a failure if it is this rank's."""
        own = self.failure is not None and self.failure[0] == failure
        return self.cause if own else None

    def _note(self, machine: Any, error: BaseException) -> None:
        text = str(error).encode("utf-8", "replace").decode()
        machine.fail(type(error).__name__, text)
        structure, index = machine.failure()
        if self.failure is None and structure:
            self.fail(Failure.read(structure), index, error)

    # --- user code ---------------------------------------------------------

    def _ask(
        self,
        machine: Any,
        action: Action,
        failed: bool,
        values: list[Packed],
        beside: Callable[[], None] | None,
    ) -> list[Packed]:
        op, stage, microbatch = action[:3]
        if op == "F":
            return self._forward(stage, microbatch, values, beside)
        if op in COLLECTIVES:
            self.work.collective(op, stage, microbatch, failed)
        elif op == "VALIDATE":
            if self.work.validate():
                self._begin_anew(machine)
        elif not failed:
            self.work.callback(op, stage)
        return []

    def _begin_anew(self, machine: Any) -> None:
        """Let the rest of the row be as after a failure, which it is not."""
        self.anew = True
        self.failure = self.cause = None
        why = Failure(self._machines.rank, 0, 0, "VALIDATE", "", "begins anew")
        machine.abandon(pack(tuple(why), "")[0])

    def _forward(
        self,
        stage: int,
        microbatch: int,
        values: list[Packed],
        beside: Callable[[], None] | None,
    ) -> list[Packed]:
        value, skips = None, {}
        if stage > 0:
            value = unpack(*values[0])
            for structure, tensors in values[1:]:
                skips.update(unpack(structure, tensors))
        output = self.work.forward(stage, microbatch, value, skips, beside)
        if stage != self._machines.last:
            return self._distribute(stage, output)
        if output is None:
            return [("N", [])]
        loss = ("t", [output])
        if not self._training or self._weighted:
            return [loss]
        return [loss, ("t", [self.work.seed(microbatch, output)])]

    def _distribute(self, stage: int, output: Any) -> list[Packed]:
        """Return the value for the next stage, then that of each route."""
        owner = f"stage {stage}"
        targets = self._machines.targets[stage]
        if not targets:
            return [pack(output, owner)]
        routed = []
        taken: set[str] = set()
        for target in targets:
            keys = self.work.keys(stage, target)
            routed.append(pack(_picked(output, keys, stage), owner))
            taken.update(keys)
        rest = {key: x for key, x in output.items() if key not in taken}
        return [pack(rest, owner), *routed]


def _picked(output: Any, keys: list[str], stage: int) -> dict[str, Any]:
    """Return the routed part of an output."""
    if type(output) is not dict:
        raise TypeError(
            f"PipelineRunner: expected stage {stage} to return a dict with the keys "
            f"of its routes, but got {type(output).__name__}"
        )
    missing = [key for key in keys if key not in output]
    if missing:
        raise ValueError(
            f"PipelineRunner: expected stage {stage} to return a dict with key "
            f"{missing[0]!r} of its routes, but got keys {list(output)}"
        )
    return {key: output[key] for key in keys}
