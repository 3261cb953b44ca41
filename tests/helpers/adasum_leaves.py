# SPDX-License-Identifier: Apache-2.0
"""Leaves of every class that Adasum is tested with."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st

CLASSES = [
    "random",
    "correlated",
    "near_parallel",
    "opposite",
    "nearly_opposite",
    "half_zero",
    "tiny",
    "huge",
]
# Powers of ten of the norms of tiny and huge leaves. Sums of float64 squares stay in
# range up to 10^135; what lies beyond takes the second pass of pair and the exchange.
POWERS = {
    torch.float32: 37,
    torch.float64: 130,
    torch.float16: 4,
    torch.bfloat16: 37,
}


def make_leaves(
    kind: str,
    p: int,
    size: int,
    dtype: torch.dtype,
    seed: int,
    power: int | None = None,
) -> torch.Tensor:
    """Return [p, size] leaves of a class, rounded to ``dtype``.

    Args:
        kind: one of ``CLASSES``.
        p: number of ranks.
        size: number of elements.
        dtype: of the leaves.
        seed: of the numbers.
        power: of ten, in place of the one of ``POWERS``.
    """
    draw = np.random.default_rng(seed)
    common, own = draw.normal(size=size), draw.normal(size=(p, size))
    signs = np.where(np.arange(p) % 2, -1.0, 1.0)[:, None]
    ten = POWERS[dtype] if power is None else power
    rows = {
        "random": lambda: own,
        "correlated": lambda: common + 0.3 * own,
        "near_parallel": lambda: common + 1e-6 * own,
        "opposite": lambda: signs * common,
        "nearly_opposite": lambda: signs * common + 1e-4 * own,
        "half_zero": lambda: own * draw.permutation(np.arange(p) % 2)[:, None],
        "tiny": lambda: own * 10.0**-ten,
        "huge": lambda: own / max(np.abs(own).max(), 1.0) * 10.0**ten,
    }[kind]()
    return torch.from_numpy(rows).to(dtype)


def examples(count: int) -> settings:
    """Return the same examples in every run, without a limit of their time."""
    return settings(max_examples=count, deadline=None, derandomize=True, database=None)


def seeds() -> st.SearchStrategy[int]:
    return st.integers(0, 2**31)


def sizes() -> st.SearchStrategy[int]:
    return st.one_of(st.just(1), st.integers(2, 60))
