# SPDX-License-Identifier: Apache-2.0
"""Every algorithm over the loopback transport, against the oracle and each other."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers.adasum_leaves import CLASSES, make_leaves, seeds
from helpers.adasum_loopback import (
    ALGORITHMS,
    EXACT,
    MIB,
    TILE,
    assert_near_oracle,
    bits,
    layers_of,
    layouts,
    possible,
    simulate,
)
from helpers.adasum_pure import DTYPES, as_rows, combine
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import adasum_oracle

dtypes = st.sampled_from(DTYPES)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def examples(count: int) -> settings:
    """Return the same examples in every run, without a limit of their time."""
    return settings(max_examples=count, deadline=None, derandomize=True, database=None)


def leaves(p: int, sizes: list[int], dtype=torch.float32, seed: int = 0):
    return make_leaves("correlated", p, sum(sizes), dtype, seed)


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@examples(6)
@given(p=st.integers(1, 8), sizes=layouts(), dtype=dtypes, seed=seeds())
def test_every_algorithm_equals_the_oracle(algorithm, kind, p, sizes, dtype, seed):
    if algorithm in possible(p):
        kind = kind if sum(sizes) else "random"
        stack = make_leaves(kind, p, sum(sizes), dtype, seed)
        result = simulate(stack, sizes, algorithm)
        assert_near_oracle(stack, result, sizes, algorithm)


@examples(30)
@given(
    p=st.integers(1, 8),
    sizes=layouts(),
    dtype=dtypes,
    seed=seeds(),
    mode=st.sampled_from(["tree", "psum", "mean", "sum"]),
)
def test_owners_layouts_and_windows_do_not_change_bits(p, sizes, dtype, seed, mode):
    stack = leaves(p, sizes, dtype, seed)
    whole = combine(stack, sizes, mode=mode)
    for algorithm in possible(p, EXACT):
        for scratch in (MIB, 64 * MIB):
            result = simulate(stack, sizes, algorithm, mode, scratch_bytes=scratch)
            assert torch.equal(bits(result), bits(whole)), algorithm
    alone = [simulate(s, [s.shape[1]], "gram", mode) for s in layers_of(stack, sizes)]
    if alone:
        assert torch.equal(bits(torch.cat(alone)), bits(whole))


@pytest.mark.parametrize("p", [16, 32, 64])
@pytest.mark.parametrize("sizes", [[3], [TILE, 0, 5, 2 * TILE + 1], [1] * 5])
def test_many_ranks(p, sizes):
    stack = leaves(p, sizes)
    exact = combine(stack, sizes)
    for algorithm in possible(p):
        result = simulate(stack, sizes, algorithm)
        assert_near_oracle(
            stack, result, sizes, "two_level" if algorithm == "auto" else algorithm
        )
        if algorithm in EXACT:
            assert torch.equal(result, exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_layers_larger_than_the_scratch_memory_are_exchanged_twice(p, dtype):
    sizes = [2_000_000 // p * 2, 3, 0, 500_000, 1]
    stack = leaves(p, sizes, dtype)
    exact = combine(stack, sizes)
    for algorithm in possible(p, ALGORITHMS[1:]):
        result = simulate(stack, sizes, algorithm, scratch_bytes=MIB)
        if algorithm in EXACT:
            assert torch.equal(result, exact), algorithm
        else:
            wide = simulate(stack, sizes, algorithm)
            eps = torch.finfo(dtype).eps
            assert torch.allclose(result.double(), wide.double(), 16 * eps, 16 * eps)


def test_what_is_dropped_travels_again_and_nothing_else_does():
    outcome = torch.ops.torch_sm3._adasum_loopback
    sizes = [40 * TILE]
    stack = leaves(2, sizes)
    bytes_sent = {}
    for scratch in (MIB, 64 * MIB):
        traffic = outcome(stack, sizes, "tree", "gram", scratch_bytes=scratch)[-1]
        bytes_sent[scratch] = traffic[1]
    half, inner_products = 20 * TILE * 4, 20 * 3 * 8
    assert bytes_sent[64 * MIB] == 2 * half + inner_products
    assert 2 * half < bytes_sent[MIB] < 3 * half + inner_products


@pytest.mark.parametrize("p", [2, 3, 4])
@pytest.mark.parametrize("scratch", [MIB, 64 * MIB])
@pytest.mark.parametrize("power", [300, -300, 290, -290])
def test_float64_of_extreme_size(p, scratch, power):
    sizes = [3 * TILE, 3, 0, 7]
    plain = leaves(p, sizes, torch.float64)
    stack = plain.clone()
    # The last layer stays in range and must not change by a bit.
    factor = 2.0 ** round(power * math.log2(10))
    stack[:, :-7] *= factor
    exact = combine(plain, sizes)
    for algorithm in possible(p, ALGORITHMS[1:]):
        result = simulate(stack, sizes, algorithm, scratch_bytes=scratch)
        norm = exact[:-7].norm()
        assert (result[:-7] / factor - exact[:-7]).norm() <= 1e-14 * norm
        if algorithm in EXACT:
            assert torch.equal(result[-7:], exact[-7:])


@pytest.mark.parametrize("p", [2, 3, 4])
def test_adasum_row_28_ranks_of_unlike_size_are_summed_in_one_unit(p):
    direction = torch.randn(2 * TILE + 5, dtype=torch.float64)
    factors = torch.tensor([1e-290, 1e290, -1.0, 1e150], dtype=torch.float64)[:p]
    stack = factors[:, None] * direction
    mean = (factors / p).sum() * direction
    for algorithm in possible(p, ALGORITHMS[1:]):
        result = simulate(stack, [direction.numel()], algorithm)
        torch.testing.assert_close(result, mean, rtol=1e-12, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_bad_element_spoils_its_layer_only(dtype, bad):
    sizes = [TILE + 3, 5, 2 * TILE]
    for p in (2, 3, 4):
        stack = leaves(p, sizes, dtype)
        clean = {a: simulate(stack, sizes, a) for a in possible(p)}
        stack[p - 1, TILE + 4] = bad
        for algorithm in possible(p):
            result = simulate(stack, sizes, algorithm)
            first, second, third = layers_of(result, sizes)
            assert second.isnan().all(), algorithm
            want = layers_of(clean[algorithm], sizes)
            assert torch.equal(first, want[0])
            assert torch.equal(third, want[2])


@pytest.mark.parametrize("algorithm", ALGORITHMS[1:])
def test_no_sum_is_formed_in_sixteen_bits(algorithm):
    for p in (2, 4, 8):
        if algorithm in possible(p):
            same = torch.full((p, 20), 6e4, dtype=torch.float16)
            assert torch.equal(simulate(same, [20], algorithm), same[0])
            apart = torch.zeros(p, p, dtype=torch.float16)
            apart.fill_diagonal_(6e4)
            want = torch.full((p,), 6e4, dtype=torch.float16)
            assert torch.equal(simulate(apart, [p], algorithm), want)


@pytest.mark.parametrize(
    ("p", "node_size"),
    [(4, 1), (4, 2), (6, 2), (6, 3), (8, 2), (8, 4), (4, 4), (3, 5), (5, 2), (7, 3)],
)
@pytest.mark.parametrize("inner", ["mean", "adasum"])
@pytest.mark.parametrize("scratch", [MIB, 64 * MIB])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_nodes_equal_the_oracle(p, node_size, inner, scratch, dtype):
    sizes = [5 * TILE + 3, 3, 0, 2 * TILE, 1]
    stack = leaves(p, sizes, dtype)
    nodes = [min(node_size, p - i) for i in range(0, p, node_size)]
    for mode in ("tree",) if inner == "adasum" else ("tree", "psum"):
        for algorithm in ("auto", "gather", "gram"):
            result = simulate(
                stack,
                sizes,
                algorithm,
                mode,
                node_size=node_size,
                inner=inner,
                scratch_bytes=scratch,
            )
            assert_near_oracle(
                stack, result, sizes, "nodes", mode, nodes=nodes, inner=inner
            )


def test_algorithms_across_nodes_have_equal_bits():
    sizes = [5 * TILE + 3, 3, 0, 2 * TILE, 1]
    stack = leaves(6, sizes)
    for node_size, names in ((3, EXACT), (2, EXACT[1:])):
        results = [simulate(stack, sizes, a, node_size=node_size) for a in names]
        assert all(torch.equal(results[0], result) for result in results)


def test_leaves_that_cancel_inside_a_node_are_absent():
    rows = torch.randn(6, 1000, generator=torch.Generator().manual_seed(1))
    rows[2] = -rows[0] - rows[1]
    result = simulate(rows.double(), [1000], "gram", node_size=3)
    want = rows[3:].double().mean(0)
    assert torch.allclose(result, want, 1e-12, 1e-12)


@pytest.mark.parametrize("p", [2, 3, 4])
@pytest.mark.parametrize("shards", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shards_equal_the_unsplit_layer(p, shards, dtype):
    sizes = [2 * TILE + 5, 0, 9]
    full = [leaves(p, [shards * size], dtype, seed) for seed, size in enumerate(sizes)]
    parts = [
        torch.cat([layer.chunk(shards, 1)[s] for layer in full], 1)
        for s in range(shards)
    ]
    op = torch.ops.torch_sm3._adasum_loopback
    for algorithm in possible(p):
        rows = op(torch.cat(parts), sizes, "tree", algorithm, shards=shards)[0]
        for shard in range(shards):
            group = rows[shard * p : (shard + 1) * p]
            assert (bits(group) == bits(group[:1])).all()
        for number, layer in enumerate(full):
            pieces = [layers_of(rows[s * p], sizes)[number] for s in range(shards)]
            got = torch.cat(pieces)
            assert_near_oracle(layer, got, [layer.shape[1]], algorithm)


@examples(20)
@given(p=st.integers(2, 8), sizes=layouts(), dtype=dtypes, seed=seeds(), data=st.data())
def test_excluded_layers_get_the_mean(p, sizes, dtype, seed, data):
    stack = leaves(p, sizes, dtype, seed)
    flag = st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes))
    means = data.draw(flag)
    stack[data.draw(st.integers(0, p - 1))] = 0  # counts in the mean
    for algorithm in possible(p):
        result = simulate(stack, sizes, algorithm, means=means, scale=0.5)
        parts = zip(
            layers_of(stack, sizes), layers_of(result, sizes), means, strict=True
        )
        for rows, found, excluded in parts:
            mode = "mean" if excluded else "tree"
            assert_near_oracle(rows, found, [rows.shape[1]], algorithm, mode, scale=0.5)


@examples(20)
@given(p=st.integers(2, 8), sizes=layouts(), dtype=dtypes, seed=seeds())
def test_given_weights(p, sizes, dtype, seed):
    stack = leaves(p, sizes, dtype, seed)
    weights = [1.0 + 3 * rank for rank in range(p)]
    for algorithm in possible(p):
        result = simulate(stack, sizes, algorithm, weights=weights)
        assert_near_oracle(stack, result, sizes, algorithm, weights=weights)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_zero_leaves_are_absent(algorithm):
    sizes = [TILE + 1, 4]
    for p in (2, 4, 8):
        if algorithm in possible(p):
            stack = leaves(p, sizes)
            stack[0] = 0
            stack[p // 2, : sizes[0]] = 0
            result = simulate(stack, sizes, algorithm)
            assert_near_oracle(stack, result, sizes, algorithm)
            nothing = simulate(torch.zeros(p, 9), [9], algorithm)
            assert torch.equal(bits(nothing), torch.zeros(9, dtype=torch.int32))


@pytest.mark.parametrize("power", [0, 25, -25])
def test_float32_accumulation(power):
    sizes = [3 * TILE, 5]
    for p in (2, 3, 4):
        stack = leaves(p, sizes) * 10.0**power
        exact = simulate(stack, sizes, "gram")
        results = [simulate(stack, sizes, a, accumulate="float32") for a in possible(p)]
        for result in results:
            assert (result - exact).double().norm() <= 2e-6 * exact.double().norm()


def test_one_rank_keeps_its_bits():
    stack = torch.tensor([[1.0, -0.0, math.nan, math.inf, 1e-45]])
    assert torch.equal(bits(simulate(stack, [2, 3])), bits(stack[0]))
    assert torch.equal(simulate(stack[:, :2], [2], scale=3.0), 3 * stack[0, :2])


def test_outcome_is_that_of_the_pure_operators():
    sizes = [TILE + 5, 0, 7]
    stack = leaves(4, sizes)
    outcome = torch.ops.torch_sm3._adasum_loopback
    gram = torch.ops.torch_sm3.adasum_gram(stack, sizes)
    c = torch.ops.torch_sm3.adasum_coefficients(gram)
    for algorithm in ("gather", "gram"):
        result = outcome(stack, sizes, "tree", algorithm)
        assert torch.equal(result[1], gram)
        assert torch.equal(result[2], c)
        kappas = [
            adasum_oracle.combine(as_rows(rows)).kappa
            for rows in layers_of(stack, sizes)
        ]
        assert np.allclose(result[3][:, 0], kappas, 1e-9)
    cosines = outcome(stack, sizes, "tree", "vhdd")[4]
    assert cosines.shape == (2, 3)
    first = torch.nn.functional.cosine_similarity(
        stack[0, : sizes[0]].double(), stack[1, : sizes[0]].double(), 0
    )
    assert torch.allclose(cosines[0, 0], first)
