# SPDX-License-Identifier: Apache-2.0
"""How the ranks divide the work: each a replica, or each a stage of the model."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from gpt import GPT, Shape, loss_of
from memory import LiveTensors
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer

from torch_sm3 import AdasumOptimizer, AdasumState, adasum_hook
from torch_sm3.pipeline import PipelineRunner, Stage, StepResult, plan


class Parallel(Protocol):
    """What the training loop needs of either way."""

    model: GPT
    #: Whether all ranks hold the same parameters.
    replicas: bool
    #: Whether each rank's optimizer follows its own gradients, so that states differ.
    local_states: bool
    #: ``(index, count)``: which share of the rows of a batch this rank is given.
    part: tuple[int, int]

    def optimizer(self, own: Optimizer) -> Optimizer:
        """Return what steps the model, given the optimizer of one rank; collective."""

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        """Leave gradients in ``.grad`` and return the mean loss of all rows."""

    def update(self, optimizer: Optimizer) -> None:
        """Step what :meth:`optimizer` returned."""

    def settle(self) -> None:
        """Make the parameters final, before they are read; collective."""

    def evaluate(self, tokens: Tensor, targets: Tensor) -> float:
        """Return the mean loss of all rows."""

    def equalize(self) -> None:
        """Make the optimizer's state equal on all replicas; collective."""

    def probe(self, tokens: Tensor, targets: Tensor) -> tuple[int, int]:
        """Count live bytes over one step; see :func:`counted`."""

    def trace(self, path: Path) -> str | None:
        """Write a trace and return a report, if there is one; collective."""

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
    """Every rank has the model and its own rows.

    Args:
        shape: of the model.
        combine: DDP combines gradients, by "adasum" or "mean", or the optimizer
            combines updates, by Adasum: "delta".
    """

    replicas = True

    def __init__(self, shape: Shape, combine: str) -> None:
        self.part = (dist.get_rank(), dist.get_world_size())
        self.model = GPT(shape)
        self.local_states = combine == "delta"
        self.delta: AdasumOptimizer | None = None
        self.state: AdasumState | None = None
        self.forward: torch.nn.Module = self.model
        if combine != "delta":
            ddp = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
            self.forward = ddp
            if combine == "adasum":
                self.state = AdasumState()
                ddp.register_comm_hook(self.state, adasum_hook)

    def optimizer(self, own: Optimizer) -> Optimizer:
        """Return the rank's own optimizer, or the one that combines its updates."""
        if self.local_states:
            self.delta = AdasumOptimizer(
                own, named_parameters=self.model.named_parameters()
            )
        return self.delta or own

    def equalize(self) -> None:
        """Merge the states of delta mode."""
        if self.delta is not None:
            self.delta.consolidate_state()

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        """Leave gradients in ``.grad``, combined by DDP; return the mean loss."""
        loss = loss_of(self.forward(tokens), targets)
        loss.backward()
        return self._mean(loss)

    def update(self, optimizer: Optimizer) -> None:
        """Step the optimizer."""
        optimizer.step()

    def settle(self) -> None:
        """Do nothing: a step is final."""

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

    def trace(self, path: Path) -> str | None:
        """Return nothing: DDP has no schedule."""
        return None

    def close(self) -> None:
        """Stop the worker that combines."""
        for worker in (self.state, self.delta):
            if worker is not None:
                worker.close()


class Stages:
    """Pipeline: every rank has a part of the blocks, or several, and sees all rows.

    Args:
        shape: of the model.
        args: of the command line, what begins with the schedule.
    """

    replicas = False
    local_states = True
    part = (0, 1)

    def __init__(self, shape: Shape, args: argparse.Namespace) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        schedule = plan(args.pipeline, size, args.microbatches, chunks=args.chunks)
        own = [s for s, place in enumerate(schedule.placement) if place == rank]
        self.model = GPT(shape, stages=schedule.stages).keep_stages(*own)
        self.parts = [self.model.stage(s) for s in own]
        self.clip, self.post_validate = args.clip, args.post_validate
        self.traced = args.trace
        self.runner = PipelineRunner(
            [Stage(part, s) for part, s in zip(self.parts, own, strict=True)],
            schedule,
            loss_fn=loss_of,
            loss_reduction="mean",
            trace=args.trace,
        )

    def optimizer(self, own: Optimizer) -> Optimizer:
        """Return the stage's own optimizer."""
        return own

    def equalize(self) -> None:
        """Do nothing: no two ranks hold the same parameters."""

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        """Leave this stage's gradients in ``.grad`` and return the mean loss."""
        return self._loss(self.runner.step(tokens, target=targets))

    def update(self, optimizer: Optimizer) -> None:
        """Step the rank's optimizer, clipped by the norm of all stages if asked for."""
        self.runner.optimizer_step(
            optimizer, max_norm=self.clip, post_validate=self.post_validate
        )

    def settle(self) -> None:
        """Validate a step that was taken first."""
        self.runner.flush()

    def evaluate(self, tokens: Tensor, targets: Tensor) -> float:
        """Return the mean loss of all rows."""
        return self._loss(self.runner.eval(tokens, target=targets))

    @staticmethod
    def _loss(result: StepResult) -> float:
        assert result.loss is not None, "the runner shares the loss with every rank"
        return result.loss.item()

    def probe(self, tokens: Tensor, targets: Tensor) -> tuple[int, int]:
        """Count live bytes over one step of this rank, marked after each forward."""

        def step(live: LiveTensors) -> None:
            handles = [
                part.register_forward_hook(lambda *_: live.mark())
                for part in self.parts
            ]
            try:
                self.step(tokens, targets)
            finally:
                for handle in handles:
                    handle.remove()

        return counted(self.model, (tokens, targets), step)

    def trace(self, path: Path) -> str | None:
        """Write a trace for ui.perfetto.dev and return the report of a step."""
        if not self.traced:
            return None
        self.runner.save_trace(path)
        return str(self.runner.report())

    def close(self) -> None:
        """Close the links between the stages."""
        self.runner.close()
