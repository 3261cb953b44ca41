# SPDX-License-Identifier: Apache-2.0
"""Modules from which tests of the pipeline's backward build stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torch_sm3.reversible import AdditiveCoupling, ReversibleSequence

D = 6


class Apply(nn.Module):
    """A module that owns parts and a function of them and its inputs."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, Tensor):
                part = nn.Parameter(part)
            setattr(self, name, part)

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


class Scale(torch.autograd.Function):
    """``x * w``, as a custom Function that may not run twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.runs = 0
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        ctx.runs += 1
        assert ctx.runs == 1
        x, w = ctx.saved_tensors
        return grad * w, (grad * x).sum(0)


class Attention(nn.Module):
    """Causal self-attention of two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)
        self.out = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        split = self.qkv(x).view(*x.shape[:2], 3, 2, D // 2).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*split, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(x.shape))


class Transformer(nn.Module):
    """A pre-norm block."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attention = Attention()
        self.mlp = nn.Sequential(
            nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class Checkpointed(nn.Module):
    """Runs a module under a checkpoint and counts its runs."""

    def __init__(self, module: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.module = module
        self.use_reentrant = use_reentrant
        self.runs = 0

    def _run(self, x: Tensor) -> Tensor:
        self.runs += 1
        return self.module(x)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._run, x, use_reentrant=self.use_reentrant)


class Reversible(nn.Module):
    """A reversible sequence of two blocks between a split and a join."""

    def __init__(self) -> None:
        super().__init__()

        def block() -> AdditiveCoupling:
            half = D // 2
            return AdditiveCoupling(
                nn.Sequential(nn.Linear(half, half), nn.Tanh()),
                nn.Sequential(nn.LayerNorm(half), nn.Linear(half, half)),
            )

        self.blocks = ReversibleSequence(block(), block())

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(self.blocks(*x.chunk(2, dim=-1)), dim=-1)
