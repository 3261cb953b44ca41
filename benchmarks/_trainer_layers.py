# SPDX-License-Identifier: Apache-2.0
"""The model of the trainers' benchmarks: couplings of MLPs between two streams."""

from __future__ import annotations

from typing import Any

import torch
from _reversible_runs import mlp
from torch import Tensor, nn

import torch_sm3
from torch_sm3.reversible import AdditiveCoupling


class Streams(nn.Module):
    """A batch as two streams."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return them."""
        return x, x.clone()


class Loss(nn.Module):
    """A scalar of two streams."""

    n_in = 2

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the mean square of their sum."""
        return (a + b).square().mean()


def make(cls: Any, width: int, depth: int, **settings: Any) -> Any:
    """Return a trainer of a deep model, by a class or a function that makes one."""
    torch.manual_seed(0)
    layers = [AdditiveCoupling(mlp(width), mlp(width)) for _ in range(depth)]
    blocks = [([Streams()], layers)]
    return cls(
        blocks, Loss(), lambda params: torch_sm3.SM3(params, lr=1e-4), **settings
    )
