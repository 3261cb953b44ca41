# SPDX-License-Identifier: Apache-2.0
"""What holds of weights, nodes of several ranks and shards, for any leaves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.adasum_leaves import CLASSES, examples, make_leaves, seeds, sizes
from helpers.adasum_pure import (
    DTYPES,
    as_rows,
    assert_near_oracle,
    coefficients,
    combine,
    noise_of,
)
from hypothesis import given
from hypothesis import strategies as st
from reference import adasum_oracle

from torch_sm3 import _ops

worlds = st.integers(1, 8)
several = st.integers(2, 8)
dtypes = st.sampled_from(DTYPES)


@pytest.mark.parametrize("kind", CLASSES)
@examples(15)
@given(p=several, size=sizes(), dtype=dtypes, seed=seeds(), data=st.data())
def test_weighted_leaves_equal_the_oracle(kind, p, size, dtype, seed, data):
    weight = st.floats(0.125, 64.0)
    weights = data.draw(st.lists(weight, min_size=p, max_size=p))
    for mode in ("tree", "psum", "mean", "sum"):
        stack = make_leaves(kind, p, size, dtype, seed)
        result = combine(stack, mode=mode, weights=weights)
        assert_near_oracle(stack, result, mode, weights=weights)


@pytest.mark.parametrize("kind", CLASSES[:6])
@examples(20)
@given(p=several, size=sizes(), dtype=dtypes, seed=seeds(), data=st.data())
def test_hierarchies_that_are_plain(kind, p, size, dtype, seed, data):
    stack = make_leaves(kind, p, size, dtype, seed)
    s = data.draw(st.sampled_from([1, 2, 4, 8]))
    nodes = [min(s, p - first) for first in range(0, p, s)]
    flat = coefficients(stack)
    assert torch.equal(coefficients(stack, nodes=nodes, inner="adasum"), flat)
    for mode in ("tree", "psum"):
        alone = coefficients(stack, mode=mode, nodes=[1] * p)
        want = coefficients(stack, mode=mode)
        torch.testing.assert_close(alone, want, rtol=1e-14, atol=1e-14)
        whole = coefficients(stack, mode=mode, nodes=[p])
        mean = coefficients(stack, mode="mean")
        if adasum_oracle.combine(as_rows(stack), mode, nodes=[p]).cancelled:
            assert not whole.any()
        elif stack.any():
            torch.testing.assert_close(whole, mean, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("inner", ["mean", "adasum"])
@pytest.mark.parametrize("kind", ["random", "correlated", "half_zero", "opposite"])
@examples(25)
@given(p=several, size=sizes(), dtype=dtypes, seed=seeds(), data=st.data())
def test_hierarchies_equal_the_oracle(kind, inner, p, size, dtype, seed, data):
    stack = make_leaves(kind, p, size, dtype, seed)
    nodes, left = [], p
    while left:
        nodes.append(data.draw(st.integers(1, left)))
        left -= nodes[-1]
    weights = data.draw(
        st.one_of(
            st.none(), st.lists(st.integers(1, 5).map(float), min_size=p, max_size=p)
        )
    )
    options = {"nodes": nodes, "inner": inner, "weights": weights}
    for mode in ["tree"] if inner == "adasum" else ["tree", "psum", "mean", "sum"]:
        assert_near_oracle(stack, combine(stack, mode=mode, **options), mode, **options)


@pytest.mark.parametrize("mode", ["tree", "psum"])
@pytest.mark.parametrize("kind", CLASSES[:6])
@examples(15)
@given(
    p=worlds,
    sizes_of=st.lists(st.integers(0, 30), min_size=1, max_size=4),
    seed=seeds(),
)
def test_adasum_row_27_shards_of_a_layer_use_the_sum_of_their_inner_products(
    kind, mode, p, sizes_of, seed
):
    size = max(sum(sizes_of), 1)
    sizes_of = [*sizes_of[:-1], size - sum(sizes_of[:-1])]
    stack = make_leaves(kind, p, size, torch.float64, seed)
    parts = stack.split(sizes_of, dim=1)
    gram = sum(_ops.adasum_gram(x.contiguous(), [x.shape[1]]) for x in parts)
    c = _ops.adasum_coefficients(gram, mode)
    shards = [_ops.adasum_combine(x.contiguous(), c, [x.shape[1]]) for x in parts]
    together = torch.cat(shards)
    limit = 2 * noise_of(stack, mode)
    assert (together - combine(stack, mode=mode)).norm() <= limit
    cut = adasum_oracle.combine_shards([as_rows(x) for x in parts], mode)
    assert (
        np.linalg.norm((as_rows(together) - np.concatenate(cut)).astype("f8")) <= limit
    )
    # A parameter that every shard holds whole counts as often as there are shards.
    copies = torch.full((), float(len(parts)), dtype=torch.float64)
    own = _ops.adasum_gram(stack, [size])
    torch.testing.assert_close(
        _ops.adasum_coefficients(copies * own, mode),
        _ops.adasum_coefficients(own, mode),
        rtol=1e-13 * noise_scale(stack, mode),
        atol=1e-13 * noise_scale(stack, mode),
    )


def noise_scale(stack: torch.Tensor, mode: str) -> float:
    return adasum_oracle.combine(as_rows(stack), mode).kappa ** 2
