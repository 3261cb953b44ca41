# SPDX-License-Identifier: Apache-2.0
"""One run through a rank's actions, and what it does after a failure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch

from torch_sm3.pipeline._faults import (
    Failure,
    GroupLostError,
    LinksLostError,
    PoisonedError,
)
from torch_sm3.pipeline._links import ACTIVATION, GRADIENT, Links
from torch_sm3.pipeline._values import pack, unpack
from torch_sm3.pipeline._work import CALLBACKS, COLLECTIVES, Work
from torch_sm3.pipeline.schedule import Action

Packed = tuple[str, list[torch.Tensor]]
Gradients = list[torch.Tensor | None]

# What no rank can go on after.
LOST = (LinksLostError, GroupLostError)
# I runs the whole backward, so that W finds nothing left to do.
_BACKWARDS = ("B", "I")


def same_elements(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is no leaf, so that a stage may change it in place."""
    return torch.ops.aten._unsafe_view(tensor, tensor.shape)


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
        self.placement = placement
        self.links = links
        self.training = training
        self.failure: tuple[Failure, int] | None = None
        self.cause: BaseException | None = None
        self.poison: Failure | None = None
        self.anew = False
        last = len(placement) - 1
        # The neighbour comes first; a route may lead to it, too.
        self._sources = {
            s: [s - 1] * (s > 0) + [a for a, b in routes if b == s]
            for s in range(last + 1)
        }
        self._targets = {
            s: [s + 1] * (s < last) + [b for a, b in routes if a == s]
            for s in range(last + 1)
        }
        # Messages asked for and results, by link class, source, target, whether they
        # take a route, and microbatch. A result stays until it is sent or, where the
        # other stage is on this rank, used.
        self._tickets: dict[tuple[int, int, int, bool, int], int] = {}
        self._results: dict[tuple[int, int, int, bool, int], Packed] = {}
        # What a backward needs: the tensors that came in from each source and those
        # that went out to each target.
        self._saved: dict[
            tuple[int, int], tuple[list[Gradients], list[list[torch.Tensor]]]
        ] = {}

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
        self._results.clear()
        self._saved.clear()

    def _do(self, action: Action) -> None:
        if action.op == "F":
            self._forward(action.stage, action.microbatch)
        elif action.op in _BACKWARDS:
            self._backward(action.stage, action.microbatch)
        elif action.op in COLLECTIVES:
            self.work.collective(action.op, action.stage, action.microbatch, False)
        elif action.op.startswith(("SEND", "RECV")):
            self._message(action)
        elif action.op in CALLBACKS:
            self.work.callback(action.op, action.stage)
        elif action.op == "VALIDATE" and self.work.validate():
            self._begin_anew()

    # --- messages ----------------------------------------------------------

    def _route(self, action: Action) -> tuple[int, int, int, bool]:
        """Return link class, source, target and whether a message takes a route."""
        forward = action.op.endswith("F")
        first = action.stage - (forward != action.op.startswith("SEND"))
        low, high = action.route or (first, first + 1)
        routed = action.route is not None
        if forward:
            return ACTIVATION, low, high, routed
        return GRADIENT, high, low, routed

    def _message(self, action: Action) -> None:
        assert self.links is not None, "one rank has no messages"
        link, source, target, routed = self._route(action)
        key = link, source, target, routed, action.microbatch
        if action.op.startswith("RECV"):
            self._tickets[key] = self.links.receive(
                self.placement[source], link, (source, target), action.microbatch
            )
        else:
            structure, tensors = self._results[key]
            self.links.send(
                self.placement[target],
                link,
                (source, target),
                action.microbatch,
                structure,
                tensors,
            )
            del self._results[key]

    def _pass(self, action: Action, index: int) -> None:
        """Do the communication of an action after a failure, and no more."""
        op, stage, microbatch = action[:3]
        if op == "F" or op in _BACKWARDS:
            self._drain(ACTIVATION if op == "F" else GRADIENT, stage, microbatch)
        elif op in COLLECTIVES:
            self.work.collective(op, stage, microbatch, True)
        elif op == "VALIDATE":
            self._validate_failed(action, index)
        elif op.startswith("RECV"):
            self._message(action)
        elif op.startswith("SEND") and self.links is not None:
            link, source, target, _ = self._route(action)
            failure = self.failure[0] if self.failure else self.poison
            assert failure is not None, "only a failure leads here"
            peer = self.placement[target]
            self.links.poison(peer, link, (source, target), microbatch, failure)

    def _drain(self, link: int, stage: int, microbatch: int) -> None:
        """Take what was asked for on behalf of an action that does not run."""
        others = self._sources if link == ACTIVATION else self._targets
        for number, other in enumerate(others[stage]):
            key = link, other, stage, number > 0, microbatch
            ticket = self._tickets.pop(key, None)
            if ticket is not None and self.links is not None:
                try:
                    self.links.take(ticket)
                except PoisonedError:
                    pass  # another rank that was poisoned or failed by itself

    def _incoming(
        self, link: int, source: int, stage: int, routed: bool, microbatch: int
    ) -> tuple[str, list[torch.Tensor], list[bool]]:
        """Take what another stage made: structure, tensors, which require grad."""
        key = link, source, stage, routed, microbatch
        if key in self._tickets and self.links is not None:
            return self.links.take(self._tickets.pop(key))
        structure, tensors = self._results.pop(key)
        requires_grad = [tensor.requires_grad for tensor in tensors]
        if link == ACTIVATION:
            # A copy, as over a link: the stage may change it in place, and autograd
            # could not see that the stage before still needs it.
            tensors = [tensor.detach().clone() for tensor in tensors]
        return structure, tensors, requires_grad

    # --- compute -----------------------------------------------------------

    def _value(
        self, source: int, stage: int, routed: bool, microbatch: int
    ) -> tuple[Any, Gradients]:
        """Return a value of another stage and those of its tensors to differentiate."""
        structure, tensors, requires_grad = self._incoming(
            ACTIVATION, source, stage, routed, microbatch
        )
        leaves: Gradients = [None] * len(tensors)
        if self.training:
            for i, wanted in enumerate(requires_grad):
                if wanted:
                    leaves[i] = tensors[i].requires_grad_()
                    tensors[i] = same_elements(tensors[i])
        return unpack(structure, tensors), leaves

    def _forward(self, stage: int, microbatch: int) -> None:
        value, skips = None, {}
        leaves: list[Gradients] = []
        for number, source in enumerate(self._sources[stage]):
            came, wanted = self._value(source, stage, number > 0, microbatch)
            leaves.append(wanted)
            if number == 0:
                value = came
            else:
                skips.update(came)
        output = self.work.forward(stage, microbatch, value, skips)
        if stage + 1 == len(self.placement):
            outputs = [[] if output is None else [output]]
        else:
            outputs = self._distribute(stage, microbatch, output)
        if self.training:
            self._saved[stage, microbatch] = leaves, outputs

    def _distribute(
        self, stage: int, microbatch: int, output: Any
    ) -> list[list[torch.Tensor]]:
        """Keep what goes to each target; return the tensors that go to each."""
        taken: set[str] = set()
        outputs: list[list[torch.Tensor]] = []
        for number, target in reversed(list(enumerate(self._targets[stage]))):
            value = output
            if number > 0:
                keys = self.work.keys(stage, target)
                value = _picked(output, keys, stage)
                taken.update(keys)
            elif taken:
                value = {key: x for key, x in output.items() if key not in taken}
            packed = pack(value, f"stage {stage}")
            key = ACTIVATION, stage, target, number > 0, microbatch
            self._results[key] = packed
            outputs.insert(0, packed[1])
        return outputs

    def _backward(self, stage: int, microbatch: int) -> None:
        leaves, outputs = self._saved[stage, microbatch]
        roots = self._roots(stage, microbatch, outputs)
        del self._saved[stage, microbatch]
        if roots:
            # The casts of the forward are recorded; the backward makes no new ones.
            cast = torch.is_autocast_enabled("cpu")
            with torch.autocast("cpu", enabled=False) if cast else nullcontext():
                torch.autograd.backward([x for x, _ in roots], [g for _, g in roots])
        for number, source in enumerate(self._sources[stage]):
            found = [None if leaf is None else leaf.grad for leaf in leaves[number]]
            key = GRADIENT, stage, source, number > 0, microbatch
            self._results[key] = pack(found, f"stage {stage}")

    def _roots(
        self, stage: int, microbatch: int, outputs: list[list[torch.Tensor]]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the outputs to differentiate, each with its gradient."""
        pairs: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        if stage + 1 == len(self.placement):
            pairs += [(x, self.work.seed(microbatch, x)) for x in outputs[0]]
        for number, target in enumerate(self._targets[stage]):
            structure, tensors, _ = self._incoming(
                GRADIENT, target, stage, number > 0, microbatch
            )
            gradients = unpack(structure, tensors)
            _check_gradients(stage, outputs[number], gradients)
            pairs += zip(outputs[number], gradients, strict=True)
        return [(x, g) for x, g in pairs if g is not None and x.requires_grad]


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
    stage: int, outputs: list[torch.Tensor], gradients: list[torch.Tensor | None]
) -> None:
    got = [None if g is None else tuple(g.shape) for g in gradients]
    shapes = [tuple(x.shape) for x in outputs]
    fits = len(got) == len(shapes) and all(
        g is None or g == x for g, x in zip(got, shapes, strict=True)
    )
    if not fits:
        raise RuntimeError(
            f"PipelineRunner: expected gradients of shapes {shapes} for stage {stage}, "
            f"but got {got}"
        )
