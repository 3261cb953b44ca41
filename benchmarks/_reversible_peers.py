# SPDX-License-Identifier: Apache-2.0
"""Other ways to train the same reversible blocks: schedules and peer packages.

The two schedules are the designs of known packages, written as lean as they can be: no
concatenation of the streams, no replay of random numbers, no checks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

Pair = tuple[Tensor, Tensor]
Run = Callable[[Tensor], Pair]


class Coupled(nn.Module):
    """``y1 = x1 + F(x2), y2 = x2 + G(y1)``, with an inverse and nothing else."""

    def __init__(self, F: nn.Module, G: nn.Module) -> None:
        super().__init__()
        self.F, self.G = F, G

    def forward(self, x1: Tensor, x2: Tensor) -> Pair:
        """Return both new streams."""
        y1 = x1 + self.F(x2)
        return y1, x2 + self.G(y1)

    def inverse(self, y1: Tensor, y2: Tensor) -> Pair:
        """Return both old streams."""
        x2 = y2 - self.G(y1)
        return y1 - self.F(x2), x2


class InverseThenForward(Function):
    """One node per block: inverse without grad, then forward with grad (MemCNN).

    The functions of a block run three times in a step.
    """

    @staticmethod
    def forward(
        ctx: Any, block: Coupled, streams: list[Tensor], *inputs: Tensor
    ) -> Pair:
        """Run a block and leave its output where the next backward finds it."""
        ctx.block, ctx.streams, ctx.weights = block, streams, inputs[2:]
        y1, y2 = block(*inputs[:2])
        streams[:] = y1.detach(), y2.detach()
        return y1, y2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Rebuild the inputs, run the block at them and differentiate it."""
        with torch.no_grad():
            ctx.streams[:] = ctx.block.inverse(*ctx.streams)
        inputs = [stream.detach().requires_grad_() for stream in ctx.streams]
        with torch.enable_grad():
            outputs = ctx.block(*inputs)
        return None, None, *torch.autograd.grad(outputs, [*inputs, *ctx.weights], grads)


class NestedBackward(Function):
    """One node for all blocks, a backward pass inside its own (RevTorch, Reformer).

    Gradients of weights are accumulated by the inner pass: the outer one knows nothing
    of them, so that neither ``autograd.grad`` nor DDP sees them.
    """

    @staticmethod
    def forward(ctx: Any, blocks: Sequence[Coupled], x1: Tensor, x2: Tensor) -> Pair:
        """Run all blocks and keep the final streams."""
        for block in blocks:
            x1, x2 = block(x1, x2)
        ctx.blocks = blocks
        ctx.streams = x1.detach(), x2.detach()
        return x1, x2

    @staticmethod
    def backward(ctx: Any, d1: Tensor, d2: Tensor) -> Any:
        """Go back through the blocks, one run of each function."""
        y1, y2 = ctx.streams
        del ctx.streams
        for block in reversed(ctx.blocks):
            y2, d1 = _half_back(block.G, y1, y2, d2, d1)
            y1, d2 = _half_back(block.F, y2, y1, d1, d2)
        return None, d1, d2


def _half_back(
    function: nn.Module, context: Tensor, out: Tensor, grad: Tensor, other: Tensor
) -> Pair:
    """Return the rebuilt stream and the gradient of the context."""
    leaf = context.detach().requires_grad_()
    with torch.enable_grad():
        value = function(leaf)
    value.backward(grad)
    assert leaf.grad is not None
    with torch.no_grad():
        return out - value, other + leaf.grad


def schedules(blocks: Sequence[Coupled]) -> dict[str, Run]:
    """Return both schedules of the given blocks."""
    weights = [list(block.parameters()) for block in blocks]

    def inverse_then_forward(x: Tensor) -> Pair:
        streams: list[Tensor] = []
        pair = (x, x)
        for block, owned in zip(blocks, weights, strict=True):
            pair = InverseThenForward.apply(block, streams, *pair, *owned)
        return pair

    def nested(x: Tensor) -> Pair:
        return NestedBackward.apply(blocks, x, x)

    return {"inverse, then forward": inverse_then_forward, "nested backward": nested}


def _memcnn(blocks: Sequence[Coupled]) -> Run:
    from memcnn import AdditiveCoupling, InvertibleModuleWrapper

    wrapped = nn.Sequential(
        *(
            InvertibleModuleWrapper(AdditiveCoupling(b.F, b.G, split_dim=-1))
            for b in blocks
        )
    )
    return lambda x: wrapped(torch.cat([x, x], dim=-1)).chunk(2, dim=-1)


def _revlib(blocks: Sequence[Coupled]) -> Run:
    from revlib import ReversibleSequential

    halves = [function for block in blocks for function in (block.F, block.G)]
    sequence = ReversibleSequential(*halves, split_dim=-1)
    return lambda x: sequence(torch.cat([x, x], dim=-1)).chunk(2, dim=-1)


def _revtorch(blocks: Sequence[Coupled]) -> Run:
    from revtorch import ReversibleBlock, ReversibleSequence

    wrapped = [ReversibleBlock(b.F, b.G, split_along_dim=-1) for b in blocks]
    sequence = ReversibleSequence(nn.ModuleList(wrapped))
    return lambda x: sequence(torch.cat([x, x], dim=-1)).chunk(2, dim=-1)


def packages(blocks: Sequence[Coupled]) -> dict[str, Run]:
    """Return a run of the given blocks by each peer package that is installed."""
    found: dict[str, Run] = {}
    for make in (_memcnn, _revlib, _revtorch):
        name = make.__name__.lstrip("_")
        warnings.filterwarnings("ignore", module=name)  # of what they still call
        try:
            found[name] = make(blocks)
        except ImportError as error:
            print(f"{name} is left out: {error}")
    return found
