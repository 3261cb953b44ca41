# SPDX-License-Identifier: Apache-2.0
"""One run through a rank's actions, and what it does after a failure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from torch_sm3.pipeline._faults import (
    Failure,
    GroupLostError,
    LinksLostError,
    PoisonedError,
)
from torch_sm3.pipeline._graph import Graph
from torch_sm3.pipeline._links import ACTIVATION, GRADIENT, Links
from torch_sm3.pipeline._mail import Key, Mail
from torch_sm3.pipeline._values import pack, unpack
from torch_sm3.pipeline._work import CALLBACKS, COLLECTIVES, Work
from torch_sm3.pipeline.schedule import Action

# What no rank can go on after.
LOST = (LinksLostError, GroupLostError)
_BACKWARDS = ("B", "I")


class StepRun:
    """State of one step or eval on one rank.

    A failure does not end the run: the rank sends poison in place of every message
    that it owes and takes every message that it is owed, without computing. Then no
    neighbour waits for ever, and the links are as they were before the step.

    Args:
        rank: this rank.
        placement: rank of each stage.
        routes: source and target of values that skip stages.
        links: links to the other ranks, None if there are none.
        training: whether backwards follow.

    Attributes:
        work: user code.
        anew: whether the step is to begin anew, since the one before it was wrong;
            then the rest of the run was communication only.
    """

    work: Work

    def __init__(
        self,
        rank: int,
        placement: list[int],
        routes: list[tuple[int, int]],
        links: Links | None,
        training: bool,
    ) -> None:
        self.rank = rank
        self.training = training
        self.failure: tuple[Failure, int] | None = None
        self.cause: BaseException | None = None
        self.poison: Failure | None = None
        self.anew = False
        self._last = len(placement) - 1
        self._mail = Mail(placement, routes, links)
        self._graphs: dict[tuple[int, int], Graph] = {}

    def fail(self, failure: Failure, index: int, cause: BaseException) -> None:
        """Note that this rank failed; what follows is only communication."""
        self.failure = failure, index
        self.cause = cause
        self._forget()

    def run(self, actions: Iterable[Action]) -> None:
        """Do all actions in order.

        Args:
            actions: of this rank.

        Raises:
            LinksLostError: if a peer is gone; then the links are of no use any more.
            GroupLostError: if a rank of another group is gone.
        """
        for index, action in enumerate(actions):
            if self.failed:
                self._pass(action, index)
                continue
            try:
                self._do(action)
            except LOST:
                raise
            except PoisonedError as poison:
                self.poison = poison.failure
                self._forget()
                self._pass(action, index)
            except BaseException as error:
                failure = Failure(
                    self.rank,
                    action.stage,
                    action.microbatch,
                    action.text,
                    type(error).__name__,
                    str(error),
                )
                self.fail(failure, index, error)
                if action.op not in (*COLLECTIVES, "VALIDATE"):
                    self._pass(action, index)

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
        return self.failure is not None or self.poison is not None

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

    def _begin_anew(self) -> None:
        """Do the rest of the row as after a failure, which it is not."""
        self.anew = True
        self.failure = self.cause = None
        self.poison = Failure(self.rank, 0, 0, "VALIDATE", "", "the step begins anew")
        self._forget()

    def _validate_failed(self, action: Action, index: int) -> None:
        """End the optimizer step before this one on a rank that failed meanwhile."""
        try:
            if self.work.validate():
                self._begin_anew()
        except LOST:
            raise
        except BaseException as error:
            name, text = type(error).__name__, str(error)
            if self.failure is None:
                failure = Failure(self.rank, action.stage, 0, action.text, name, text)
                self.fail(failure, index, error)

    def _forget(self) -> None:
        self._mail.forget()
        self._graphs.clear()

    def _do(self, action: Action) -> None:
        if action.op == "F":
            self._forward(action.stage, action.microbatch)
        elif action.op in _BACKWARDS:
            self._backward(action.op, action.stage, action.microbatch)
        elif action.op == "W":
            self._weight(action.stage, action.microbatch)
        elif action.op in COLLECTIVES:
            self.work.collective(action.op, action.stage, action.microbatch, False)
        elif action.op.startswith("SEND"):
            self._send(action)
        elif action.op.startswith("RECV"):
            self._mail.message(action)
        elif action.op in CALLBACKS:
            self.work.callback(action.op, action.stage)
        elif action.op == "VALIDATE" and self.work.validate():
            self._begin_anew()

    def _pass(self, action: Action, index: int) -> None:
        """Do the communication of an action after a failure, and no more."""
        op, stage, microbatch = action[:3]
        if op == "F" or op in _BACKWARDS:
            link = ACTIVATION if op == "F" else GRADIENT
            self._mail.drain(link, stage, microbatch)
        elif op in COLLECTIVES:
            self.work.collective(op, stage, microbatch, True)
        elif op == "VALIDATE":
            self._validate_failed(action, index)
        elif op.startswith("RECV"):
            self._mail.message(action)
        elif op.startswith("SEND"):
            failure = self.failure[0] if self.failure else self.poison
            assert failure is not None, "only a failure leads here"
            self._mail.poison(action, failure)

    # --- compute -----------------------------------------------------------

    def _forward(self, stage: int, microbatch: int) -> None:
        graph = Graph(self.work.split(stage)) if self.training else None
        came = []
        for number, source in enumerate(self._mail.sources[stage]):
            key = ACTIVATION, source, stage, number > 0, microbatch
            came.append(self._mail.take(key))
            self._left(source, key)
        if graph is not None:
            came = graph.enter(came)
        values = [unpack(structure, tensors) for structure, tensors, _ in came]
        skips = {key: value for part in values[1:] for key, value in part.items()}
        del came
        first = values[0] if values else None
        output = self.work.forward(stage, microbatch, first, skips)
        if stage == self._last:
            outputs = [[] if output is None else [output]]
        else:
            outputs = self._distribute(stage, microbatch, output)
        if graph is not None:
            graph.leave(outputs)
            if stage == self._last:
                graph.seeds = [self.work.seed(microbatch, loss) for loss in outputs[0]]
                graph.outputs = []
            graph.unsent = {key for key, _ in self._out(stage, microbatch)}
            self._graphs[stage, microbatch] = graph

    def _out(self, stage: int, microbatch: int) -> list[tuple[Key, int]]:
        """Return the key of each value that a stage gives away, and its target."""
        return [
            ((ACTIVATION, stage, target, number > 0, microbatch), target)
            for number, target in enumerate(self._mail.targets[stage])
        ]

    def _distribute(
        self, stage: int, microbatch: int, output: Any
    ) -> list[list[torch.Tensor]]:
        """Keep what goes to each target; return the tensors that go to each."""
        taken: set[str] = set()
        outputs: list[list[torch.Tensor]] = []
        for key, target in reversed(self._out(stage, microbatch)):
            value = output
            if key[3]:
                keys = self.work.keys(stage, target)
                value = _picked(output, keys, stage)
                taken.update(keys)
            elif taken:
                value = {key: x for key, x in output.items() if key not in taken}
            packed = pack(value, f"stage {stage}")
            self._mail.put(key, packed)
            outputs.insert(0, packed[1])
        return outputs

    def _send(self, action: Action) -> None:
        key = self._mail.message(action)
        if key[0] == ACTIVATION:
            self._left(action.stage, key)

    def _left(self, source: int, key: Key) -> None:
        """Give the memory of outputs back once all of them have left their stage."""
        graph = self._graphs.get((source, key[-1]))
        if graph is not None:
            graph.left(key)

    def _backward(self, op: str, stage: int, microbatch: int) -> None:
        graph = self._graphs[stage, microbatch]
        gradients = graph.seeds
        for number, target in enumerate(self._mail.targets[stage]):
            key = GRADIENT, target, stage, number > 0, microbatch
            structure, tensors, _ = self._mail.take(key)
            found = unpack(structure, tensors)
            _check_gradients(stage, graph.shapes[number], found)
            gradients = [*gradients, *found]
        if op == "B":
            back = graph.full(gradients)
        else:
            back = graph.input(gradients)
        if op == "B" or not graph.owes_weight():
            del self._graphs[stage, microbatch]
        for number, source in enumerate(self._mail.sources[stage]):
            key = GRADIENT, stage, source, number > 0, microbatch
            self._mail.put(key, pack(back[number], f"stage {stage}"))

    def _weight(self, stage: int, microbatch: int) -> None:
        graph = self._graphs.pop((stage, microbatch), None)
        if graph is not None:
            graph.weight()


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


def _check_gradients(
    stage: int, shapes: list[torch.Size], gradients: list[torch.Tensor | None]
) -> None:
    got = [None if g is None else tuple(g.shape) for g in gradients]
    fits = len(got) == len(shapes) and all(
        g is None or g == tuple(x) for g, x in zip(got, shapes, strict=True)
    )
    if not fits:
        raise RuntimeError(
            f"PipelineRunner: expected gradients of shapes {[*map(tuple, shapes)]} for "
            f"stage {stage}, but got {got}"
        )
