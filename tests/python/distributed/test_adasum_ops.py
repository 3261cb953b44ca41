# SPDX-License-Identifier: Apache-2.0
"""The pure operators of Adasum: every rank's leaf in one process."""

import io
import math

import numpy as np
import pytest
import torch
from reference.adasum_oracle import adasum, adasum_layers, kappa

from torch_sm3 import _ops

WORLDS = range(1, 9)
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
SIZES = [3, 40000, 0, 1, 20001]


def combine(stack, sizes=None, **options):
    """Adasum of the rows of ``stack`` by the three operators."""
    sizes = [stack.shape[1]] if sizes is None else sizes
    c = _ops.adasum_coefficients(_ops.adasum_gram(stack, sizes), **options)
    return _ops.adasum_combine(stack, c, sizes)


def assert_near_oracle(stack, result):
    """Check the element bound of one rounding, and the bound of the coefficients."""
    p, n = stack.shape
    rows = stack.double().numpy().astype(np.longdouble)
    want = adasum(rows)
    c = _ops.adasum_coefficients(_ops.adasum_gram(stack, [n]))[0].numpy()
    spread = np.abs(c[:, None] * rows).sum(axis=0)
    info = torch.finfo(result.dtype)
    bound = (
        info.eps / 2 * np.abs(want)
        + info.smallest_normal * info.eps / 2
        + 8 * p * 2.0**-52 * kappa(rows) ** 2 * spread
    )
    error = np.abs(result.double().numpy() - want)
    assert (error <= bound).all(), float((error - bound).max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", WORLDS)
def test_random_leaves_equal_the_oracle(p, dtype):
    stack = torch.randn(p, 999).to(dtype)
    assert_near_oracle(stack, combine(stack))
    correlated = (torch.randn(999) + 0.3 * torch.randn(p, 999)).to(dtype)
    assert_near_oracle(correlated, combine(correlated))


@pytest.mark.parametrize("p", WORLDS)
def test_layers_are_combined_on_their_own(p):
    stack = torch.randn(p, sum(SIZES))
    result = combine(stack, SIZES)
    want = adasum_layers(stack.double().numpy(), SIZES)
    torch.testing.assert_close(result.double(), torch.from_numpy(want.astype("f8")))
    start = 0
    for size in SIZES:
        part = stack[:, start : start + size]
        assert torch.equal(result[start : start + size], combine(part))
        start += size


@pytest.mark.parametrize("p", [3, 5, 6, 7])
def test_adasum_row_1_world_size_that_is_no_power_of_two(p):
    stack = torch.randn(p, 200)
    assert_near_oracle(stack, combine(stack))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", WORLDS)
def test_parallel_leaves_give_the_mean_and_orthogonal_ones_the_sum(p, dtype):
    # Small integers: the products are exact, so leaves are exactly parallel.
    leaf = torch.randint(-8, 9, (500,)).double()
    factors = torch.tensor([1.0, -2.0, 3.0, 1.0, 5.0, -6.0, 2.0, 4.0])[:p].double()
    stack = (factors[:, None] * leaf).to(dtype)
    mean = stack.double().mean(0)
    noise = 8 * p * 2.0**-52 * kappa(stack.double().numpy()) ** 2
    torch.testing.assert_close(
        combine(stack).double(),
        mean,
        rtol=torch.finfo(dtype).eps,
        atol=noise * float(mean.abs().max()),
    )
    stack = torch.zeros(p, 8 * p, dtype=dtype)
    for i in range(p):
        stack[i, i::p] = torch.randn(8).to(dtype)
    assert torch.equal(combine(stack), stack.sum(0))


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


@pytest.mark.parametrize("size", [1e-16, 1e-18, 1e20])
def test_adasum_row_26_no_epsilon_and_no_float32_dots(size):
    leaf = torch.full((16,), size)
    assert torch.equal(combine(leaf.repeat(4, 1)), leaf)


@pytest.mark.parametrize("mode", ["tree", "psum"])
def test_adasum_row_25_zero_leaf_is_absent(mode):
    leaf = torch.randn(100)
    stack = torch.stack([leaf, torch.zeros(100), 3 * leaf])
    result = combine(stack, mode=mode)
    torch.testing.assert_close(result, 2 * leaf)
    assert torch.equal(combine(stack[:, :0], mode=mode), torch.empty(0))
    nothing = combine(torch.zeros(3, 100), mode=mode)
    assert torch.equal(nothing, torch.zeros(100)) and not nothing.signbit().any()


@pytest.mark.parametrize("p", range(2, 8))
def test_inactive_ranks_change_no_bit(p):
    stack = torch.randn(p, 300)
    want = combine(stack)
    assert torch.equal(combine(torch.cat([stack, torch.zeros(3, 300)])), want)
    middle = torch.cat([stack[:1], torch.zeros(1, 300), stack[1:]])
    assert_near_oracle(middle, combine(middle))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("p", [2, 3, 4])
def test_one_bad_element_spoils_its_layer_and_no_other(p, bad):
    stack = torch.randn(p, 60)
    clean = combine(stack, [20, 20, 20])
    stack[p - 1, 25] = bad
    result = combine(stack, [20, 20, 20])
    assert result[20:40].isnan().all()
    assert torch.equal(result[:20], clean[:20])
    assert torch.equal(result[40:], clean[40:])


def test_mean_and_sum_treat_each_element_on_its_own():
    stack = torch.randn(3, 40)
    stack[1, 7] = math.nan
    for mode, factor in [("mean", 3.0), ("sum", 1.0)]:
        result = combine(stack, mode=mode)
        want = stack.double().sum(0) / factor
        torch.testing.assert_close(result.double(), want, equal_nan=True)
        assert result.isnan().sum() == 1


def test_one_rank_keeps_every_bit():
    leaf = torch.tensor([[-0.0, 1.5, math.inf, math.nan, 1e-42]])
    result = combine(leaf)
    assert torch.equal(result.view(torch.int32), leaf[0].view(torch.int32))
    assert torch.equal(combine(leaf[:, :2], scale=2.0), torch.tensor([0.0, 3.0]))


@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [(torch.float32, -37, 37), (torch.float64, -130, 130), (torch.bfloat16, -35, 35)],
)
def test_norms_of_very_different_size(dtype, low, high):
    leaf = torch.randn(64, dtype=torch.float64)
    for powers in ([low, high], [high, low, 0], [low, 0, high, low + 3, high - 3]):
        factors = torch.tensor([10.0**power for power in powers], dtype=torch.float64)
        parallel = (factors[:, None] * leaf).to(dtype)
        want = parallel.double().mean(0)
        torch.testing.assert_close(
            combine(parallel).double(), want, rtol=100 * torch.finfo(dtype).eps, atol=0
        )
        other = (factors[:, None] * torch.randn(len(powers), 64)).to(dtype)
        assert_near_oracle(other, combine(other))


def test_subnormals_and_overflow_of_the_result():
    stack = torch.randint(-50, 50, (4, 100)) * 2.0**-149
    assert_near_oracle(stack, combine(stack))
    large = torch.zeros(2, 3)
    large[0, 0], large[0, 1], large[1, 0], large[1, 1] = 3e38, 3e38, 3e38, -3e38
    result = combine(large, scale=1.5)
    assert result[0].isposinf() and result[1].abs() <= 3.4e38 and result[2] == 0


def test_cancelled_leaves_are_absent():
    a, b = torch.randn(2, 50)
    assert torch.equal(combine(torch.stack([a, -a])), torch.zeros(50))
    assert torch.equal(combine(torch.stack([a, -a, a])), a)
    torch.testing.assert_close(combine(torch.stack([a, -a, b, b])), b)
    # Close to it, the coefficients tend to 3/2: the rule is not continuous there.
    near = torch.stack([a, -a + 1e-3 * b]).double()
    c = _ops.adasum_coefficients(_ops.adasum_gram(near, [50]))
    assert ((c - 1.5).abs() < 1e-2).all()


@pytest.mark.parametrize("p", WORLDS)
def test_powers_of_two_commute(p):
    stack = torch.randn(p, 333)
    for exponent in (-20, 30):
        assert torch.equal(combine(stack * 2.0**exponent), combine(stack) * 2**exponent)
        gram = _ops.adasum_gram(stack, [333])
        assert torch.equal(
            _ops.adasum_coefficients(gram * 4.0**exponent),
            _ops.adasum_coefficients(gram),
        )
    torch.testing.assert_close(combine(stack, scale=0.1), combine(stack) * 0.1)


def test_order_of_ranks():
    stack = torch.randn(8, 400) + 0.5 * torch.randn(400)
    order = torch.tensor([5, 2, 7, 0, 1, 6, 3, 4])
    for mode in ("psum", "mean", "sum"):
        torch.testing.assert_close(
            combine(stack, mode=mode), combine(stack[order], mode=mode)
        )
    assert (combine(stack) - combine(stack[order])).abs().max() > 1e-4
    two = stack[:2]
    torch.testing.assert_close(combine(two), combine(two.flip(0)), rtol=3e-7, atol=0)
    torch.testing.assert_close(combine(two), combine(two, mode="psum"))


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
    want = adasum(stack.double().numpy(), [3.0, 1.0])
    np.testing.assert_allclose(
        weighted.double().numpy().ravel(),
        want.astype("f8"),
        rtol=torch.finfo(dtype).eps,
        atol=1e-15,
    )
    assert torch.equal(_ops.adasum_pair(a, b, [210], weight_b=0.0), a)


def test_gram_is_that_of_float64():
    stack = torch.randn(3, sum(SIZES))
    gram = _ops.adasum_gram(stack, SIZES)
    assert torch.equal(gram, gram.transpose(1, 2))
    for layer, part in zip(gram, stack.double().split(SIZES, dim=1), strict=True):
        torch.testing.assert_close(layer, part @ part.t(), rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize(
    ("error", "text", "call"),
    [
        (ValueError, "sum to 4, but got a sum of 5", lambda x: combine(x, [2, 3])),
        (ValueError, "sizes >= 0, but got -1", lambda x: combine(x, [5, -1])),
        (ValueError, r"\[p, N\]", lambda x: _ops.adasum_gram(x[0], [4])),
        (ValueError, "'psum'", lambda x: combine(x, mode="median")),
        (ValueError, "finite", lambda x: combine(x, scale=math.inf)),
        (TypeError, "Long", lambda x: _ops.adasum_gram(x.long(), [4])),
        (
            TypeError,
            "ComplexFloat",
            lambda x: _ops.adasum_gram(x.to(torch.complex64), [4]),
        ),
        (
            TypeError,
            "float64",
            lambda x: _ops.adasum_coefficients(torch.ones(1, 2, 2)),
        ),
        (
            ValueError,
            r"\[L, p, p\]",
            lambda x: _ops.adasum_coefficients(torch.ones(1, 2, 3).double()),
        ),
        (
            ValueError,
            r"shape \[1, 2\]",
            lambda x: _ops.adasum_combine(x, torch.ones(1, 3).double(), [4]),
        ),
        (ValueError, "shape", lambda x: _ops.adasum_pair(x[0], x[1, :2], [4])),
        (
            ValueError,
            "dtype Float",
            lambda x: _ops.adasum_pair(x[0], x[1].double(), [4]),
        ),
        (
            ValueError,
            "weight >= 0",
            lambda x: _ops.adasum_pair(x[0], x[1], [4], weight_a=-1.0),
        ),
        (NotImplementedError, "Sparse", lambda x: combine(x.to_sparse(), [4])),
    ],
)
def test_bad_arguments(error, text, call):
    with pytest.raises(error, match=text):
        call(torch.ones(2, 4))


def test_operators_pass_opcheck():
    stack = torch.randn(3, 10)
    sizes = [4, 6]
    gram = _ops.adasum_gram(stack, sizes)
    c = _ops.adasum_coefficients(gram)
    ops = torch.ops.torch_sm3
    for op, args, kwargs in [
        (ops.adasum_gram, (stack, sizes), {}),
        (ops.adasum_coefficients, (gram, "psum"), {"scale": 2.0}),
        (ops.adasum_combine, (stack, c, sizes), {}),
        (ops.adasum_pair, (stack[0], stack[1], [10]), {"weight_a": 2.0}),
    ]:
        torch.library.opcheck(op.default, args, kwargs)


def test_backward_is_refused():
    stack = torch.randn(2, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="not implemented"):
        combine(stack).sum().backward()


def reduce_layers(stack: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    gram = torch.ops.torch_sm3.adasum_gram(stack, sizes)
    c = torch.ops.torch_sm3.adasum_coefficients(gram, "tree", scale=0.5)
    together = torch.ops.torch_sm3.adasum_combine(stack, c, sizes)
    return together + torch.ops.torch_sm3.adasum_pair(stack[0], stack[1], sizes)


def test_operators_work_in_torchscript():
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(reduce_layers), buffer)
    buffer.seek(0)
    loaded = torch.jit.load(buffer)
    stack = torch.randn(2, 10)
    assert torch.equal(loaded(stack, [3, 7]), reduce_layers(stack, [3, 7]))
