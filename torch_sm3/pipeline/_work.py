# SPDX-License-Identifier: Apache-2.0
"""What a run asks of the user: data, stages, losses, reductions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from torch_sm3.pipeline._data import Feed, spread
from torch_sm3.pipeline._gradients import Gradients
from torch_sm3.pipeline._loss import Losses
from torch_sm3.pipeline._random import seed_of, seeded
from torch_sm3.pipeline.stage import Stage

COLLECTIVES = ("REDUCE_GRAD", "TIE_REDUCE")
CALLBACKS = ("UNSHARD", "RESHARD")
_AS_IT_IS = nullcontext()


class Work(Protocol):
    """User code of one step on one rank; what a run asks for."""

    def forward(
        self,
        stage: int,
        microbatch: int,
        value: Any,
        skips: dict[str, Any],
        beside: Callable[[], None] | None,
    ) -> Any:
        """Call a stage.

        Args:
            stage: the stage.
            microbatch: the microbatch.
            value: of the stage before; stage 0 has none.
            skips: routed values.
            beside: a backward that the stage runs in the same call, or None.

        Returns:
            Its output, on the last stage the loss or None.
        """

    def weights(self) -> list[float]:
        """Return the gradient of each microbatch's loss; empty: ask :meth:`seed`."""

    def seed(self, microbatch: int, loss: torch.Tensor) -> torch.Tensor:
        """Return the gradient at which the backward of a microbatch begins."""

    def keys(self, source: int, target: int) -> list[str]:
        """Return the keys whose values go from one stage to a later one."""

    def collective(self, op: str, stage: int, number: int, failed: bool) -> None:
        """Do REDUCE_GRAD or TIE_REDUCE; a failed rank takes part in agreeing only."""

    def callback(self, op: str, stage: int) -> None:
        """Do UNSHARD or RESHARD."""

    def validate(self) -> bool:
        """End the optimizer step before; return whether this step is to begin anew."""


class Seeds(NamedTuple):
    """What random numbers of a deterministic run depend on.

    Attributes:
        seed: of the run.
        step: number of the step.
        evaluation: whether it is an eval.
        devices: CUDA devices of this rank's stages.
    """

    seed: int
    step: int
    evaluation: bool
    devices: list[torch.device]


class StepWork:
    """The user code of one step or eval on one rank.

    Args:
        stages: stages of this rank by index.
        last: index of the last stage.
        gradients: ties and reductions.
        scaler: scales the loss, or None.
        seeds: for a deterministic run, or None.
        validate: ends the optimizer step before; called with this.

    Attributes:
        feed: inputs and targets.
        losses: of the last stage.
        after_loss: called with all losses so far after each one, or None.
    """

    feed: Feed
    losses: Losses
    after_loss: Callable[[Losses], None] | None = None

    def __init__(
        self,
        stages: Mapping[int, Stage],
        last: int,
        gradients: Gradients,
        scaler: torch.amp.GradScaler | None,
        seeds: Seeds | None,
        validate: Callable[[StepWork], bool],
    ) -> None:
        self._stages = stages
        self._last = last
        self._gradients = gradients
        self._scaler = scaler
        self._seeds = seeds
        self._validate = validate

    def forward(
        self,
        stage: int,
        microbatch: int,
        value: Any,
        skips: dict[str, Any],
        beside: Callable[[], None] | None,
    ) -> Any:
        """Call a stage; on the last one return the loss or None."""
        own = self._stages[stage]
        fused = own.fused
        call = partial(fused, beside) if fused and beside else own.module
        picked, named = self.feed.arguments(own, microbatch)
        before = spread(value) if stage > 0 else ()
        with self._random(stage, microbatch):
            output = call(*before, *picked, **skips, **named)
            if stage != self._last:
                return output
            loss = self.losses.finish(output, self.feed.target(microbatch))
        if self.after_loss is not None:
            self.after_loss(self.losses)
        return loss

    def weights(self) -> list[float]:
        """Return the gradient of each microbatch's loss; empty: ask :meth:`seed`."""
        return [] if self._scaler is not None else self.losses.weights

    def seed(self, microbatch: int, loss: torch.Tensor) -> torch.Tensor:
        """Return the gradient at which the backward of a microbatch begins."""
        gradient = self.losses.gradient(microbatch, loss)
        if self._scaler is None:
            return gradient
        scaled = self._scaler.scale(gradient)
        assert isinstance(scaled, torch.Tensor), "a tensor stays a tensor"
        return scaled

    def keys(self, source: int, target: int) -> list[str]:
        """Return the keys whose values go from one stage to a later one."""
        return self._stages[source].keys_to(target)

    def collective(self, op: str, stage: int, number: int, failed: bool) -> None:
        """Do REDUCE_GRAD or TIE_REDUCE; a failed rank takes part in agreeing only."""
        self._gradients.collective(op, stage, number, failed)

    def callback(self, op: str, stage: int) -> None:
        """Gather or free the parameters of all sharded modules of a stage."""
        for module in self._stages[stage].module.modules():
            call = getattr(module, op.lower(), None)
            if callable(call):
                call()

    def validate(self) -> bool:
        """End the optimizer step before; return whether this step is to begin anew."""
        return self._validate(self)

    def _random(self, stage: int, microbatch: int) -> AbstractContextManager[None]:
        if self._seeds is None:
            return _AS_IT_IS
        seed, step, evaluation, devices = self._seeds
        return seeded(seed_of(seed, step, stage, microbatch, evaluation), devices)
