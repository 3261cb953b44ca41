# SPDX-License-Identifier: Apache-2.0
"""How the ranks divide the work: each a replica, or each a stage of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
import torch.distributed as dist
from gpt import GPT, Shape, loss_of
from memory import LiveTensors
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from torch_sm3 import AdasumState, adasum_hook
from torch_sm3.pipeline import PipelineRunner, Stage, StepResult, plan


class Parallel(Protocol):
    """What the training loop needs of either way."""

    model: GPT
    #: Whether all ranks hold the same parameters.
    replicas: bool
    #: ``(index, count)``: which share of the rows of a batch this rank is given.
    part: tuple[int, int]

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        """Leave gradients in ``.grad`` and return the mean loss of all rows."""

    def evaluate(self, tokens: Tensor, targets: Tensor) -> float:
        """Return the mean loss of all rows."""

    def probe(self, tokens: Tensor, targets: Tensor) -> tuple[int, int]:
        """Count live bytes over one step; see :func:`counted`."""

    def close(self) -> None:
        """Give back what is held; collective."""


def counted(
    model: GPT, inputs: Iterable[Tensor], step: Callable[[LiveTensors], None]
) -> tuple[int, int]:
    """Run one step and count the live bytes of its tensors.

    Parameters and inputs do not count.

    Returns:
        The sum where ``step`` marks the end of the forward pass, which is what the
        backward pass needs, and the largest sum in the step, gradients included.
    """
    model.zero_grad()
    known = [*model.parameters(), model.bias, *inputs]
    with LiveTensors(known) as live:
        step(live)
    model.zero_grad()
    return live.marked, live.peak


class Replicas:
    """DDP: every rank has the model and its own rows; gradients are combined."""

    replicas = True

    def __init__(self, shape: Shape, combine: str) -> None:
        self.part = (dist.get_rank(), dist.get_world_size())
        self.model = GPT(shape)
        self.wrapped = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        self.state: AdasumState | None = None
        if combine == "adasum":
            self.state = AdasumState()
            self.wrapped.register_comm_hook(self.state, adasum_hook)

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        """Leave the combined gradients in ``.grad`` and return the mean loss."""
        loss = loss_of(self.wrapped(tokens), targets)
        loss.backward()
        return self._mean(loss)

    @torch.no_grad()
    def evaluate(self, tokens: Tensor, targets: Tensor) -> float:
        """Return the mean loss of all ranks' rows."""
        return self._mean(loss_of(self.model(tokens), targets))

    def _mean(self, loss: Tensor) -> float:
        total = loss.detach().double()
        dist.all_reduce(total)
        return total.item() / self.part[1]

    def probe(self, tokens: Tensor, targets: Tensor) -> tuple[int, int]:
        """Count live bytes over one step of the bare model."""

        def step(live: LiveTensors) -> None:
            loss = loss_of(self.model(tokens), targets)
            live.mark()
            loss.backward()

        return counted(self.model, (tokens, targets), step)

    def close(self) -> None:
        """Stop the hook's worker."""
        if self.state is not None:
            self.state.close()


class Stages:
    """Pipeline: every rank has a part of the blocks and sees all rows, under 1F1B."""

    replicas = False
    part = (0, 1)

    def __init__(self, shape: Shape, microbatches: int) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        self.model = GPT(shape, stages=size).keep_stage(rank)
        self.runner = PipelineRunner(
            [Stage(self.model, rank)],
            plan("1f1b", ranks=size, microbatches=microbatches),
            loss_fn=loss_of,
            loss_reduction="mean",
        )

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        """Leave this stage's gradients in ``.grad`` and return the mean loss."""
        return self._loss(self.runner.step(tokens, target=targets))

    def evaluate(self, tokens: Tensor, targets: Tensor) -> float:
        """Return the mean loss of all rows."""
        return self._loss(self.runner.eval(tokens, target=targets))

    @staticmethod
    def _loss(result: StepResult) -> float:
        assert result.loss is not None, "the runner shares the loss with every rank"
        return result.loss.item()

    def probe(self, tokens: Tensor, targets: Tensor) -> tuple[int, int]:
        """Count live bytes over one step of this stage, marked after each forward."""

        def step(live: LiveTensors) -> None:
            handle = self.model.register_forward_hook(lambda *_: live.mark())
            try:
                self.step(tokens, targets)
            finally:
                handle.remove()

        return counted(self.model, (tokens, targets), step)

    def close(self) -> None:
        """Close the links between the stages."""
        self.runner.close()
