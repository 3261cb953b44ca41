# SPDX-License-Identifier: Apache-2.0
"""Small models and comparisons for tests of the SM3 class."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_sm3 import SM3

#: Flags of every implementation; "default" chooses for each parameter.
IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "default": {},
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "loop": {"fused": False},
}


def small_model(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Return two linear layers with the same weights at each call."""
    torch.manual_seed(1)
    layers = [torch.nn.Linear(8, 12), torch.nn.Tanh(), torch.nn.Linear(12, 4)]
    return torch.nn.Sequential(*layers).to(dtype)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Do steps on inputs that depend on their number alone."""
    generator = torch.Generator().manual_seed(steps)
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.randn(16, 8, generator=generator).to(dtype)
        model(x).square().mean().backward()
        optimizer.step()


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Any:
    """Return parameters of random values, each with a random gradient."""
    params = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    for param in params:
        param.grad = torch.randn(param.shape).to(dtype)
    return params


def snapshot(optimizer: SM3) -> list[Tensor]:
    """Return copies of all parameters and all state, in their order."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    state = [t for one in optimizer.state.values() for t in one.values()]
    return [tensor.detach().clone() for tensor in (*params, *state)]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    """Tell whether two snapshots have the same dtypes and bits."""
    return len(one) == len(other) and all(
        a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
        for a, b in zip(one, other, strict=True)
    )


def equal_states(one: SM3, other: SM3) -> bool:
    """Tell whether two optimizers hold the same keys, dtypes and bits."""
    states = zip(one.state.values(), other.state.values(), strict=True)
    return all(
        a.keys() == b.keys()
        and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)
        for a, b in states
    )
