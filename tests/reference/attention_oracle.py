# SPDX-License-Identifier: Apache-2.0
"""Attention in float64 NumPy, one query at a time.

Written from the definitions: for every query the set of positions that it attends is
listed, and a softmax over that set is taken. Slow on purpose.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from reference import philox_oracle

Array = np.ndarray


@dataclass
class Options:
    """How a layer attends; named as the layers' arguments."""

    causal: bool = False
    chunk_len: int | None = None
    n_chunks_before: int = 0
    n_chunks_after: int = 0
    attention_dropout: float = 0.0
    output_dropout: float = 0.0
    rng: int = 0


def options(arguments: dict[str, object], rng: int) -> Options:
    """Pick what is an option from a layer's arguments."""
    names = Options.__annotations__
    return Options(**{k: v for k, v in arguments.items() if k in names}, rng=rng)


def _factor(key: int, number: int, p: float) -> float:
    if p == 0:
        return 1.0
    return float(philox_oracle.factors(key, np.array([number]), p)[0])


def _softmax(scores: list[float]) -> Array:
    e = np.exp(np.array(scores) - max(scores))
    return e / e.sum()


def _head(x: Array, weights: dict[str, Array], kind: str, h: int) -> Array:
    value = x @ weights[f"w_{kind}"][h]
    return value + weights[f"b_{kind}"][h] if f"b_{kind}" in weights else value


def _output(heads: Array, weights: dict[str, Array], how: Options) -> Array:
    """Merge ``heads[example, head, query]`` and drop output features."""
    y = np.einsum("ehqv,hvd->eqd", heads, weights["w_o"])
    y = y + weights.get("b_o", 0.0)
    key = philox_oracle.fold(how.rng, 1)
    if how.output_dropout:
        numbers = np.arange(y.size).reshape(y.shape)
        y = y * philox_oracle.factors(key, numbers, how.output_dropout)
    return y


def self_attention(
    x: Array, weights: dict[str, Array], how: Options, mask: Array | None = None
) -> Array:
    batch, n, _ = x.shape
    n_heads = len(weights["w_q"])
    key = philox_oracle.fold(how.rng, 0)
    heads = np.zeros((batch, n_heads, n, weights["w_v"].shape[2]))
    for e in range(batch):
        for h in range(n_heads):
            q = _head(x[e], weights, "q", h)
            k = _head(x[e], weights, "k" if "w_k" in weights else "q", h)
            v = _head(x[e], weights, "v", h)
            for i in range(n):
                seen = [j for j in range(n) if _meet(i, j, how)]
                seen = [j for j in seen if j <= i or not how.causal]
                seen = [j for j in seen if mask is None or mask[e, j]]
                if not seen:
                    continue
                probs = _softmax([q[i] @ k[j] / np.sqrt(q.shape[1]) for j in seen])
                for prob, j in zip(probs, seen, strict=True):
                    number = ((e * n_heads + h) * n + i) * n + j
                    factor = _factor(key, number, how.attention_dropout)
                    heads[e, h, i] += prob * factor * v[j]
    return _output(heads, weights, how)


def _meet(i: int, j: int, how: Options) -> bool:
    """Tell whether the place ``j`` is in the window of the place ``i``."""
    if how.chunk_len is None:
        return True
    ahead = j // how.chunk_len - i // how.chunk_len
    return -how.n_chunks_before <= ahead <= how.n_chunks_after


def lsh_attention(
    x: Array,
    weights: dict[str, Array],
    buckets: Array,
    how: Options,
    mask: Array | None = None,
) -> Array:
    """One softmax over all that a query meets in any round, each counted once.

    Dropout thins a pair in each of its rounds by itself, so a pair's probability is
    spread evenly over them.
    """
    batch, n, _ = x.shape
    n_heads, n_rounds = buckets.shape[1:3]
    assert how.chunk_len is not None
    size = how.chunk_len
    last = -(-n // size) - 1
    before = min(how.n_chunks_before, last)
    width = (before + 1 + min(how.n_chunks_after, last)) * size
    key = philox_oracle.fold(how.rng, 0)
    heads = np.zeros((batch, n_heads, n, weights["w_v"].shape[2]))
    for e in range(batch):
        for h in range(n_heads):
            q = _head(x[e], weights, "q", h)
            k = q / np.sqrt((q**2).mean(1, keepdims=True) + 1e-6)
            v = _head(x[e], weights, "v", h)
            order = [
                sorted(range(n), key=lambda j, b=b: (b[j], j)) for b in buckets[e, h]
            ]
            place = [[o.index(j) for j in range(n)] for o in order]
            for i in range(n):
                met = {
                    j: [
                        r
                        for r in range(n_rounds)
                        if _meet(place[r][i], place[r][j], how)
                    ]
                    for j in range(n)
                    if (mask is None or mask[e, j]) and (j <= i or not how.causal)
                }
                seen = [j for j in met if met[j] and j != i]
                if not seen:
                    seen = [j for j in met if j == i]
                if not seen:
                    continue
                probs = _softmax([q[i] @ k[j] / np.sqrt(q.shape[1]) for j in seen])
                for prob, j in zip(probs, seen, strict=True):
                    for r in met[j]:
                        pair = (e * n_heads + h) * n_rounds + r
                        row = pair * (last + 1) * size + place[r][i]
                        first = (place[r][i] // size - before) * size
                        number = row * width + place[r][j] - first
                        factor = _factor(key, number, how.attention_dropout)
                        heads[e, h, i] += prob / len(met[j]) * factor * v[j]
    return _output(heads, weights, how)
