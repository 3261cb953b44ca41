# SPDX-License-Identifier: Apache-2.0
"""Adasum by the pure operators, and the error that the oracle allows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from reference import adasum_oracle

from torch_sm3 import _ops

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
WORLDS = range(1, 9)
ETA = 2.0**-52


def combine(
    stack: torch.Tensor,
    sizes: Sequence[int] | None = None,
    *,
    weights: Sequence[float] | None = None,
    **options: Any,
) -> torch.Tensor:
    """Return the Adasum of the rows of ``stack`` by the three operators."""
    sizes = [stack.shape[1]] if sizes is None else sizes
    given = None if weights is None else torch.tensor(weights, dtype=torch.float64)
    gram = _ops.adasum_gram(stack, sizes)
    c = _ops.adasum_coefficients(gram, weights=given, **options)
    return _ops.adasum_combine(stack, c, sizes)


def coefficients(stack: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return the coefficients [p] of the rows of ``stack`` as one layer."""
    gram = _ops.adasum_gram(stack, [stack.shape[1]])
    return _ops.adasum_coefficients(gram, **options)[0]


def as_rows(stack: torch.Tensor) -> npt.NDArray[np.longdouble]:
    return stack.double().numpy().astype(np.longdouble)


def bound_of(
    want: adasum_oracle.Result, stack: torch.Tensor, dtype: torch.dtype
) -> npt.NDArray[np.longdouble]:
    """Return the error that an element may have after one rounding to ``dtype``."""
    kind = torch.finfo(dtype)
    smallest = np.longdouble(kind.smallest_normal) * kind.eps
    if dtype == torch.float64:
        # Each of the products that are added may be subnormal itself.
        smallest = smallest * len(stack)
    return want.bound(as_rows(stack), kind.eps / 2, smallest, ETA)


def assert_near_oracle(
    stack: torch.Tensor, result: torch.Tensor, mode: str = "tree", **options: Any
) -> adasum_oracle.Result:
    """Check every element of one layer against the oracle; return the oracle's word."""
    want = adasum_oracle.combine(as_rows(stack), mode, **options)
    found = as_rows(result)
    limit = float(torch.finfo(result.dtype).max)
    # An element beyond the type's range is infinite, the others are not.
    fits = np.abs(want.vector) <= limit
    error = np.abs(np.where(fits, found - want.vector, 0))
    bound = bound_of(want, stack, result.dtype)
    worst = int(np.argmax(error - bound)) if error.size else 0
    assert (error <= bound).all(), (worst, error[worst], bound[worst], want.kappa)
    return want


def noise_of(stack: torch.Tensor, mode: str = "tree") -> float:
    """Return 8 p eta kappa^2 times the sum of |c_i| |g_i|."""
    rows = as_rows(stack)
    want = adasum_oracle.combine(rows, mode)
    norms = np.abs(want.coefficients) @ np.sqrt((rows * rows).sum(axis=1))
    return float(8 * len(rows) * ETA * want.kappa**2 * norms)
