# SPDX-License-Identifier: Apache-2.0
"""Small modules and comparisons that several reversible tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torch_sm3.reversible import (
    AdditiveCoupling,
    AffineCoupling,
    Block,
    GroupCoupling,
    HalfResidual,
    MomentumCoupling,
    ReversibleSequence,
    Select,
)

ENGINES = ("node", "graph")


class TanhMLP(nn.Module):
    """The function of the float64 oracle: ``tanh(x @ w) @ u``."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(width, hidden) / width**0.5)
        self.u = nn.Parameter(torch.randn(hidden, width) / hidden**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.w) @ self.u


class Wide(TanhMLP):
    """The oracle's function, with values of twice the width."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(width, hidden)
        self.u = nn.Parameter(torch.randn(hidden, 2 * width) / hidden**0.5)


class Pair(Wide):
    """The same values as a pair."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x).chunk(2, -1)


def mlp(width: int = 8, dropout: float = 0.0, norm: bool = True) -> nn.Sequential:
    """A pre-norm MLP, as in a transformer."""
    return nn.Sequential(
        nn.LayerNorm(width) if norm else nn.Identity(),
        nn.Linear(width, 2 * width),
        nn.GELU(),
        nn.Dropout(dropout),
        nn.Linear(2 * width, width),
    )


class Rotation(Block):
    """A block of a user's: turns two streams by an angle that the third one gives."""

    n_in = n_out = 3

    def __init__(self, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.angle = mlp(width, dropout)

    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        cos, sin = self._turn(c)
        return a * cos - b * sin, a * sin + b * cos, c

    def inverse(self, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        cos, sin = self._turn(c)
        return a * cos + b * sin, b * cos - a * sin, c

    def _turn(self, c: Tensor) -> tuple[Tensor, Tensor]:
        angle = self.angle(c).to(c.dtype)
        return torch.cos(angle), torch.sin(angle)


class OnceRotation(Rotation):
    """The same, with one run of the function in the backward pass."""

    def reverse_and_grad(
        self, outputs: Any, output_grads: Any, side: Any, record: Any
    ) -> Any:
        a, b, c = outputs
        with record.world(), torch.enable_grad():
            leaf = c.detach().requires_grad_()
            angle = self.angle(leaf)
        cos, sin = torch.cos(angle.detach()), torch.sin(angle.detach())
        old = a * cos + b * sin, b * cos - a * sin
        ga, gb, gc = [
            torch.zeros_like(y) if g is None else g
            for y, g in zip(outputs, output_grads, strict=True)
        ]
        grad_angle = gb * a - ga * b
        found = torch.autograd.grad(
            angle, [leaf, *record.params], grad_angle, allow_unused=True
        )
        grads = (ga * cos + gb * sin, gb * cos - ga * sin, gc + found[0])
        return (*old, c), grads, (), found[1:]


def wide(width: int = 8, dropout: float = 0.0) -> nn.Sequential:
    """An MLP of twice the width, for scale and shift; small, so that streams stay."""
    layers = mlp(width, dropout)
    layers[4] = nn.Linear(2 * width, 2 * width)
    with torch.no_grad():
        layers[4].weight.mul_(0.3)
    return layers


#: Makers of one block of each kind, of a width and a dropout rate.
BLOCKS: dict[str, Callable[..., list[Block]]] = {
    "additive": lambda w=8, p=0.0: [AdditiveCoupling(mlp(w, p), mlp(w, p))],
    "affine": lambda w=8, p=0.0: [AffineCoupling(wide(w, p), wide(w, p))],
    "momentum": lambda w=8, p=0.0: [MomentumCoupling(mlp(w, p))],
    "ring": lambda w=8, p=0.0: [GroupCoupling(mlp(w, p), mlp(w), mlp(w, p))],
    "half": lambda w=8, p=0.0: [HalfResidual(mlp(w, p), nn.Tanh()), Select([1, 0])],
    "custom": lambda w=8, p=0.0: [Rotation(w, p), Select([2, 0, 1])],
    "once": lambda w=8, p=0.0: [OnceRotation(w, p), Select([2, 0, 1])],
}
#: Those that are made of additive halves.
ADDITIVE = ("additive", "ring", "half")


def blocks_of(
    kind: str, depth: int, width: int = 8, dropout: float = 0.0
) -> list[Block]:
    """Make ``depth`` blocks of one kind, with what moves the streams between them."""
    return [b for _ in range(depth) for b in BLOCKS[kind](width, dropout)]


def streams_of(
    seq: ReversibleSequence, rows: int = 4, width: int = 8, **options: Any
) -> list[Tensor]:
    """Make the streams that a sequence takes; options as of ``torch.randn``."""
    options = {"requires_grad": True, **options}
    return [torch.randn(rows, width, **options) for _ in range(seq.n_in)]


def step(
    run: Callable[..., Any],
    module: nn.Module,
    stack: Sequence[Any],
    seed: int = 0,
    pick: Sequence[int] | None = None,
    **side: Any,
) -> tuple[list[Any], list[Tensor | None]]:
    """Run forward and backward from a seed; return outputs and all gradients.

    Args:
        run: ``module`` itself or another run of it.
        module: owns the parameters.
        stack: positional arguments.
        seed: of the global generator.
        pick: outputs that the loss depends on; all by default.
        **side: keyword arguments.
    """
    torch.manual_seed(seed)
    outputs = list(run(*stack, **side))
    picked = outputs if pick is None else [outputs[i] for i in pick]
    loss_of(picked).backward()
    tensors = [x for x in [*stack, *side.values()] if isinstance(x, Tensor)]
    return [_detached(y) for y in outputs], gradients(module, *tensors)


def _detached(item: Any) -> Any:
    return item.detach() if isinstance(item, Tensor) else item


def plain_run(blocks: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """The plain run of blocks: ordinary autograd, on the grid if there is one."""
    return ReversibleSequence(*blocks, plan="store", engine="graph", **options)


def assert_equal(left: Sequence[Any], right: Sequence[Any]) -> None:
    """Compare lists of tensors bit for bit, signs of zeros and NaN apart."""
    assert len(left) == len(right)
    for i, (a, b) in enumerate(zip(left, right, strict=True)):
        assert (a is None) == (b is None), i
        if isinstance(a, Tensor):
            assert torch.equal(a, b), f"{i}: {(a - b).abs().max()}"


def pair(
    blocks: Sequence[Any], engine: str, **options: Any
) -> tuple[ReversibleSequence, ReversibleSequence]:
    """A sequence and its store run, of the same engine and blocks."""
    seq = ReversibleSequence(*blocks, engine=engine, **options)
    return seq, ReversibleSequence(*blocks, engine=engine, plan="store", **options)


def assert_exact(
    blocks: Sequence[Any], engine: str, stack: Sequence[Any], **options: Any
) -> tuple[ReversibleSequence, Any]:
    """Compare with the store run bit for bit; return the sequence and its results."""
    seq, store = pair(blocks, engine, **options)
    for seed in range(2):  # the first call learns, the second knows
        got, want = step(seq, seq, stack, seed), step(store, seq, stack, seed)
        assert_equal(got[0], want[0])
        assert_equal(got[1], want[1])
    return seq, got


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
