# SPDX-License-Identifier: Apache-2.0
"""Metrics of one layer from the leaves themselves, without any Gram matrix."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt


def _norm(vector: npt.NDArray[Any]) -> Any:
    return np.sqrt((vector * vector).sum())


def layer_metrics(
    leaves: Sequence[npt.ArrayLike], result: npt.ArrayLike
) -> dict[str, Any]:
    """Return what can be said of the leaves of all ranks and their Adasum."""
    rows = [np.asarray(leaf, dtype=np.longdouble) for leaf in leaves]
    r = np.asarray(result, dtype=np.longdouble)
    mean = sum(rows) / np.longdouble(len(rows))
    active = [row for row in rows if row.any()]
    cosines = [(a @ b) / (_norm(a) * _norm(b)) for a, b in combinations(active, 2)]
    return {
        "active": len(active),
        "norms": [_norm(row) for row in rows],
        "cosine_mean": np.mean(cosines) if cosines else np.nan,
        "cosine_min": min(cosines) if cosines else np.nan,
        "orthogonality": (r @ r) / sum(row @ row for row in rows),
        "multiplier": _norm(r) / _norm(mean),
        "projection": (r @ mean) / (mean @ mean),
    }
