# SPDX-License-Identifier: Apache-2.0
"""All microbatches of a step, forward and back, one layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_sm3.trainer._batch import Microbatch
from torch_sm3.trainer._gradients import Gradients
from torch_sm3.trainer._layers import Layer
from torch_sm3.trainer._logging import StepLog
from torch_sm3.trainer._reduce import Grads
from torch_sm3.trainer._scale import Scale
from torch_sm3.trainer._track import Plan, Track


class Walk:
    """All microbatches of a step, layer by layer.

    Args:
        plan: of the trainer.
        parts: the microbatches.
        seed: of the step on this rank.
        scale: of the loss.
        log: of the step.
    """

    def __init__(
        self,
        plan: Plan,
        parts: Sequence[Microbatch],
        seed: int,
        scale: Scale,
        log: StepLog,
    ) -> None:
        self._plan = plan
        self._scale = scale
        self._log = log
        self.tracks = [
            Track(plan, stack, weight, seed, i)
            for i, (stack, weight) in enumerate(parts)
        ]
        self._body = plan.model.layers[:-1]
        self._tied = plan.model.tied

    @property
    def held(self) -> list[Any]:
        """All stack items that the step keeps."""
        return [item for one in self.tracks for item in one.held]

    @property
    def drift(self) -> dict[str, Tensor]:
        """Stats of the layers that a monitor watches."""
        found: dict[str, Tensor] = {}
        for one in self.tracks:
            for index, value in one.drift.items():
                key = f"layer{index}/drift"
                found[key] = torch.maximum(found.get(key, value), value)
        return found

    def forward(self, two_passes: bool) -> None:
        """Run all layers but the loss."""
        order = [*self._body, self._plan.model.loss]
        for i, layer in enumerate(self._body):
            self._plan.place.visit(layer, order[i + 1 :])
            for one in self.tracks:
                one.forward(layer)
            self._plan.place.leave(layer)
            self._log.memory("forward", layer)
        if two_passes:
            for one in self.tracks:
                one.keep_final()

    def backward(
        self,
        submit: Callable[[Layer, Grads], None],
        last: bool,
        between: Callable[[], None],
    ) -> None:
        """Run the loss, then all layers backwards.

        Args:
            submit: is given each layer with its gradients while its weights are here,
                and has the place left later.
            last: forget what layers have kept.
            between: called after the loss.
        """
        place, model = self._plan.place, self._plan.model
        gradients = Gradients(self._tied, len(self.tracks))
        order = [model.loss, *reversed(self._body)]
        for i, layer in enumerate(order):
            place.visit(layer, order[i + 1 :])
            for k, one in enumerate(self.tracks):
                if layer is model.loss:
                    found = one.lose(layer, self._scale)
                else:
                    found = one.reverse(layer, last)
                gradients.add(found, k, one.cotangents)
            self._log.memory("loss" if layer is model.loss else "backward", layer)
            if layer.optimizer is None:
                place.leave(layer)
            else:
                submit(layer, gradients.take(layer))
            if layer is model.loss:
                between()
