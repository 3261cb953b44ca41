# SPDX-License-Identifier: Apache-2.0
"""Attention as a double loop over examples and heads, under plain autograd.

Slow, with all scores in memory, and easy to read: the layers are compared with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from torch_sm3.reversible._attention_slices import Seeds


class Layer(Protocol):
    """What the reference needs to know of an attention layer."""

    n_heads: int
    d_qk: int
    causal: bool
    chunk_len: int | None
    n_chunks_before: int
    n_chunks_after: int
    attention_dropout: float
    output_dropout: float


def self_attention(
    layer: Layer, inputs: Sequence[Tensor], weights: dict[str, Tensor], seeds: Seeds
) -> Tensor:
    """Return what :class:`SelfAttention` computes."""
    x = inputs[0]
    mask = inputs[1] if len(inputs) > 1 else torch.ones_like(x[..., 0]).bool()
    batch, n, _ = x.shape
    outputs = []
    for e in range(batch):
        total = torch.zeros_like(x[e])
        for h in range(layer.n_heads):
            q = head(x[e], weights, "q", h)
            k = head(x[e], weights, "k" if "w_k" in weights else "q", h)
            v = head(x[e], weights, "v", h)
            allowed = within_window(layer, torch.arange(n, device=x.device))
            allowed = allowed & mask[e]
            if layer.causal:
                allowed = allowed.tril()
            scores = (q @ k.T / layer.d_qk**0.5).masked_fill(~allowed, -torch.inf)
            some = allowed.any(-1, keepdim=True)
            probs = torch.softmax(torch.where(some, scores, 0), -1)
            probs = torch.where(some, probs, 0)
            offset = (e * layer.n_heads + h) * n * n
            probs = seeds.attention(probs, layer.attention_dropout, offset, None)
            total = total + (probs @ v) @ weights["w_o"][h]
        outputs.append(total)
    return finish(layer, outputs, weights, seeds)


def head(x: Tensor, weights: dict[str, Tensor], kind: str, index: int) -> Tensor:
    """Return one example's queries, keys or values in one head."""
    value = x @ weights[f"w_{kind}"][index]
    if f"b_{kind}" in weights:
        value = value + weights[f"b_{kind}"][index]
    return value


def within_window(layer: Layer, places: Tensor) -> Tensor:
    """Return, for positions at ``places`` of a chunked order, who may see whom."""
    if layer.chunk_len is None:
        return torch.ones(len(places), len(places), device=places.device).bool()
    chunk = places // layer.chunk_len
    ahead = chunk[None, :] - chunk[:, None]
    return (ahead >= -layer.n_chunks_before) & (ahead <= layer.n_chunks_after)


def finish(
    layer: Layer, outputs: list[Tensor], weights: dict[str, Tensor], seeds: Seeds
) -> Tensor:
    """Add the output's bias and drop features, example by example."""
    finished = []
    for e, total in enumerate(outputs):
        if "b_o" in weights:
            total = total + weights["b_o"]
        size = total.numel()
        finished.append(seeds.output(total, layer.output_dropout, e * size))
    return torch.stack(finished)


def lsh_attention(
    layer: Layer,
    inputs: Sequence[Tensor],
    weights: dict[str, Tensor],
    buckets: Tensor,
    seeds: Seeds,
) -> Tensor:
    """Return what :class:`LSHSelfAttention` computes with given buckets."""
    x = inputs[0]
    mask = inputs[1] if len(inputs) > 1 else torch.ones_like(x[..., 0]).bool()
    batch, n, _ = x.shape
    outputs = []
    for e in range(batch):
        total = torch.zeros_like(x[e])
        for h in range(layer.n_heads):
            q = head(x[e], weights, "q", h)
            # A position that may attend nothing but may not be attended yields zero.
            v = head(x[e], weights, "v", h).where(mask[e][:, None], 0)
            k = q / (q.square().mean(-1, keepdim=True) + 1e-6).sqrt()
            places = [_places(round_) for round_ in buckets[e, h]]
            meets = torch.stack([within_window(layer, place) for place in places])
            itself = torch.eye(n, device=x.device).bool()
            others = mask[e] & ~itself & meets
            if layer.causal:
                others = others.tril()
            lonely = ~others.any(0).any(-1, keepdim=True)
            allowed = others | (lonely & itself)
            rounds = meets.sum(0).clamp(min=1).to(q.dtype)
            scores = q @ k.T / layer.d_qk**0.5 - rounds.log()
            # One softmax over all rounds: combining them by their log-sum-exp.
            weight = torch.where(allowed, scores, -torch.inf).logsumexp((0, 2))
            probs = torch.where(allowed, (scores - weight[:, None]).exp(), 0)
            for r, place in enumerate(places):
                pair = (e * layer.n_heads + h) * len(places) + r
                dropped = _dropped(layer, probs[r], place, pair, seeds)
                total = total + (dropped @ v) @ weights["w_o"][h]
        outputs.append(total)
    return finish(layer, outputs, weights, seeds)


def _places(buckets: Tensor) -> Tensor:
    """Return every position's place in the order of buckets, then of positions."""
    n = len(buckets)
    by_bucket = (buckets * n + torch.arange(n, device=buckets.device)).argsort()
    return by_bucket.argsort()


def _dropped(
    layer: Layer, probs: Tensor, place: Tensor, pair: int, seeds: Seeds
) -> Tensor:
    """Drop one round's probabilities; their numbers count places, not positions."""
    assert layer.chunk_len is not None
    size = layer.chunk_len
    n = len(probs)
    last = -(-n // size) - 1
    before, after = min(layer.n_chunks_before, last), min(layer.n_chunks_after, last)
    width = (before + 1 + after) * size
    shape = ((last + 1) * size, width)
    ones = torch.ones(shape, dtype=probs.dtype, device=probs.device)
    offset = pair * ones.numel()
    factors = seeds.attention(ones, layer.attention_dropout, offset, None)
    first = (place // size - before) * size
    slot = (place[None, :] - first[:, None]).clamp(0, width - 1)
    return probs * factors[place[:, None], slot]
