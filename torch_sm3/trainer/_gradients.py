# SPDX-License-Identifier: Apache-2.0
"""Vector-Jacobian products of layers, and sums of gradients in autograd's order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torch_sm3.trainer._layers import Layer


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Run a backward pass as outside of autocast, where ordinary loops run it."""
    with contextlib.ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def add(total: Tensor | None, grad: Tensor | None) -> Tensor | None:
    """Return the sum of two gradients, in the order in which autograd adds them."""
    if total is None or grad is None:
        return grad if total is None else total
    return total + grad


class Gradients:
    """Gradients of the parameters that a running backward pass has met.

    A parameter's gradient is complete when the layer that owns it has run. Those of
    tied parameters are held apart for each microbatch until then, because that is
    the order in which a plain loop adds them up.

    Args:
        tied: identities of the parameters that several layers use.
        n_microbatches: number of backward passes that are added up.
    """

    def __init__(self, tied: set[int], n_microbatches: int) -> None:
        self._tied = tied
        self._n = n_microbatches
        self._sums: dict[int, Tensor] = {}
        self._held: dict[int, list[Tensor | None]] = {}

    def add(
        self,
        found: Mapping[nn.Parameter, Tensor],
        microbatch: int,
        others: Sequence[Any],
    ) -> None:
        """Add one layer's gradients of one microbatch.

        Args:
            found: by parameter.
            microbatch: counted from 0.
            others: tensors in use, which a gradient that is kept must not share
                memory with: autograd hands on a cotangent as it is.
        """
        used = {_memory(t) for t in others if isinstance(t, Tensor)}
        for parameter, grad in found.items():
            key = id(parameter)
            if key in self._tied:
                held = self._held.setdefault(key, [None] * self._n)
                held[microbatch] = add(held[microbatch], _own(grad, parameter, used))
            else:
                own = _own(_hooked(parameter, grad), parameter, used)
                total = self._sums.get(key)
                self._sums[key] = own if total is None else total.add_(own)
            used.add(_memory(grad))

    def take(self, layer: Layer) -> list[Tensor | None]:
        """Hand over the gradients of the parameters that a layer owns."""
        return [self._take(parameter) for parameter in layer.trainable]

    def _take(self, parameter: nn.Parameter) -> Tensor | None:
        key = id(parameter)
        if key not in self._held:
            return self._sums.pop(key, None)
        total: Tensor | None = None
        for grad in self._held.pop(key):
            total = add(total, None if grad is None else _hooked(parameter, grad))
        return total


def _hooked(parameter: Tensor, grad: Tensor) -> Tensor:
    """Return what the tensor hooks of a parameter make of its complete gradient."""
    hooks: dict[int, Any] = parameter._backward_hooks or {}
    for hook in list(hooks.values()):
        changed = hook(grad)
        grad = grad if changed is None else changed
    return grad


def _memory(tensor: Tensor) -> int:
    return 0 if tensor.is_sparse else tensor.untyped_storage().data_ptr()


def _own(grad: Tensor, parameter: Tensor, used: set[int]) -> Tensor:
    """Return a gradient that nothing else uses, laid out as autograd would."""
    if grad.is_sparse:
        return grad
    if grad.stride() != parameter.stride() and _is_dense(parameter):
        return torch.empty_like(parameter, dtype=grad.dtype).copy_(grad)
    if not grad.is_contiguous() and not _is_dense(parameter):
        return grad.contiguous()
    return grad.clone() if _memory(grad) in used else grad


def _is_dense(tensor: Tensor) -> bool:
    strides = sorted(
        (stride, size)
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        if size != 1
    )
    expected = 1
    for stride, size in strides:
        if stride != expected:
            return False
        expected *= size
    return True
