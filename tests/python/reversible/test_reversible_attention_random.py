# SPDX-License-Identifier: Apache-2.0
"""Random configurations of attention: slices, reference and oracle agree."""

from __future__ import annotations

import random

import pytest
import torch
from helpers.attention_checks import assert_same_result, numpy_weights, randomise
from reference import attention_oracle as oracle

from torch_sm3.reversible import LSHSelfAttention, SelfAttention


def divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


def draw_options(draw, batch, n_heads, lsh):
    options = dict(
        causal=draw.random() < 0.5,
        masked=draw.random() < 0.4,
        bias=draw.random() < 0.3,
        attention_dropout=draw.choice([0, 0.3]),
        output_dropout=draw.choice([0, 0.3]),
    )
    examples = [n_heads * d for d in divisors(batch)]
    options["n_parallel_heads"] = draw.choice([*divisors(n_heads), *examples, None])
    if lsh or draw.random() < 0.6:
        options["chunk_len"] = draw.randint(1, 4)
        options["n_chunks_before"] = draw.randint(0, 3)
        options["n_chunks_after"] = draw.randint(0, 2)
    if lsh:
        options["n_hashes"] = draw.randint(1, 3)
        options["n_buckets"] = draw.choice([2, 4, [2, 2]])
    else:
        options["share_qk"] = draw.random() < 0.3
    return options


@pytest.mark.parametrize("case", range(60))
def test_random_configurations(case):
    draw = random.Random(case)
    lsh = case % 2 == 0
    batch, n_heads, length = draw.randint(1, 3), draw.randint(1, 3), draw.randint(1, 9)
    options = draw_options(draw, batch, n_heads, lsh)
    kind = LSHSelfAttention if lsh else SelfAttention
    sizes = dict(d_model=5, n_heads=n_heads, d_qk=3, d_v=2, dtype=torch.float64)
    layer = randomise(kind(**sizes, **options))
    reference = kind(**sizes, **options, use_reference_code=True)
    reference.load_state_dict(layer.state_dict())
    inputs = [torch.randn(batch, length, 5, dtype=torch.float64)]
    if options["masked"]:
        inputs.append(torch.rand(batch, length) < 0.6)
    ask = dict(rng=case, output_grad=torch.randn_like(inputs[0]))
    got = layer.forward_and_or_backward(tuple(inputs), **ask)
    want = reference.forward_and_or_backward(tuple(inputs), **ask)
    assert_same_result(got, want, 1e-11)
    how = oracle.options(options, rng=case)
    x, *mask = (item.numpy() for item in inputs)
    weights = numpy_weights(layer)
    if lsh:
        y = oracle.lsh_attention(x, weights, got[1].numpy(), how, *mask)
    else:
        y = oracle.self_attention(x, weights, how, *mask)
    torch.testing.assert_close(got[0], torch.from_numpy(y), rtol=1e-11, atol=1e-11)
