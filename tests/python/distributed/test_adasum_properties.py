# SPDX-License-Identifier: Apache-2.0
"""What holds of the combination for any leaves, by the pure operators."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers.adasum_leaves import CLASSES, examples, make_leaves, seeds, sizes
from helpers.adasum_pure import (
    DTYPES,
    ETA,
    as_rows,
    assert_near_oracle,
    bound_of,
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
MODES = ["tree", "psum", "mean", "sum"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", CLASSES)
@examples(25)
@given(p=worlds, size=sizes(), dtype=dtypes, seed=seeds())
def test_every_class_of_leaves_equals_the_oracle(kind, mode, p, size, dtype, seed):
    stack = make_leaves(kind, p, size, dtype, seed)
    assert_near_oracle(stack, combine(stack, mode=mode), mode)


@pytest.mark.parametrize("p", [16, 33, 64])
@examples(4)
@given(kind=st.sampled_from(CLASSES), size=sizes(), seed=seeds())
def test_many_ranks_equal_the_oracle(p, kind, size, seed):
    stack = make_leaves(kind, p, size, torch.float32, seed)
    for mode in MODES:
        assert_near_oracle(stack, combine(stack, mode=mode), mode)


@examples(40)
@given(p=worlds, size=st.integers(2, 40), seed=seeds(), power=st.integers(-12, -3))
def test_what_float64_sums_cannot_resolve_is_absent(p, size, seed, power):
    draw = np.random.default_rng(seed)
    leaf, noise = draw.normal(size=(2, size))
    rest = draw.normal(size=(p - 1, size))
    left = -leaf + 10.0**power * noise
    stack = torch.from_numpy(np.stack([leaf, left, *rest]))
    result = combine(stack)
    if power <= -9:
        assert torch.equal(result, combine(torch.where(first_two(p + 1), 0, stack)))
    elif power >= -6:
        want = assert_near_oracle(stack, result)
        assert want.kappa > 10.0 ** (-power - 1)


def first_two(p: int) -> torch.Tensor:
    return (torch.arange(p) < 2)[:, None]


@examples(60)
@given(p=several, size=sizes(), dtype=dtypes, seed=seeds(), data=st.data())
def test_one_non_finite_element_spoils_its_layer_on_all_ranks(
    p, size, dtype, seed, data
):
    stack = make_leaves("correlated", p, size, dtype, seed)
    rank = data.draw(st.integers(0, p - 1))
    element = data.draw(st.integers(0, size - 1))
    stack[rank, element] = data.draw(st.sampled_from([math.nan, math.inf, -math.inf]))
    for mode in ("tree", "psum"):
        assert combine(stack, mode=mode).isnan().all()
    for mode in ("mean", "sum"):
        bad = ~combine(stack, mode=mode).isfinite()
        assert bad[element] and bad.sum() == 1


@examples(80)
@given(p=worlds, dtype=dtypes, seed=seeds(), data=st.data())
def test_orthogonal_leaves_are_added(p, dtype, seed, data):
    support = data.draw(st.integers(1, 9))
    dense = make_leaves("random", p, support, dtype, seed)
    powers = data.draw(st.lists(st.integers(-3, 3), min_size=p, max_size=p))
    stack = torch.zeros(p, p * support, dtype=dtype)
    for i, power in enumerate(powers):
        stack[i, i::p] = dense[i] * 2.0**power
    assert torch.equal(combine(stack), stack.sum(0))


@examples(150)
@given(p=worlds, dtype=dtypes, seed=seeds(), data=st.data())
def test_parallel_leaves_are_averaged_over_the_active_ones(p, dtype, seed, data):
    # Small integers: the leaves are parallel to the last bit.
    generator = torch.Generator().manual_seed(seed)
    leaf = torch.randint(-8, 9, (data.draw(sizes()),), generator=generator).double()
    factor = st.integers(-6, 6)
    factors = data.draw(st.lists(factor, min_size=p, max_size=p))
    powers = data.draw(st.lists(st.integers(-2, 2), min_size=p, max_size=p))
    sizes_of = torch.tensor([f * 2.0**k for f, k in zip(factors, powers, strict=True)])
    stack = (sizes_of.double()[:, None] * leaf).to(dtype)
    want = adasum_oracle.combine(as_rows(stack))
    if want.cancelled:
        return
    active = stack[stack.any(dim=1)]
    mean = as_rows(stack).sum(axis=0) / max(len(active), 1)
    error = np.abs(as_rows(combine(stack)) - mean)
    assert (error <= bound_of(want, stack, dtype)).all()


@examples(80)
@given(p=worlds, size=sizes(), dtype=dtypes, seed=seeds())
def test_identical_leaves_give_the_leaf(p, size, dtype, seed):
    leaf = make_leaves("random", 1, size, dtype, seed)[0]
    result = combine(leaf.repeat(p, 1))
    power_of_two = p & (p - 1) == 0
    if power_of_two and (dtype != torch.float64 or p <= 4):
        assert torch.equal(result, leaf)
        return
    ulps = p if dtype == torch.float64 else 1
    below = torch.nextafter(leaf.abs(), torch.zeros_like(leaf))
    above = torch.nextafter(leaf.abs(), torch.full_like(leaf, math.inf))
    ulp = torch.maximum(above.double() - leaf.abs(), leaf.abs() - below.double())
    assert ((result.double() - leaf.double()).abs() <= ulps * ulp).all()


@pytest.mark.parametrize("mode", ["tree", "psum"])
@examples(40)
@given(p=worlds, size=sizes(), dtype=dtypes, seed=seeds(), more=st.integers(1, 9))
def test_inactive_ranks_behind_the_active_ones_change_no_bit(
    mode, p, size, dtype, seed, more
):
    stack = make_leaves("correlated", p, size, dtype, seed)
    zeros = torch.zeros(more, size, dtype=dtype)
    want = combine(stack, mode=mode)
    assert torch.equal(combine(torch.cat([stack, zeros]), mode=mode), want)
    garbage = make_leaves("random", more, size, dtype, seed + 1)
    weights = [1.0] * p + [0.0] * more
    absent = combine(torch.cat([stack, garbage]), mode=mode, weights=weights)
    assert torch.equal(absent, want)


@examples(60)
@given(size=sizes(), dtype=dtypes, seed=seeds(), mask=st.integers(1, 15))
def test_inactive_ranks_anywhere_give_the_bits_of_the_pruned_tree(
    size, dtype, seed, mask
):
    stack = make_leaves("correlated", 4, size, dtype, seed)
    active = [bool(mask >> i & 1) for i in range(4)]
    pruned = torch.where(torch.tensor(active)[:, None], stack, 0)
    # Of four ranks the pruned tree is that of two nodes of the ranks that are left.
    nodes = [count for count in (sum(active[:2]), sum(active[2:])) if count]
    left = stack[torch.tensor(active)]
    want = combine(left, nodes=nodes, inner="adasum")
    assert torch.equal(combine(pruned), want)


@examples(60)
@given(p=worlds, size=sizes(), dtype=dtypes, seed=seeds(), data=st.data())
def test_inactive_ranks_between_the_active_ones(p, size, dtype, seed, data):
    stack = make_leaves("correlated", p, size, dtype, seed)
    # Each next to an inactive one: the next level is the tree of the active ones.
    doubled = torch.zeros(2 * p, size, dtype=dtype)
    doubled[data.draw(st.integers(0, 1)) :: 2] = stack
    assert torch.equal(combine(doubled), combine(stack))
    places = data.draw(st.permutations(range(2 * p)))[:p]
    spread = torch.zeros(2 * p, size, dtype=dtype)
    spread[torch.tensor(sorted(places))] = stack
    assert_near_oracle(spread, combine(spread))


@pytest.mark.parametrize("kind", CLASSES[:6])
@examples(20)
@given(p=worlds, size=sizes(), seed=seeds(), power=st.integers(-60, 60))
def test_powers_of_two_commute(kind, p, size, seed, power):
    stack = make_leaves(kind, p, size, torch.float32, seed)
    gram = _ops.adasum_gram(stack, [size])
    for mode in MODES:
        scaled = combine(stack * 2.0**power, mode=mode)
        assert torch.equal(scaled, combine(stack, mode=mode) * 2.0**power)
        c = _ops.adasum_coefficients(gram, mode)
        assert torch.equal(_ops.adasum_coefficients(gram * 2.0**power, mode), c)
        same = _ops.adasum_coefficients(gram, mode, scale=2.0**power)
        assert torch.equal(same, c * 2.0**power)


@pytest.mark.parametrize("kind", [k for k in CLASSES if k != "opposite"])
@examples(15)
@given(p=worlds, size=st.integers(2, 40), seed=seeds())
def test_isometries_commute(kind, p, size, seed):
    stack = make_leaves(kind, p, size, torch.float64, seed)
    draw = np.random.default_rng(seed)
    isometry = torch.from_numpy(np.linalg.qr(draw.normal(size=(size, size)))[0])
    turned = combine(stack @ isometry.T)
    want = isometry @ combine(stack)
    # Both sides have their noise. The turned leaves are rounded besides, and what
    # a leaf is off by is amplified like what an inner product is off by.
    noise = noise_of(stack)
    rounded = (size + 8) * ETA * stack.norm(dim=1).sum()
    limit = (2 + size / (8 * p)) * noise + rounded
    assert (turned - want).norm() <= limit
    # Signs and the order of the elements are an isometry without any rounding.
    order = torch.from_numpy(draw.permutation(size))
    signs = torch.from_numpy(draw.choice([-1.0, 1.0], size))
    swapped = combine((stack * signs)[:, order])
    assert (swapped - (combine(stack) * signs)[order]).norm() <= 2 * noise


@pytest.mark.parametrize("kind", CLASSES)
@examples(25)
@given(size=sizes(), dtype=dtypes, seed=seeds())
def test_two_ranks_commute(kind, size, dtype, seed):
    stack = make_leaves(kind, 2, size, dtype, seed)
    result, swapped = combine(stack), combine(stack.flip(0))
    ulp = torch.finfo(dtype).eps * result.double().abs()
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert ((result.double() - swapped.double()).abs() <= ulp + smallest).all()


@pytest.mark.parametrize("kind", CLASSES)
@examples(25)
@given(size=sizes(), seed=seeds(), power=st.integers(-3, 3))
def test_the_result_of_two_ranks_points_along_their_sum(kind, size, seed, power):
    stack = make_leaves(kind, 2, size, torch.float64, seed)
    stack[1] *= 2.0**power
    result = combine(stack)
    a, b = as_rows(stack)
    aa, bb, ab = a @ a, b @ b, a @ b
    along = float(as_rows(result[None])[0] @ (a + b) / max(aa + bb, 1e-300))
    if aa == 0 or bb == 0:
        assert along == pytest.approx(1.0 if aa + bb else 0.0, abs=1e-12)
        return
    cosine = ab / np.sqrt(aa * bb)
    want = ((aa + bb) * (1 - cosine**2 / 2) + cosine * np.sqrt(aa * bb)) / (aa + bb)
    if adasum_oracle.combine(as_rows(stack)).cancelled:
        assert not result.any()
        want = np.longdouble(0)
        # Parallel leaves of one element cancel only if they are opposite.
        assert kind == "opposite" or size == 1
        if power:
            return
    assert along == pytest.approx(float(want), abs=1e-12)
    assert along >= 0


@pytest.mark.parametrize("kind", CLASSES[:4])
@examples(20)
@given(size=sizes(), seed=seeds())
def test_psum_of_two_ranks_is_the_tree(kind, size, seed):
    stack = make_leaves(kind, 2, size, torch.float64, seed)
    if adasum_oracle.combine(as_rows(stack)).cancelled:
        # The tree drops what psum adds up to nothing.
        assert combine(stack, mode="psum").abs().max() <= 1e-14 * stack.abs().max()
        return
    torch.testing.assert_close(
        coefficients(stack, mode="psum"), coefficients(stack), rtol=1e-14, atol=1e-14
    )


@pytest.mark.parametrize("mode", ["psum", "mean", "sum"])
@pytest.mark.parametrize("kind", ["random", "correlated", "half_zero"])
@examples(25)
@given(p=worlds, size=sizes(), seed=seeds(), data=st.data())
def test_modes_without_a_tree_do_not_depend_on_the_order(
    kind, mode, p, size, seed, data
):
    stack = make_leaves(kind, p, size, torch.float64, seed)
    order = torch.tensor(data.draw(st.permutations(range(p))))
    gram = _ops.adasum_gram(stack, [size])[0]
    moved = gram[order][:, order][None]
    c = coefficients(stack, mode=mode)
    largest = max(1.0, float(c.abs().max()))
    found = _ops.adasum_coefficients(moved, mode)[0]
    torch.testing.assert_close(found, c[order], rtol=0, atol=1e-14 * largest)


def test_coefficients_are_not_bounded_and_the_rule_is_not_linear():
    generator = torch.Generator().manual_seed(3)
    a, b = torch.randn(2, 50, generator=generator, dtype=torch.float64)
    for distance in (1e-2, 1e-3, 1e-4):
        near = coefficients(torch.stack([a, -a + distance * b]))
        assert (near - 1.5).abs().max() < 2 * distance
    assert not coefficients(torch.stack([a, -a])).any()
    # |b| x > 2 |a|: the smaller leaf is subtracted.
    assert coefficients(torch.stack([a, 3 * a]))[0] < 0
    assert coefficients(torch.stack([a, 1.9 * a]))[0] > 0
    both = combine(torch.stack([a + b, a]))
    parts = combine(torch.stack([a, a])) + combine(torch.stack([b, 0 * a]))
    assert (both - parts).norm() > 0.1 * both.norm()


def test_the_order_of_ranks_is_part_of_the_result():
    generator = torch.Generator().manual_seed(4)
    common = torch.randn(1000, generator=generator, dtype=torch.float64)
    own = torch.randn(8, 1000, generator=generator, dtype=torch.float64)
    order = torch.tensor([5, 2, 7, 0, 1, 6, 3, 4])
    for stack, low, high in [(common + own, 1e-4, 0.05), (own, 1e-3, 0.4)]:
        one, other = combine(stack), combine(stack[order])
        assert low < (one - other).norm() / one.norm() < high
