# SPDX-License-Identifier: Apache-2.0
"""One run through a rank's actions, and what it does after a failure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch

from torch_sm3.pipeline._faults import Failure, LinksLostError, PoisonedError
from torch_sm3.pipeline._links import ACTIVATION, GRADIENT, Links
from torch_sm3.pipeline._values import pack, unpack

Packed = tuple[str, list[torch.Tensor]]
Gradients = list[torch.Tensor | None]


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
        modules: modules of this rank's stages, by stage.
        links: links to the other ranks, None if there are none.
        training: whether backwards follow.

    Attributes:
        inputs: arguments of stage 0, for each microbatch.
        finish: turns the last stage's output into its loss, or None.
        weights: factor of each microbatch's loss in the gradients.
    """

    def __init__(
        self,
        rank: int,
        placement: list[int],
        modules: Mapping[int, Callable[..., Any]],
        links: Links | None,
        training: bool,
    ) -> None:
        self.rank = rank
        self.placement = placement
        self.modules = modules
        self.links = links
        self.training = training
        self.inputs: list[tuple[Any, ...]] = []
        self.finish: Callable[[Any, int], torch.Tensor | None] | None = None
        self.weights: list[float] = []
        self.failure: tuple[Failure, int] | None = None
        self.cause: BaseException | None = None
        self.poison: Failure | None = None
        self._tickets: dict[tuple[int, int, int], int] = {}
        # Results by link class, stage that made them and microbatch, until they are
        # sent or, where the neighbour is on this rank, used.
        self._results: dict[tuple[int, int, int], Packed] = {}
        # What B needs: the tensors that came in and those that went out.
        self._saved: dict[tuple[int, int], tuple[Gradients, list[torch.Tensor]]] = {}
        self._compute = {"F": self._forward, "B": self._backward}

    def fail(self, failure: Failure, index: int, cause: BaseException) -> None:
        """Note that this rank failed; what follows is only communication."""
        self.failure = failure, index
        self.cause = cause
        self._forget()

    def run(self, actions: list[tuple[str, int, int]]) -> None:
        """Do all actions in order.

        Args:
            actions: operation, stage and microbatch of each.

        Raises:
            LinksLostError: if a peer is gone; then the links are of no use any more.
        """
        for index, (op, stage, microbatch) in enumerate(actions):
            if self.failed:
                self._pass(op, stage, microbatch)
                continue
            try:
                if op in self._compute:
                    self._compute[op](stage, microbatch)
                elif op != ".":
                    self._message(op, stage, microbatch)
            except LinksLostError:
                raise
            except PoisonedError as poison:
                self.poison = poison.failure
                self._forget()
                self._pass(op, stage, microbatch)
            except BaseException as error:
                failure = Failure(
                    self.rank,
                    stage,
                    microbatch,
                    f"{stage}{op}{microbatch}",
                    type(error).__name__,
                    str(error),
                )
                self.fail(failure, index, error)
                self._pass(op, stage, microbatch)

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

    def _forget(self) -> None:
        self._results.clear()
        self._saved.clear()

    # --- messages ----------------------------------------------------------

    def _route(self, op: str, stage: int) -> tuple[int, int, tuple[int, int]]:
        """Return peer, link class and (source, target) of a message."""
        forward = op.endswith("F")
        sends = op.startswith("SEND")
        other = stage + 1 if forward == sends else stage - 1
        stages = (stage, other) if sends else (other, stage)
        return self.placement[other], ACTIVATION if forward else GRADIENT, stages

    def _message(self, op: str, stage: int, microbatch: int) -> None:
        assert self.links is not None, "one rank has no messages"
        peer, link, stages = self._route(op, stage)
        if op.startswith("RECV"):
            self._tickets[link, stage, microbatch] = self.links.receive(
                peer, link, stages, microbatch
            )
        else:
            structure, tensors = self._results[link, stage, microbatch]
            self.links.send(peer, link, stages, microbatch, structure, tensors)
            del self._results[link, stage, microbatch]

    def _pass(self, op: str, stage: int, microbatch: int) -> None:
        """Do the communication of an action after a failure, and no more."""
        if op in self._compute:
            link = ACTIVATION if op == "F" else GRADIENT
            ticket = self._tickets.pop((link, stage, microbatch), None)
            if ticket is not None and self.links is not None:
                try:
                    self.links.take(ticket)
                except PoisonedError:
                    pass  # another rank that was poisoned or failed by itself
        elif op.startswith("RECV"):
            self._message(op, stage, microbatch)
        elif op.startswith("SEND") and self.links is not None:
            peer, link, stages = self._route(op, stage)
            failure = self.failure[0] if self.failure else self.poison
            assert failure is not None, "only a failure leads here"
            self.links.poison(peer, link, stages, microbatch, failure)

    def _incoming(
        self, link: int, stage: int, microbatch: int
    ) -> tuple[str, list[torch.Tensor], list[bool]]:
        """Take what another stage made: structure, tensors, which require grad."""
        key = link, stage, microbatch
        if key in self._tickets and self.links is not None:
            try:
                message = self.links.take(self._tickets[key])
            except PoisonedError:
                del self._tickets[key]
                raise
            del self._tickets[key]
            return message
        source = stage - 1 if link == ACTIVATION else stage + 1
        structure, tensors = self._results.pop((link, source, microbatch))
        requires_grad = [tensor.requires_grad for tensor in tensors]
        if link == ACTIVATION:
            # A copy, as over a link: the stage may change it in place, and autograd
            # could not see that the stage before still needs it.
            tensors = [tensor.detach().clone() for tensor in tensors]
        return structure, tensors, requires_grad

    # --- compute -----------------------------------------------------------

    def _arguments(
        self, stage: int, microbatch: int
    ) -> tuple[tuple[Any, ...], Gradients]:
        if stage == 0:
            return self.inputs[microbatch], []
        structure, tensors, requires_grad = self._incoming(
            ACTIVATION, stage, microbatch
        )
        leaves: Gradients = [None] * len(tensors)
        if self.training:
            for i, wanted in enumerate(requires_grad):
                if wanted:
                    leaves[i] = tensors[i].requires_grad_()
                    tensors[i] = same_elements(tensors[i])
        value = unpack(structure, tensors)
        return (tuple(value) if type(value) in (tuple, list) else (value,)), leaves

    def _forward(self, stage: int, microbatch: int) -> None:
        arguments, leaves = self._arguments(stage, microbatch)
        output = self.modules[stage](*arguments)
        if stage + 1 == len(self.placement):
            assert self.finish is not None, "the last stage's rank has a finish"
            loss = self.finish(output, microbatch)
            outputs = [] if loss is None else [loss]
        else:
            packed = pack(output, f"stage {stage}")
            self._results[ACTIVATION, stage, microbatch] = packed
            outputs = packed[1]
        if self.training:
            self._saved[stage, microbatch] = leaves, outputs

    def _output_gradients(
        self, stage: int, microbatch: int, outputs: list[torch.Tensor]
    ) -> Gradients:
        if stage + 1 == len(self.placement):
            return [torch.full_like(x, self.weights[microbatch]) for x in outputs]
        structure, tensors, _ = self._incoming(GRADIENT, stage, microbatch)
        gradients: Gradients = list(unpack(structure, tensors))
        got = [None if g is None else g.shape for g in gradients]
        if len(gradients) != len(outputs) or any(
            g is not None and g.shape != x.shape
            for g, x in zip(gradients, outputs, strict=True)
        ):
            raise RuntimeError(
                f"PipelineRunner: expected gradients of shapes "
                f"{[tuple(x.shape) for x in outputs]} for stage {stage}, but got {got}"
            )
        return gradients

    def _backward(self, stage: int, microbatch: int) -> None:
        leaves, outputs = self._saved[stage, microbatch]
        gradients = self._output_gradients(stage, microbatch, outputs)
        del self._saved[stage, microbatch]
        roots = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
            if gradient is not None and output.requires_grad
        ]
        if roots:
            # The casts of the forward are recorded; the backward makes no new ones.
            cast = torch.is_autocast_enabled("cpu")
            with torch.autocast("cpu", enabled=False) if cast else nullcontext():
                torch.autograd.backward(
                    [output for output, _ in roots], [g for _, g in roots]
                )
        if stage > 0:
            found = [None if leaf is None else leaf.grad for leaf in leaves]
            self._results[GRADIENT, stage, microbatch] = pack(found, f"stage {stage}")
