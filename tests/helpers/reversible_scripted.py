# SPDX-License-Identifier: Apache-2.0
"""What the tests of reversible blocks in TorchScript share."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def can_script() -> bool:
    """Tell whether this torch has TorchScript."""
    try:
        torch.jit.script(nn.Linear(1, 1))
    except Exception:
        return False
    return True


class MLP(nn.Module):
    """A residual function."""

    def __init__(self, width: int = 8, p: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.dropout = nn.Dropout(p)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(torch.tanh(self.up(self.norm(x)))))


def loss_of(y: tuple[Tensor, Tensor]) -> Tensor:
    """Return a number that depends on both streams in different ways."""
    return y[0].sin().sum() + (y[1] ** 2).mean()
