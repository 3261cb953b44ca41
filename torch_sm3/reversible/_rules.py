# SPDX-License-Identifier: Apache-2.0
"""How a half-residual joins its accumulator with F's values, and parts them again."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torch_sm3 import _ops

Grads = tuple[Tensor | None, list[Tensor | None]]


class Add:
    """``acc + value``."""

    #: Whether the join is an addition, so that a grid can make it exact.
    additive = True
    #: Whether autograd saves tensors for the join.
    saves = False

    def apply(self, acc: Tensor, values: Sequence[Tensor]) -> Tensor:
        """Return the new accumulator; differentiable."""
        return _ops.reversible_add(acc, values[0])

    def invert(self, out: Tensor, values: Sequence[Tensor]) -> Tensor:
        """Return the old accumulator; differentiable."""
        return _ops.reversible_sub(out, values[0])

    def backward(self, grad: Tensor, acc: Tensor, values: Sequence[Tensor]) -> Grads:
        """Return the gradients of the old accumulator and of the values."""
        return grad, [grad]


class GridAdd(Add):
    """``acc + q(value)``, where q rounds to multiples of ``2 ** -bits``.

    Args:
        bits: binary digits after the point.
    """

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def apply(self, acc: Tensor, values: Sequence[Tensor]) -> Tensor:
        """Return the new accumulator; differentiable."""
        return _ops.reversible_grid_add(acc, values[0], self.bits)[0]

    def invert(self, out: Tensor, values: Sequence[Tensor]) -> Tensor:
        """Return the old accumulator; differentiable."""
        return _ops.reversible_grid_sub(out, values[0], self.bits)


class Affine:
    r"""``acc * exp(s) + shift``, where ``s`` is the scale, bounded by ``clamp``.

    Args:
        clamp: the bound.
    """

    additive = False
    saves = True

    def __init__(self, clamp: float) -> None:
        self.clamp = clamp

    def apply(self, acc: Tensor, values: Sequence[Tensor]) -> Tensor:
        """Return the new accumulator; differentiable."""
        return _ops.reversible_affine(acc, values[0], values[1], self.clamp)

    def invert(self, out: Tensor, values: Sequence[Tensor]) -> Tensor:
        """Return the old accumulator; differentiable."""
        return _ops.reversible_affine_inverse(out, values[0], values[1], self.clamp)

    def backward(self, grad: Tensor, acc: Tensor, values: Sequence[Tensor]) -> Grads:
        """Return the gradients of the old accumulator and of the values."""
        scale = values[0].detach()
        grad_acc, grad_scale = _ops.reversible_affine_backward(
            grad, acc, scale, self.clamp
        )
        return grad_acc, [grad_scale, grad]


class Lerp:
    """``gamma * acc + (1 - gamma) * value``: the velocity of a momentum coupling.

    Args:
        gamma: what stays of the accumulator.
    """

    additive = False
    saves = False

    def __init__(self, gamma: float) -> None:
        self.gamma = gamma

    def apply(self, acc: Tensor, values: Sequence[Tensor]) -> Tensor:
        """Return the new accumulator; differentiable."""
        value = values[0].to(acc.dtype)
        return self.gamma * acc + (1 - self.gamma) * value

    def invert(self, out: Tensor, values: Sequence[Tensor]) -> Tensor:
        """Return the old accumulator; differentiable."""
        value = values[0].to(out.dtype)
        return (out - (1 - self.gamma) * value) / self.gamma

    def backward(self, grad: Tensor, acc: Tensor, values: Sequence[Tensor]) -> Grads:
        """Return the gradients of the old accumulator and of the values."""
        return self.gamma * grad, [(1 - self.gamma) * grad]


#: What joins an accumulator and F's values.
Rule = Add | Affine | Lerp
