# SPDX-License-Identifier: Apache-2.0
"""A loop over slices of (example, head) pairs, one slice's scores at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from torch_sm3 import _ops
from torch_sm3.reversible._remember import remember
from torch_sm3.reversible._seeds import fold, seed_tensor
from torch_sm3.reversible._split import Gradients, SplitResult, alias, vjp

_ATTENTION, _OUTPUT, _HASH = range(3)


class Slice(NamedTuple):
    """Some examples, and some heads of each."""

    examples: slice
    heads: slice


class Seeds:
    """What the random numbers of one split call are keyed by.

    The seed of attention dropout is ``fold(rng, 0)``, that of output dropout
    ``fold(rng, 1)`` and that of hashing ``fold(rng, 2)``.

    Args:
        rng: seed of the call.
        training: whether dropout is on.
        device: where the layer computes.
        remembers: whether a reversible block that runs the layer as a part of its
            function keeps discrete choices; with the split call it keeps the state.
    """

    def __init__(
        self, rng: int, training: bool, device: torch.device, remembers: bool
    ) -> None:
        self._rng = rng
        self._remembers = remembers
        self._training = training
        self._device = device
        self._keys: dict[int, Tensor] = {}

    @property
    def hashing(self) -> int:
        """The seed of hashing."""
        return fold(self._rng, _HASH)

    def choose(self, choice: Tensor) -> Tensor:
        """Return a discrete choice, or what it was in the first run."""
        return remember(choice) if self._remembers else choice

    def drops(self, p: float) -> bool:
        """Tell whether dropout with rate ``p`` does anything."""
        return self._training and p > 0

    def attention(
        self, probs: Tensor, p: float, offset: int, strides: Sequence[int] | None
    ) -> Tensor:
        """Drop attention probabilities, numbered as the operator numbers elements."""
        return self._drop(_ATTENTION, probs, p, offset, strides)

    def output(self, x: Tensor, p: float, offset: int = 0) -> Tensor:
        """Drop output features, numbered by (example, query, feature)."""
        return self._drop(_OUTPUT, x, p, offset, None)

    def _drop(
        self,
        which: int,
        x: Tensor,
        p: float,
        offset: int,
        strides: Sequence[int] | None,
    ) -> Tensor:
        if not self.drops(p):
            return x
        if which not in self._keys:
            self._keys[which] = seed_tensor(fold(self._rng, which), self._device)
        return _ops.reversible_dropout(x, p, self._keys[which], offset, strides)


class Sliced(Protocol):
    """What :class:`SliceRun` needs of a layer."""

    n_heads: int
    n_parallel_heads: int | None
    output_dropout: float
    weight_names: tuple[str, ...]

    def _plan(self, x: Tensor, seeds: Seeds) -> Any:
        """Return what all slices of a call share."""

    def _attend(
        self,
        x: Tensor,
        mask: Tensor | None,
        weights: dict[str, Tensor],
        where: Slice,
        state: Tensor | None,
        seeds: Seeds,
        plan: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the sum over a slice's heads, and its part of the state."""


def check_parallel(op: str, n_heads: int, count: int | None) -> None:
    """Check what of ``n_parallel_heads`` does not depend on the batch.

    Raises:
        ValueError: if it is below 1 or, below ``n_heads``, no divisor of it.
    """
    if count is not None and (count < 1 or (count < n_heads and n_heads % count)):
        raise ValueError(
            f"{op}: expected a divisor or a multiple of n_heads = {n_heads}, but got "
            f"{count} (argument 'n_parallel_heads')"
        )


def slices(op: str, batch: int, n_heads: int, count: int | None) -> list[Slice]:
    """Return the slices of ``count`` pairs that make up all of them, in order.

    Raises:
        ValueError: if slices of ``count`` pairs do not fit the batch.
    """
    if count is None or count >= batch * n_heads:
        return [Slice(slice(0, batch), slice(0, n_heads))]
    if count <= n_heads:
        return [
            Slice(slice(e, e + 1), slice(h, h + count))
            for e in range(batch)
            for h in range(0, n_heads, count)
        ]
    examples = count // n_heads
    if count % n_heads or batch % examples:
        raise ValueError(
            f"{op}: expected a multiple of n_heads = {n_heads} that divides "
            f"batch * n_heads = {batch * n_heads}, but got {count} "
            "(argument 'n_parallel_heads')"
        )
    return [
        Slice(slice(e, e + examples), slice(0, n_heads))
        for e in range(0, batch, examples)
    ]


class _Sum:
    """A tensor that is summed up part by part, 16-bit types in float32."""

    def __init__(self, like: Tensor, whole: bool) -> None:
        self._like = like
        self._whole = whole
        self._dtype = like.dtype
        self._value: Tensor | None = None

    def add(self, part: slice, value: Tensor) -> None:
        self._dtype = value.dtype
        if self._whole:
            self._value = value
            return
        if self._value is None:
            wide = value.dtype if value.dtype.itemsize > 2 else torch.float32
            self._value = torch.zeros_like(self._like, dtype=wide)
        self._value[part] += value

    def result(self) -> Tensor:
        """Return the sum, in the dtype of its parts."""
        if self._value is None:
            return torch.zeros_like(self._like)
        return self._value.to(self._dtype)


class SliceRun:
    r"""One split call, slice by slice: a slice's backward comes before the next slice.

    The output is :math:`y = D(\sum_h O_h + b_o)` with output dropout :math:`D`, which
    is linear and symmetric; so every slice gets the gradient :math:`D g_y`.

    Args:
        layer: the layer.
        inputs: the sequences and, for a masked layer, which positions are attended.
        weights: the layer's weights, in its order.
        state: of an earlier call, or None.
        seeds: of the random numbers.
        output_grad: gradient of the output, if gradients are asked for.
        wanted: for each input and each weight, whether its gradient is needed.
    """

    def __init__(
        self,
        layer: Sliced,
        inputs: Sequence[Tensor],
        weights: Sequence[Tensor],
        state: Tensor | None,
        seeds: Seeds,
        output_grad: Tensor | None,
        wanted: Sequence[bool],
    ) -> None:
        self._layer = layer
        self._inputs = inputs
        self._weights = dict(zip(layer.weight_names, weights, strict=True))
        self._state = state
        self._seeds = seeds
        self._wanted = wanted
        self._wants = dict(zip(layer.weight_names, wanted[len(inputs) :], strict=True))
        self._plan = layer._plan(inputs[0], seeds)
        self._grad = output_grad
        if output_grad is not None:
            self._grad = seeds.output(output_grad, layer.output_dropout)
        self._new_state: Tensor | None = None

    def __call__(self, compute_output: bool, update_state: bool) -> SplitResult:
        """Run all slices.

        Returns:
            As :func:`~torch_sm3.reversible._split.forward_and_or_backward`.
        """
        layer, x = self._layer, self._inputs[0]
        pieces = slices(
            type(layer).__name__, x.shape[0], layer.n_heads, layer.n_parallel_heads
        )
        whole = len(pieces) == 1
        output = _Sum(x, whole)
        x_grad = _Sum(x, whole)
        sums = {name: _Sum(w, whole) for name, w in self._weights.items()}
        for where in pieces:
            value = self._slice(where, x_grad, sums, update_state)
            if compute_output:
                output.add(where.examples, value)
        inputs_grad: Gradients | None = None
        weights_grad: Gradients | None = None
        if self._grad is not None:
            first = x_grad.result() if self._wanted[0] else None
            inputs_grad = (first, *[None] * (len(self._inputs) - 1))
            weights_grad = self._weight_grads(sums)
        state = self._new_state if self._new_state is not None else ()
        return (
            self._finish(output.result()) if compute_output else None,
            state if update_state else None,
            inputs_grad,
            weights_grad,
        )

    def _slice(
        self, where: Slice, x_grad: _Sum, sums: dict[str, _Sum], update_state: bool
    ) -> Tensor:
        """Run one slice; all that it needs is gone when this returns."""
        with_grad = self._grad is not None
        x, *masks = [item[where.examples] for item in self._inputs]
        x = alias(x, with_grad and self._wanted[0])
        weights = {
            name: alias(w[where.heads], with_grad and self._wants[name])
            for name, w in self._weights.items()
            if name != "b_o"
        }
        state = self._state
        if state is not None:
            state = state[where]
        with torch.set_grad_enabled(with_grad):
            value, new = self._layer._attend(
                x,
                masks[0] if masks else None,
                weights,
                where,
                state,
                self._seeds,
                self._plan,
            )
        if update_state and new is not None:
            self._keep(where, new)
        if self._grad is not None:
            upstream = self._grad[where.examples].to(value.dtype)
            found = vjp(value, [x, *weights.values()], upstream)
            if found[0] is not None:
                x_grad.add(where.examples, found[0])
            for name, grad in zip(weights, found[1:], strict=True):
                if grad is not None:
                    sums[name].add(where.heads, grad)
        return value.detach()

    def _keep(self, where: Slice, new: Tensor) -> None:
        if self._new_state is None:
            shape = (self._inputs[0].shape[0], self._layer.n_heads, *new.shape[2:])
            self._new_state = new.new_empty(shape)
        self._new_state[where] = new

    def _finish(self, output: Tensor) -> Tensor:
        bias = self._weights.get("b_o")
        if bias is not None:
            output = output + bias.detach().to(output.dtype)
        return self._seeds.output(output, self._layer.output_dropout)

    def _weight_grads(self, sums: dict[str, _Sum]) -> Gradients:
        grads: list[Tensor | None] = []
        for name, total in sums.items():
            if not self._wants[name]:
                grads.append(None)
            elif name == "b_o":
                assert self._grad is not None
                bias_grad = self._grad.sum((0, 1))
                grads.append(bias_grad.to(self._weights[name].dtype))
            else:
                grads.append(total.result())
        return tuple(grads)
