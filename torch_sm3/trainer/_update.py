# SPDX-License-Identifier: Apache-2.0
"""What becomes of a layer's gradients: norms, clipping, the optimizer's step."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_sm3.trainer._clip import clip_, tensor_norms, total_norm
from torch_sm3.trainer._layers import Layer
from torch_sm3.trainer._reduce import Grads
from torch_sm3.trainer._scale import Scale
from torch_sm3.trainer._stats import layer_stats


class Updates:
    """The updates of one step.

    Args:
        device: where layers run.
        limit: of the norm of all gradients, or None.
        scale: of the loss.
        prefixed: whether the keys of stats name the layer.
    """

    def __init__(
        self,
        device: torch.device,
        limit: float | None,
        scale: Scale,
        prefixed: bool = True,
    ) -> None:
        self._device = device
        self._limit = limit
        self._scale = scale
        self._prefixed = prefixed
        self._norms: dict[int, list[Tensor]] = {}
        self._total: Tensor | None = None
        self.stats: dict[str, Any] = {}

    def measure(self, layer: Layer, grads: Grads) -> None:
        """Unscale reduced gradients, in place, and take their norms."""
        present = [grad for grad in grads if grad is not None]
        self._scale.unscale(present)
        self._norms[layer.index] = tensor_norms(present)

    def unscale(self, layer: Layer, grads: Grads) -> None:
        """Unscale gradients that were measured before."""
        self._scale.unscale([grad for grad in grads if grad is not None])

    def total(self) -> None:
        """Take the norm of all gradients, once all are measured."""
        if self._limit is not None:
            norms = [n for index in sorted(self._norms) for n in self._norms[index]]
            self._total = total_norm(norms, self._device)

    def apply(self, layer: Layer, grads: Grads) -> None:
        """Clip gradients and do the optimizer's step."""
        assert layer.optimizer is not None
        parameters = layer.trainable
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
        if self._limit is not None:
            assert self._total is not None
            clip_(parameters, self._limit, self._total)
        layer.optimizer.step()
        for parameter in parameters:
            parameter.grad = None
        self.note(layer)

    def note(self, layer: Layer) -> None:
        """Take the stats of a layer, whose update is done or skipped."""
        prefix = f"layer{layer.index}/" if self._prefixed else ""
        self.stats |= layer_stats(
            prefix,
            layer.owned,
            layer.optimizer,
            self._norms.get(layer.index, []),
            self._device,
        )


@contextlib.contextmanager
def with_learning_rate(
    op: str, optimizers: Sequence[torch.optim.Optimizer], value: float | None
) -> Iterator[None]:
    """Set the learning rate of every parameter group for a while.

    Raises:
        ValueError: for a negative one, or NaN.
    """
    if value is None:
        yield
        return
    if not float(value) >= 0 or math.isinf(value):
        raise ValueError(
            f"{op}: expected a finite number >= 0, but got {value} "
            "(argument 'learning_rate')"
        )
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    before = [group["lr"] for group in groups]
    try:
        for group in groups:
            old = group["lr"]
            is_tensor = isinstance(old, Tensor)
            group["lr"] = torch.full_like(old, value) if is_tensor else value
        yield
    finally:
        for group, old in zip(groups, before, strict=True):
            group["lr"] = old
