# SPDX-License-Identifier: Apache-2.0
"""How a half-residual joins its accumulator with F's values, and parts them again.

The library's operators do it in one pass. Compilers, which fuse, and transforms, which
do not know these operators, get the same sums in torch's operators.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torch_sm3 import _ops

Grads = tuple[Tensor | None, list[Tensor | None]]

#: Digits of the significand, of dtypes that have a grid.
DIGITS = {torch.float32: 24, torch.float64: 53}


def transformed() -> bool:
    """Tell whether a compiler or a transform of functions looks at the operators."""
    return (
        torch.compiler.is_compiling()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    )


def quantize(x: Tensor, bits: int) -> Tensor:
    """Round to multiples of ``2 ** -bits``; the gradient passes unchanged."""
    if not transformed():
        return _ops.reversible_quantize(x, bits)
    rounded = torch.round(x * 2.0**bits) * 2.0**-bits
    # The difference of neighbours is exact, so the sum is the rounded number.
    small = x.abs() < 2.0 ** (DIGITS[x.dtype] - 1 - bits)
    return x + torch.where(small, rounded - x, 0).detach()


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    # An exported graph would also check what is no cast.
    return value if value.dtype == dtype else value.to(dtype)


class Add:
    """``acc + value``."""

    #: Whether the join is an addition, so that a grid can make it exact.
    additive = True
    #: Whether autograd saves tensors for the join.
    saves = False

    def apply(self, acc: Tensor, values: Sequence[Tensor]) -> Tensor:
        """Return the new accumulator; differentiable."""
        if transformed():
            return acc + _cast(values[0], acc.dtype)
        return _ops.reversible_add(acc, values[0])

    def invert(self, out: Tensor, values: Sequence[Tensor]) -> Tensor:
        """Return the old accumulator; differentiable."""
        if transformed():
            return out - _cast(values[0], out.dtype)
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
        if transformed():
            return acc + quantize(_cast(values[0], acc.dtype), self.bits)
        return _ops.reversible_grid_add(acc, values[0], self.bits)[0]

    def invert(self, out: Tensor, values: Sequence[Tensor]) -> Tensor:
        """Return the old accumulator; differentiable."""
        if transformed():
            return out - quantize(_cast(values[0], out.dtype), self.bits)
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
        if transformed():
            scale, shift = self._bounded(values, acc.dtype)
            return acc * torch.exp(scale) + shift
        return _ops.reversible_affine(acc, values[0], values[1], self.clamp)

    def invert(self, out: Tensor, values: Sequence[Tensor]) -> Tensor:
        """Return the old accumulator; differentiable."""
        if transformed():
            scale, shift = self._bounded(values, out.dtype)
            return (out - shift) * torch.exp(-scale)
        return _ops.reversible_affine_inverse(out, values[0], values[1], self.clamp)

    def _bounded(
        self, values: Sequence[Tensor], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        scale, shift = (_cast(value, dtype) for value in values)
        return self.clamp * torch.tanh(scale / self.clamp), shift

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
        value = _cast(values[0], acc.dtype)
        return self.gamma * acc + (1 - self.gamma) * value

    def invert(self, out: Tensor, values: Sequence[Tensor]) -> Tensor:
        """Return the old accumulator; differentiable."""
        value = _cast(values[0], out.dtype)
        return (out - (1 - self.gamma) * value) / self.gamma

    def backward(self, grad: Tensor, acc: Tensor, values: Sequence[Tensor]) -> Grads:
        """Return the gradients of the old accumulator and of the values."""
        return self.gamma * grad, [(1 - self.gamma) * grad]


#: What joins an accumulator and F's values.
Rule = Add | Affine | Lerp
