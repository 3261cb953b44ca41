# SPDX-License-Identifier: Apache-2.0
"""What a run asks of the user: data, stages, losses, reductions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
        validate: ends the optimizer step before.

    Attributes:
        feed: inputs and targets.
        losses: of the last stage.
    """

    feed: Feed
    losses: Losses

    def __init__(
        self,
        stages: Mapping[int, Stage],
        last: int,
        gradients: Gradients,
        scaler: torch.amp.GradScaler | None,
        seeds: Seeds | None,
        validate: Callable[[], bool],
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
            return self.losses.finish(output, self.feed.target(microbatch))

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
        """Gather or free the parameters of a sharded stage."""
        call = getattr(self._stages[stage].module, op.lower(), None)
        if call is not None:
            call()

    def validate(self) -> bool:
        """End the optimizer step before; return whether this step is to begin anew."""
        return self._validate()

    @contextmanager
    def _random(self, stage: int, microbatch: int) -> Iterator[None]:
        if self._seeds is None:
            yield
            return
        seed, step, evaluation, devices = self._seeds
        with seeded(seed_of(seed, step, stage, microbatch, evaluation), devices):
            yield
