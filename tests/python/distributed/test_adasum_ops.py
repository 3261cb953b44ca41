# SPDX-License-Identifier: Apache-2.0
"""The pure operators of Adasum on zero, tiny, huge and non-finite leaves."""

import math

import numpy as np
import pytest
import torch
from helpers.adasum_leaves import make_leaves
from helpers.adasum_pure import (
    DTYPES,
    WORLDS,
    as_rows,
    assert_near_oracle,
    coefficients,
    combine,
)
from reference import adasum_oracle

from torch_sm3 import _ops

SIZES = [3, 40000, 0, 1, 20001]


@pytest.fixture
def flush_denormal():
    if not torch.set_flush_denormal(True):
        pytest.skip("the processor cannot flush subnormals")
    yield
    torch.set_flush_denormal(False)


@pytest.mark.parametrize("p", WORLDS)
def test_layers_are_combined_on_their_own(p):
    stack = torch.randn(p, sum(SIZES))
    result = combine(stack, SIZES)
    for part, own in zip(stack.split(SIZES, 1), result.split(SIZES), strict=True):
        assert torch.equal(own, combine(part.contiguous()))
        assert_near_oracle(part, own)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [3, 5, 6, 7])
def test_adasum_row_1_world_size_that_is_no_power_of_two(p, dtype):
    stack = make_leaves("correlated", p, 2000, dtype, p)
    assert_near_oracle(stack, combine(stack))
    # The shape of the tree: what a reader computes by hand with pairs of given weight.
    left = combine(stack[: 2 if p == 3 else 4].double())
    right = combine(stack[2 if p == 3 else 4 :].double())
    k = float(2 if p == 3 else 4)
    by_hand = _ops.adasum_pair(left, right, [2000], weight_a=k, weight_b=p - k)
    error = (combine(stack.double()) - by_hand).norm() / by_hand.norm()
    assert error <= 1e-14


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [1, 2, 4, 8])
def test_adasum_row_15_identical_leaves_give_the_leaf(p, dtype):
    leaf = torch.randn(5000, dtype=torch.float64).to(dtype)
    result = combine(leaf.repeat(p, 1))
    if dtype == torch.float64 and p > 4:
        torch.testing.assert_close(result, leaf, rtol=p * 2.0**-52, atol=0)
    else:
        assert torch.equal(result, leaf)


def test_adasum_row_12_no_sum_is_formed_in_float16():
    leaf = torch.full((100,), 6e4, dtype=torch.float16)
    assert torch.equal(combine(leaf.repeat(4, 1)), leaf)


@pytest.mark.parametrize("mode", ["tree", "psum"])
@pytest.mark.parametrize("size", [1e-16, 1e-18, 1e20])
def test_adasum_row_26_no_epsilon_and_no_float32_dots(size, mode):
    leaf = torch.full((16,), size)
    assert torch.equal(combine(leaf.repeat(4, 1), mode=mode), leaf)


@pytest.mark.parametrize("mode", ["tree", "psum"])
def test_adasum_row_25_zero_leaf_is_absent(mode):
    leaf = torch.randn(100)
    stack = torch.stack([leaf, torch.zeros(100), 3 * leaf])
    result = combine(stack, mode=mode)
    torch.testing.assert_close(result, 2 * leaf)
    assert torch.equal(combine(stack[:, :0], mode=mode), torch.empty(0))
    nothing = combine(torch.zeros(3, 100), mode=mode)
    assert torch.equal(nothing, torch.zeros(100)) and not nothing.signbit().any()
    # Minus zero is zero as well.
    assert not combine(torch.full((3, 4), -0.0), mode=mode).signbit().any()


def test_mean_divides_by_all_ranks():
    stack = torch.randn(4, 50)
    stack[2] = 0
    torch.testing.assert_close(combine(stack, mode="mean"), stack.mean(0))
    torch.testing.assert_close(combine(stack, mode="sum"), stack.sum(0))
    weighted = combine(stack, mode="mean", weights=[1.0, 2.0, 5.0, 0.0])
    torch.testing.assert_close(weighted, (stack[0] + 2 * stack[1]) / 8)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [2, 3, 4])
def test_one_bad_element_spoils_its_layer_and_no_other(p, dtype, bad):
    stack = torch.randn(p, 60).to(dtype)
    clean = combine(stack, [20, 20, 20])
    stack[p - 1, 25] = bad
    result = combine(stack, [20, 20, 20])
    assert result[20:40].isnan().all()
    assert torch.equal(result[:20], clean[:20])
    assert torch.equal(result[40:], clean[40:])
    # Also where the leaf of the bad element or all others are absent.
    weights = [1.0] * (p - 1) + [0.0]
    assert combine(stack, [20, 20, 20], weights=weights)[20:40].isnan().all()
    if p == 2:
        assert _ops.adasum_pair(stack[0], stack[1], [20] * 3)[20:40].isnan().all()


def test_mean_and_sum_treat_each_element_on_its_own():
    stack = torch.randn(3, 40)
    stack[1, 7] = math.nan
    stack[0, 9], stack[1, 9] = math.inf, -math.inf
    stack[2, 11] = -math.inf
    for mode, factor in [("mean", 3.0), ("sum", 1.0)]:
        result = combine(stack, mode=mode)
        want = stack.double().sum(0) / factor
        torch.testing.assert_close(result, want.float(), equal_nan=True)
        assert result.isnan().sum() == 2 and result.isinf().sum() == 1


@pytest.mark.parametrize("mode", ["tree", "psum", "mean", "sum"])
def test_one_rank_keeps_every_bit(mode):
    leaf = torch.tensor([[-0.0, 1.5, math.inf, math.nan, 1e-42]])
    leaf.view(torch.int32)[0, 3] = 0x7FA12345
    result = combine(leaf, mode=mode)
    assert torch.equal(result.view(torch.int32), leaf[0].view(torch.int32))
    zero = torch.full((1, 3), -0.0)
    assert combine(zero, mode=mode).signbit().all()
    assert torch.equal(
        combine(leaf[:, :2], mode=mode, scale=2.0), torch.tensor([-0.0, 3.0])
    )


@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [
        (torch.float32, -120, 120),
        (torch.float64, -430, 430),
        (torch.bfloat16, -120, 120),
        (torch.float16, -10, 10),
    ],
)
def test_norms_of_very_different_size(dtype, low, high):
    leaf = torch.randint(-8, 9, (64,), dtype=torch.float64) / 8
    for powers in ([low, high], [high, low, 0], [low, 0, high, low + 3, high - 3]):
        p = len(powers)
        factors = torch.tensor([2.0**power for power in powers], dtype=torch.float64)
        parallel = (factors[:, None] * leaf).to(dtype)
        want = parallel.double().mean(0)
        noise = 8 * p * 2.0**-52
        torch.testing.assert_close(
            combine(parallel).double(),
            want,
            rtol=torch.finfo(dtype).eps + noise,
            atol=float(want.abs().max()) * noise,
        )
        # A small leaf's coefficient is blurred by the large ones, so the error is
        # small against the whole vector and not against each element.
        other = (factors[:, None] * torch.randn(p, 64)).to(dtype)
        vector = adasum_oracle.combine(as_rows(other)).vector
        error = np.sqrt(((as_rows(combine(other)) - vector) ** 2).sum())
        assert error <= (torch.finfo(dtype).eps + noise) * np.sqrt(vector @ vector)


@pytest.mark.parametrize("dtype", DTYPES)
def test_subnormals_are_numbers(dtype):
    kind = torch.finfo(dtype)
    step = np.longdouble(kind.smallest_normal) * kind.eps
    whole = torch.randint(-50, 50, (2, 100)).double()
    stack = (whole * float(step)).to(dtype)
    assert stack.any()
    if dtype == torch.float64:
        result = _ops.adasum_pair(stack[0], stack[1], [100])
    else:
        result = combine(stack)
    assert_near_oracle(stack, result)


def test_flushed_subnormals_are_zeros(flush_denormal):
    normal = torch.randn(100)
    tiny = torch.full((100,), 1).int().view(torch.float32)
    stack = torch.stack([tiny, normal])
    assert torch.equal(combine(stack), normal)
    assert torch.equal(combine(stack.flip(0)), normal)


@pytest.mark.parametrize("dtype", DTYPES)
def test_elements_that_do_not_fit_are_infinite_and_the_others_are_not(dtype):
    largest = torch.finfo(dtype).max
    stack = torch.zeros(2, 4, dtype=dtype)
    stack[0, 0] = stack[0, 1] = stack[1, 0] = largest
    stack[1, 1] = -largest
    stack[0, 2] = largest / 4
    # The two are orthogonal, so their sum is wanted.
    result = _ops.adasum_pair(stack[0], stack[1], [4])
    assert result[0].isposinf() and result[1:].isfinite().all() and result[3] == 0


@pytest.mark.parametrize("power", [-300, -290, -160, 160, 290, 300])
def test_float64_pairs_beyond_the_range_of_squares(power):
    for kind in ("random", "correlated", "nearly_opposite", "opposite"):
        stack = make_leaves(kind, 2, 50, torch.float64, 5)
        stack = stack / stack.abs().max() * 10.0**power / 8
        result = _ops.adasum_pair(stack[0], stack[1], [50])
        assert_near_oracle(stack, result)
        assert result.isfinite().all() and result.any() == (kind != "opposite")
    leaf = stack[0]
    assert torch.equal(_ops.adasum_pair(leaf, leaf, [50]), leaf)
    assert torch.equal(_ops.adasum_pair(leaf, 0 * leaf, [50]), leaf)


def test_float64_pairs_of_very_different_norms():
    for low, high in [(-300, 300), (300, -300), (-290, 0), (0, 300)]:
        a, b = torch.randn(2, 40, dtype=torch.float64)
        apart = torch.cat([a, 0 * a]) * 10.0**low, torch.cat([0 * b, b]) * 10.0**high
        assert torch.equal(_ops.adasum_pair(*apart, [80]), apart[0] + apart[1])
        parallel = _ops.adasum_pair(a * 10.0**low, a * 10.0**high, [40])
        mean = a * 10.0**low / 2 + a * 10.0**high / 2
        torch.testing.assert_close(parallel, mean, rtol=1e-14, atol=0)


def test_layers_that_need_no_second_pass_keep_their_bits():
    a, b = torch.randn(2, 60, dtype=torch.float64)
    want = _ops.adasum_pair(a, b, [20, 20, 20])
    for power, bad in [(1e-250, 1.0), (1e250, 1.0), (1.0, math.nan)]:
        x, y = a.clone(), b.clone()
        x[20:40] *= power
        y[30] *= bad
        result = _ops.adasum_pair(x, y, [20, 20, 20])
        assert torch.equal(result[:20], want[:20])
        assert torch.equal(result[40:], want[40:])
        assert result[20:40].isnan().all() == math.isnan(bad)


def test_cancelled_leaves_are_absent():
    a, b = torch.randn(2, 50)
    assert torch.equal(combine(torch.stack([a, -a])), torch.zeros(50))
    assert torch.equal(combine(torch.stack([a, -a, a])), a)
    torch.testing.assert_close(combine(torch.stack([a, -a, b, b])), b)
    # The same inside and between nodes.
    for inner in ("mean", "adasum"):
        one = combine(torch.stack([a, -a, b, b]), nodes=[2, 2], inner=inner)
        torch.testing.assert_close(one, b)
    third = torch.stack([a, b, -(a + b), 2 * a]).double()
    third[2] = -(third[0] + third[1])
    c = coefficients(third, nodes=[3, 1])
    assert torch.equal(c, torch.tensor([0, 0, 0, 1.0]).double())
    assert torch.equal(coefficients(third, mode="psum", nodes=[3, 1]), c)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pair_has_the_bits_of_two_ranks_and_takes_weights(dtype):
    a, b = torch.randn(2, 30, 7).to(dtype)
    sizes = [10, 200]
    stack = torch.stack([a.flatten(), b.flatten()])
    result = _ops.adasum_pair(a, b, sizes)
    assert result.shape == a.shape
    assert torch.equal(result.flatten(), combine(stack, sizes))
    strided = _ops.adasum_pair(a.t(), b.t(), [210])
    flat = _ops.adasum_pair(a.t().reshape(-1), b.t().reshape(-1), [210])
    assert torch.equal(strided.flatten(), flat)
    weighted = _ops.adasum_pair(a, b, [210], weight_a=3.0, weight_b=1.0)
    assert_near_oracle(stack, weighted.flatten(), weights=[3.0, 1.0])
    assert torch.equal(_ops.adasum_pair(a, b, [210], weight_b=0.0), a)


def test_gram_is_that_of_float64():
    stack = torch.randn(3, sum(SIZES))
    gram = _ops.adasum_gram(stack, SIZES)
    assert torch.equal(gram, gram.transpose(1, 2))
    for layer, part in zip(gram, stack.double().split(SIZES, dim=1), strict=True):
        torch.testing.assert_close(layer, part @ part.t(), rtol=1e-12, atol=1e-11)
