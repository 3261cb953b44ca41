# SPDX-License-Identifier: Apache-2.0
"""Adasum the slow way: the tree on the vectors themselves, in numpy.longdouble.

No Gram matrix and no exponents; what the library computes from inner products is
computed here from the definition.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.longdouble]


def pair(a: Vector, m: float, b: Vector, k: float) -> tuple[Vector, float]:
    """Combine two nodes of weight m and k; a node of weight 0 is absent."""
    if m == 0:
        return b, k
    if k == 0:
        return a, m
    dot, aa, bb = a @ b, a @ a, b @ b
    m, k = np.longdouble(m), np.longdouble(k)
    left = (1 - m / (m + k) * dot / aa) * a
    right = (1 - k / (m + k) * dot / bb) * b
    result = left + right
    # Cancelled as far as float64 sums of the leaves could tell: absent from here on.
    total = np.sqrt(left @ left) + np.sqrt(right @ right)
    if np.sqrt(result @ result) <= 1e-7 * total:
        return np.zeros_like(a), 0.0
    return result, float(m + k)


def tree(leaves: Sequence[Vector], weights: Sequence[float]) -> tuple[Vector, float]:
    """Combine leaves as a tree that splits after the largest power of two."""
    if len(leaves) == 1:
        return leaves[0], weights[0]
    split = 1
    while split * 2 < len(leaves):
        split *= 2
    left = tree(leaves[:split], weights[:split])
    right = tree(leaves[split:], weights[split:])
    return pair(*left, *right)


def adasum(
    leaves: npt.ArrayLike, weights: Sequence[float] | None = None
) -> npt.NDArray[np.longdouble]:
    """Return the Adasum of the rows of ``leaves`` as numpy.longdouble.

    Args:
        leaves: one row per rank, one layer.
        weights: weight of each row, all 1 by default; zero rows always weigh 0.
    """
    rows = np.asarray(leaves, dtype=np.longdouble)
    if len(rows) == 1:
        return rows[0]
    if not np.isfinite(rows).all():
        return np.full(rows.shape[1], np.nan, dtype=np.longdouble)
    given = [1.0] * len(rows) if weights is None else list(weights)
    active = [w if row.any() else 0.0 for row, w in zip(rows, given, strict=True)]
    rows = np.where(np.asarray(active)[:, None] > 0, rows, 0)
    return tree(list(rows), active)[0]


def adasum_layers(
    leaves: npt.ArrayLike, sizes: Sequence[int]
) -> npt.NDArray[np.longdouble]:
    """Return :func:`adasum` of each run of ``sizes`` columns, joined."""
    rows = np.asarray(leaves, dtype=np.longdouble)
    cuts = np.cumsum(np.asarray(sizes, dtype=np.int64))[:-1]
    return np.concatenate([adasum(part) for part in np.split(rows, cuts, axis=1)])


def kappa(leaves: npt.ArrayLike) -> float:
    """Return an upper estimate of the tree's condition: sum of norms / |result|."""
    rows = np.asarray(leaves, dtype=np.longdouble)
    result = adasum(rows)
    norm = np.sqrt(result @ result)
    total = np.sqrt((rows * rows).sum(axis=1)).sum()
    return float(total / norm) if norm > 0 else float("inf")
