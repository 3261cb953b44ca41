# SPDX-License-Identifier: Apache-2.0
"""Comparisons of attention layers that several tests share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def twin(layer: nn.Module, **options: Any) -> nn.Module:
    """Another layer of the same kind and weights, with options of its own."""
    other = type(layer)(layer.d_model, dtype=layer.w_q.dtype, **options)
    other.load_state_dict(layer.state_dict())
    return other


def numpy_weights(layer: nn.Module) -> dict[str, np.ndarray]:
    return {n: p.detach().double().numpy() for n, p in layer.named_parameters()}


def randomise(layer: nn.Module) -> nn.Module:
    """Give biases values too."""
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, -0.7, 0.7)
    return layer


def assert_same_result(got: Sequence[Any], want: Sequence[Any], tol: float) -> None:
    """Compare results of split calls: structures first, then every tensor."""
    for a, b in zip(got, want, strict=True):
        assert type(a) is type(b)
        if isinstance(a, tuple):
            assert_same_result(a, b, tol)
        elif isinstance(a, Tensor):
            assert a.shape == b.shape and a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=tol, atol=tol)


def seeded(layer: nn.Module, seed: int) -> nn.Module:
    """Let ``forward`` take this seed instead of a draw."""
    layer.draw_seed = lambda: seed
    return layer


def generator_draws(run: Any) -> int:
    """Number of int64 draws from the CPU generator that ``run`` took, at most 3."""
    before = torch.get_rng_state()
    run()
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    for count in range(4):
        if torch.equal(torch.get_rng_state(), after):
            torch.set_rng_state(after)
            return count
        torch.empty((), dtype=torch.int64).random_()
    raise AssertionError("more than 3 draws")


#: What a layer can be called with that is wrong, for both layers.
WRONG_CALLS = {
    "x of rank 2": (ValueError, r"shape \(batch, length, 8\), but got .*'x'"),
    "x of another width": (ValueError, r"'x'"),
    "x of integers": (TypeError, r"expected a floating tensor, but got torch.int64"),
    "a mask": (TypeError, r"expected 1 inputs with masked=False, but got 2"),
}


def wrong_call(name: str) -> tuple[Tensor, ...]:
    x = torch.randn(2, 5, 8)
    return {
        "x of rank 2": (x[0],),
        "x of another width": (x[..., :7],),
        "x of integers": (x.long(),),
        "a mask": (x, torch.ones(2, 5).bool()),
    }[name]
