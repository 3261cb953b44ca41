# SPDX-License-Identifier: Apache-2.0
"""What attention in slices keeps alive, as the allocator counts it."""

from __future__ import annotations

import gc

import pytest
import torch
from helpers.memory_meter import memory_meter

from torch_sm3.reversible import LSHSelfAttention, SelfAttention

LENGTH = 256
CHUNK = 32
# Bytes of the scores of one (example, head) pair.
SCORES = {
    "full": 4 * LENGTH * LENGTH,
    "chunks": 4 * LENGTH * 3 * CHUNK,
    "lsh": 4 * LENGTH * 2 * 2 * CHUNK,
}


def make(kind, n_heads, n_parallel_heads, dropout=0.0):
    options = dict(
        d_model=4,
        n_heads=n_heads,
        d_qk=2,
        d_v=2,
        causal=True,
        n_parallel_heads=n_parallel_heads,
        attention_dropout=dropout,
    )
    if kind == "full":
        return SelfAttention(**options)
    options |= dict(chunk_len=CHUNK, n_chunks_before=1)
    if kind == "chunks":
        return SelfAttention(n_chunks_after=1, **options)
    return LSHSelfAttention(n_hashes=2, n_buckets=8, **options)


def peak(run):
    run()  # lazily made memory of torch itself
    gc.collect()
    with memory_meter() as read:
        run()
    return read.peak


def split(kind, batch, n_heads, n_parallel_heads, dropout=0.0):
    """Peak bytes of a split call for output and gradients."""
    layer = make(kind, n_heads, n_parallel_heads, dropout)
    x = torch.randn(batch, LENGTH, 4)
    return peak(lambda: layer.forward_and_or_backward((x,), rng=1, output_grad=x))


def train(kind, batch, n_heads, n_parallel_heads, dropout=0.0):
    """Peak bytes of forward and backward under ordinary autograd."""
    layer = make(kind, n_heads, n_parallel_heads, dropout)
    x = torch.randn(batch, LENGTH, 4)
    return peak(lambda: layer(x).sum().backward())


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("measure", [split, train])
def test_score_memory_does_not_depend_on_batch_and_heads(kind, measure):
    one = measure(kind, 1, 1, 1)
    many = measure(kind, 4, 4, 1)
    # Streams, their gradients and the state are of the size of the input.
    state = 4 * 4 * 2 * LENGTH * 8 * (kind == "lsh")
    linear = 4 * (4 * LENGTH * 4 * 4) + state
    assert many - one < SCORES[kind] // 4 + linear
    # Of all 16 pairs at once there are that many, which the meter sees.
    assert measure(kind, 4, 4, None) - one > 30 * SCORES[kind]


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_few_matrices_of_scores_are_alive(kind, dropout):
    # Probabilities, their gradient, that of the scores, and a mask of booleans; what
    # is left is for queries, keys and values.
    assert split(kind, 1, 1, 1, dropout) < 3.75 * SCORES[kind]


@pytest.mark.parametrize("kind", SCORES)
def test_forward_leaves_its_output_only(kind):
    layer = make(kind, 4, 2)
    x = torch.randn(2, LENGTH, 4)
    layer(x)
    gc.collect()
    with memory_meter() as read:
        y = layer(x)
    state = 2 * 4 * 2 * LENGTH * 8 * (kind == "lsh")
    assert y.nbytes <= read.live < y.nbytes + state + 1024


@pytest.mark.parametrize("kind", SCORES)
def test_nothing_is_left_after_backward(kind):
    layer = make(kind, 4, 2)
    x = torch.randn(2, LENGTH, 4)
    for _ in range(2):
        layer(x).sum().backward()
    gc.collect()
    with memory_meter() as read:
        for _ in range(3):
            layer(x).sum().backward()
    assert read.live == 0
