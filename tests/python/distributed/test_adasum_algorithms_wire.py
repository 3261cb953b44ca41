# SPDX-License-Identifier: Apache-2.0
"""What travels in 16 bits, and which algorithm is chosen."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.adasum_leaves import make_leaves
from helpers.adasum_loopback import (
    ALGORITHMS,
    EXACT,
    MIB,
    TILE,
    possible,
    simulate,
    wire_rows,
)
from helpers.adasum_pure import combine

SIZES = [3 * TILE + 3, 3, 0, 2 * TILE, 1]
WIRES = ["float16", "bfloat16"]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def leaves(p: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return make_leaves("correlated", p, sum(SIZES), dtype, p)


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_the_wire_rounds_leaves_and_result_and_nothing_else(p, wire, dtype, scale):
    stack = (leaves(p).double() * scale).to(dtype)
    rows = torch.from_numpy(wire_rows(stack.double().numpy(), SIZES, wire))
    gram = torch.ops.torch_sm3.adasum_gram(rows, SIZES)
    c = torch.ops.torch_sm3.adasum_coefficients(gram)
    sums = torch.ops.torch_sm3.adasum_combine(rows, c, SIZES)
    rounded = torch.from_numpy(wire_rows(sums[None].numpy(), SIZES, wire))[0]
    for algorithm in possible(p, EXACT):
        for scratch in (MIB, 64 * MIB):
            options = {"wire": wire, "scratch_bytes": scratch}
            coded = simulate(stack, SIZES, algorithm, **options)
            assert torch.equal(coded, rounded.to(dtype)), algorithm
            wide = simulate(stack, SIZES, algorithm, wide_result=True, **options)
            assert torch.equal(wide, sums.to(dtype)), algorithm


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("p", [2, 4, 8, 16])
def test_levels_over_the_wire(p, wire):
    stack = leaves(p)
    exact = combine(stack, SIZES).double()
    unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[wire]
    for algorithm in possible(p, ["two_level", "vhdd"]):
        for wide in (False, True):
            result = simulate(stack, SIZES, algorithm, wire=wire, wide_result=wide)
            assert (result.double() - exact).norm() <= 3 * unit * exact.norm()
    for nodes in (2, p // 2):
        if nodes > 1:
            result = simulate(stack, SIZES, "gram", wire=wire, node_size=nodes)
            want = simulate(stack, SIZES, "gram", node_size=nodes)
            assert (result - want).norm() <= 3 * unit * want.norm()


@pytest.mark.parametrize("wire", WIRES)
def test_what_is_not_wider_travels_as_it_is(wire):
    stack = leaves(4, torch.bfloat16)
    for algorithm in possible(4, ALGORITHMS[1:]):
        plain = simulate(stack, SIZES, algorithm)
        assert torch.equal(simulate(stack, SIZES, algorithm, wire=wire), plain)


def test_coded_messages_are_half_as_long():
    outcome = torch.ops.torch_sm3._adasum_loopback
    stack = leaves(2)
    plain = outcome(stack, SIZES, "tree", "gather")[-1][1]
    coded = outcome(stack, SIZES, "tree", "gather", wire="bfloat16")[-1][1]
    assert 2 * coded == plain == 4 * sum(SIZES)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_results_of_another_type(p, dtype):
    stack = leaves(p, dtype)
    wide = combine(stack.float(), SIZES)
    for algorithm in possible(p, ALGORITHMS[1:]):
        result = simulate(
            stack, SIZES, algorithm, result_dtype=torch.float32, wide_result=True
        )
        assert result.dtype == torch.float32
        error = (result - wide).double().norm()
        assert error <= (0 if algorithm in EXACT else 1e-6) * wide.double().norm()


def test_float32_results_hold_sums_beyond_float16():
    stack = torch.zeros(4, 4, dtype=torch.float16)
    stack[:, :] = 6e4 * torch.tensor([[1, 1, 1, 1], [1, -1, 1, -1]] * 2)
    stack[2:, 2:] *= -1
    want = stack.float().sum(0)
    assert want.abs().max() > 65504
    for algorithm in possible(4, ALGORITHMS[1:]):
        result = simulate(stack, [4], algorithm, result_dtype=torch.float32)
        assert torch.equal(result, want)
        assert np.isinf(simulate(stack, [4], algorithm)[0].item())


def chosen(p: int, elements: int, mode: str = "tree", **options) -> str:
    op = torch.ops.torch_sm3._adasum_loopback
    traffic = op(torch.zeros(p, elements), [elements], mode, **options)[-1]
    return ALGORITHMS[traffic[0]]


@pytest.mark.parametrize(
    ("p", "elements", "options", "name"),
    [
        (2, 1000, {}, "pair"),
        (2, 1 << 22, {}, "pair"),
        (2, (1 << 22) + 1, {}, "gram"),
        (3, 1000, {}, "gather"),
        (3, 1 << 14, {}, "gather"),
        (3, (1 << 14) + 1, {}, "gram"),
        (16, 1 << 14, {}, "gram"),
        (24, 1 << 14, {}, "two_level"),
        (17, 1 << 14, {}, "gram"),
        (64, 1 << 14, {}, "two_level"),
        (24, 1 << 14, {"mode": "psum"}, "gram"),
        (128, 1 << 10, {}, "vhdd"),
        (96, 1 << 10, {}, "two_level"),
        (4, 1000, {"node_size": 2}, "pair"),
        (4, (1 << 22) + 1, {"node_size": 2}, "gram"),
    ],
)
def test_automatic_choice(p, elements, options, name):
    assert chosen(p, elements, **options) == name


@pytest.mark.parametrize(
    ("p", "algorithm", "options", "words"),
    [
        (3, "pair", {}, "expected a group of 2 ranks for algorithm 'pair', but got 3"),
        (6, "vhdd", {}, "group of 2\\^k ranks for algorithm 'vhdd', but got 6"),
        (7, "two_level", {}, "q \\* m ranks.*but got 7"),
        (4, "two_level", {"mode": "psum"}, "but got 'psum'"),
        (4, "vhdd", {"mode": "psum"}, "but got 'psum'"),
        (4, "ring", {}, "'gather', 'gram', 'two_level' or 'vhdd', but got 'ring'"),
    ],
)
def test_impossible_algorithms_are_refused(p, algorithm, options, words):
    with pytest.raises(ValueError, match=words) as error:
        simulate(torch.zeros(p, 4), [4], algorithm, **options)
    assert "(argument 'algorithm')" in str(error.value)
