# SPDX-License-Identifier: Apache-2.0
"""Small modules and comparisons that several reversible tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torch_sm3.reversible import AdditiveCoupling, ReversibleSequence


class TanhMLP(nn.Module):
    """The function of the float64 oracle: ``tanh(x @ w) @ u``."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(width, hidden) / width**0.5)
        self.u = nn.Parameter(torch.randn(hidden, width) / hidden**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.w) @ self.u


def mlp(width: int = 8, dropout: float = 0.0, norm: bool = True) -> nn.Sequential:
    """A pre-norm MLP, as in a transformer."""
    return nn.Sequential(
        nn.LayerNorm(width) if norm else nn.Identity(),
        nn.Linear(width, 2 * width),
        nn.GELU(),
        nn.Dropout(dropout),
        nn.Linear(2 * width, width),
    )


def couplings(
    depth: int, make: Callable[[], nn.Module] = mlp, **options: Any
) -> ReversibleSequence:
    """A sequence of additive couplings."""
    blocks = [AdditiveCoupling(make(), make()) for _ in range(depth)]
    return ReversibleSequence(*blocks, **options)


def plain(blocks: Iterable[Any], *stack: Any, **side: Any) -> tuple[Any, ...]:
    """The plain run: the same blocks under ordinary autograd."""
    items = list(stack)
    for block in blocks:
        items[: block.n_in] = block(*items[: block.n_in], **side)
    return tuple(items)


def loss_of(outputs: Sequence[Any]) -> Tensor:
    """A loss in which every element of every floating output matters differently."""
    total = torch.zeros((), dtype=torch.float64)
    for i, y in enumerate(outputs):
        if isinstance(y, Tensor) and y.is_floating_point():
            weight = torch.linspace(-1, 1 + i, y.numel()).reshape(y.shape)
            total = (
                total
                + (weight * torch.sin(y.float() if y.dtype.itemsize < 4 else y)).sum()
            )
    return total


def gradients(module: nn.Module, *inputs: Tensor) -> list[Tensor | None]:
    """Take the gradients of inputs and parameters away and return them."""
    tensors = [*inputs, *module.parameters()]
    grads = [t.grad for t in tensors]
    for t in tensors:
        t.grad = None
    return grads


def assert_close(left: Sequence[Any], right: Sequence[Any], rtol: float) -> None:
    """Compare lists of gradients; None equals only None."""
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            scale = max(b.abs().max().item(), 1e-3)
            torch.testing.assert_close(a, b, rtol=rtol, atol=rtol * scale)
