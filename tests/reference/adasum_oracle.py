# SPDX-License-Identifier: Apache-2.0
"""Adasum the slow way: on the vectors themselves, in numpy.longdouble.

No Gram matrix and no exponents; what the library computes from inner products is
computed here from the definition. Every rule returns the combined vector together with
the coefficients that made it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.longdouble]

# Epsilon of the float64 sums whose noise the cancellation guard is about.
EPSILON = np.longdouble(2) ** -52


@dataclass(frozen=True)
class Result:
    """What became of the leaves of one layer."""

    vector: Vector
    coefficients: Vector
    kappa: float = 1.0
    cancelled: int = 0

    def bound(
        self, leaves: npt.ArrayLike, unit: float, smallest: float, epsilon: float
    ) -> Vector:
        """Return the error that each element may have after one rounding.

        Args:
            leaves: one row per rank.
            unit: unit roundoff of the result's type.
            smallest: smallest subnormal of the result's type.
            epsilon: machine epsilon of the dot products.
        """
        rows = _rows(leaves)
        spread = (np.abs(self.coefficients)[:, None] * np.abs(rows)).sum(axis=0)
        noise = 8 * len(rows) * np.longdouble(epsilon) * self.kappa**2 * spread
        return unit * np.abs(self.vector) + np.longdouble(smallest) / 2 + noise


@dataclass
class _Layer:
    """What the nodes of one layer share, and what they report."""

    active: int
    kappa: float = 1.0
    cancelled: int = field(default=0)


@dataclass(frozen=True)
class _Node:
    vector: Vector
    coefficients: Vector
    weight: float
    spread: np.longdouble  # S: norms of the leaves times |coefficient|

    @property
    def square(self) -> np.longdouble:
        return self.vector @ self.vector

    def dropped(self) -> _Node:
        return _Node(self.vector * 0, self.coefficients * 0, 0.0, self.spread * 0)


def _rows(leaves: npt.ArrayLike) -> Vector:
    return np.asarray(leaves, dtype=np.longdouble)


def _guarded(node: _Node, layer: _Layer) -> _Node:
    """Drop a node that lies below what float64 dot products can resolve."""
    square = node.square
    if square <= 8 * layer.active * EPSILON * node.spread**2:
        layer.cancelled += 1
        return node.dropped()
    layer.kappa = max(layer.kappa, float(node.spread / np.sqrt(square)))
    return node


def pair(a: _Node, b: _Node, layer: _Layer) -> _Node:
    """Combine two nodes; a node of weight 0 is absent."""
    if a.weight == 0:
        return b
    if b.weight == 0:
        return a
    dot = a.vector @ b.vector
    m, k = np.longdouble(a.weight), np.longdouble(b.weight)
    left = 1 - m / (m + k) * dot / a.square
    right = 1 - k / (m + k) * dot / b.square
    node = _Node(
        left * a.vector + right * b.vector,
        left * a.coefficients + right * b.coefficients,
        a.weight + b.weight,
        abs(left) * a.spread + abs(right) * b.spread,
    )
    return _guarded(node, layer)


def tree(nodes: Sequence[_Node], layer: _Layer) -> _Node:
    """Combine nodes as a tree that splits after the largest power of two."""
    if len(nodes) == 1:
        return nodes[0]
    split = 1
    while split * 2 < len(nodes):
        split *= 2
    return pair(tree(nodes[:split], layer), tree(nodes[split:], layer), layer)


def _leaves_of(rows: Vector, weights: Sequence[float]) -> list[_Node]:
    unit = np.eye(len(rows), dtype=np.longdouble)
    return [
        _Node(
            row if row.any() and weight > 0 else row * 0,
            unit[i] if row.any() and weight > 0 else unit[i] * 0,
            float(weight) if row.any() else 0.0,
            np.sqrt(row @ row),
        )
        for i, (row, weight) in enumerate(zip(rows, weights, strict=True))
    ]


def _psum(nodes: Sequence[_Node], layer: _Layer) -> _Node:
    """Combine nodes in one round of projections on the nodes themselves."""
    present = [node for node in nodes if node.weight > 0]
    total = sum(np.longdouble(node.weight) for node in present)
    norms = sum(np.sqrt(node.square) for node in present)
    vector = nodes[0].vector * 0
    coefficients = nodes[0].coefficients * 0
    for node in present:
        others = sum(node.vector @ other.vector for other in present) - node.square
        c = 1 - node.weight / total * others / node.square
        vector = vector + c * node.vector
        coefficients = coefficients + c * node.coefficients
        layer.kappa = max(layer.kappa, float(1 + norms / np.sqrt(node.square)))
    return _Node(vector, coefficients, float(total), norms)


def _node_mean(leaves: Sequence[_Node], weights: Sequence[float], layer: _Layer):
    """Return the mean of the ranks of one node; ranks of zeros count."""
    total = np.longdouble(sum(weights))
    if total == 0 or all(leaf.weight == 0 for leaf in leaves):
        return leaves[0].dropped()
    shares = [np.longdouble(weight) / total for weight in weights]
    mean = _Node(
        sum(share * leaf.vector for share, leaf in zip(shares, leaves, strict=True)),
        sum(
            share * leaf.coefficients
            for share, leaf in zip(shares, leaves, strict=True)
        ),
        float(total),
        sum(share * leaf.spread for share, leaf in zip(shares, leaves, strict=True)),
    )
    mean = _guarded(mean, layer)
    # To the other nodes it is a leaf.
    return _Node(mean.vector, mean.coefficients, mean.weight, np.sqrt(mean.square))


def _cut(sequence, sizes: Sequence[int]) -> list:
    ends = np.cumsum(np.asarray(sizes, dtype=np.int64))
    return [sequence[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _projected(
    rows: Vector,
    mode: str,
    weights: Sequence[float],
    nodes: Sequence[int] | None,
    inner: str,
) -> Result:
    leaves = _leaves_of(rows, weights)
    layer = _Layer(sum(leaf.weight > 0 for leaf in leaves))
    rule = _psum if mode == "psum" else tree
    if nodes is not None and inner == "mean":
        runs = zip(_cut(leaves, nodes), _cut(list(weights), nodes), strict=True)
        children = [_node_mean(run, given, layer) for run, given in runs]
        layer.active = sum(child.weight > 0 for child in children)
    elif nodes is not None:
        children = [tree(run, layer) for run in _cut(leaves, nodes)]
    else:
        children = leaves
    root = rule(children, layer)
    return Result(root.vector, root.coefficients, layer.kappa, layer.cancelled)


def combine(
    leaves: npt.ArrayLike,
    mode: str = "tree",
    *,
    weights: Sequence[float] | None = None,
    nodes: Sequence[int] | None = None,
    inner: str = "mean",
    scale: float = 1.0,
) -> Result:
    """Combine the rows of ``leaves``, one layer.

    Args:
        leaves: one row per rank.
        mode: tree, psum, mean or sum.
        weights: weight of each row, all 1 by default; 0 is absent.
        nodes: ranks of each node, which are combined first.
        inner: how: mean or adasum.
        scale: factor of the result.
    """
    rows = _rows(leaves)
    p = len(rows)
    given = [1.0] * p if weights is None else list(weights)
    if p == 1:
        result = Result(rows[0], np.ones(1, dtype=np.longdouble))
    elif mode == "mean":
        result = _weighed(rows, np.asarray(given, np.longdouble) / sum(given))
    elif mode == "sum" and nodes is not None and inner == "mean":
        parts = [np.asarray(w, np.longdouble) / sum(w) for w in _cut(given, nodes)]
        result = _weighed(rows, np.concatenate(parts))
    elif mode == "sum":
        result = _weighed(rows, np.ones(p, dtype=np.longdouble))
    elif not np.isfinite(rows).all():
        nothing = np.full(rows.shape[1], np.nan, dtype=np.longdouble)
        result = Result(nothing, np.full(p, np.nan, np.longdouble), float("nan"))
    else:
        result = _projected(rows, mode, given, nodes, inner)
    return Result(
        result.vector * scale,
        result.coefficients * scale,
        result.kappa,
        result.cancelled,
    )


def _weighed(rows: Vector, coefficients: Vector) -> Result:
    return Result((coefficients[:, None] * rows).sum(axis=0), coefficients)


def combine_shards(
    shards: Sequence[npt.ArrayLike], mode: str = "tree", **options
) -> list[Vector]:
    """Combine a layer that is cut over devices: the whole, cut again."""
    parts = [_rows(shard) for shard in shards]
    whole = combine(np.concatenate(parts, axis=1), mode, **options).vector
    return _cut(whole, [part.shape[1] for part in parts])


def adasum(leaves: npt.ArrayLike, weights: Sequence[float] | None = None) -> Vector:
    """Return the vector of :func:`combine` by the tree."""
    return combine(leaves, weights=weights).vector


def adasum_layers(leaves: npt.ArrayLike, sizes: Sequence[int]) -> Vector:
    """Return :func:`adasum` of each run of ``sizes`` columns, joined."""
    columns = _cut(_rows(leaves).T, sizes)
    return np.concatenate([adasum(part.T) for part in columns])


def kappa(leaves: npt.ArrayLike) -> float:
    """Return the condition of the tree: the largest S / |node|."""
    return combine(leaves).kappa
