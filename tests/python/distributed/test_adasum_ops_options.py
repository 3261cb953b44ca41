# SPDX-License-Identifier: Apache-2.0
"""The pure operators of Adasum: dtypes, errors, tracing and scripting."""

import io
import math

import pytest
import torch
from helpers.adasum_pure import assert_near_oracle, coefficients, combine

from torch_sm3 import _ops

SIZES = [3, 20000, 0, 1]
REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_float32_sums_are_close_to_those_of_float64(dtype):
    stack = torch.randn(4, sum(SIZES)).to(dtype)
    gram = _ops.adasum_gram(stack, SIZES, accumulate_dtype=torch.float32)
    want = _ops.adasum_gram(stack, SIZES)
    assert torch.equal(
        want, _ops.adasum_gram(stack, SIZES, accumulate_dtype=torch.float64)
    )
    norm = want.diagonal(dim1=1, dim2=2).sqrt()
    assert ((gram - want).abs() <= 1e-7 * norm[:, :, None] * norm[:, None, :]).all()
    # The products of bfloat16 are so short that float32 adds them exactly.
    assert torch.equal(gram, want) == (dtype == torch.bfloat16)


@pytest.mark.parametrize("power", [-25, 19])
def test_what_float32_sums_cannot_resolve_is_summed_in_float64(power):
    stack = torch.randn(3, sum(SIZES))
    stack[:, 3:20003] *= 10.0**power
    gram = _ops.adasum_gram(stack, SIZES, accumulate_dtype=torch.float32)
    want = _ops.adasum_gram(stack, SIZES)
    assert torch.equal(gram[1], want[1]) and gram.isfinite().all()


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float64),
        (torch.float64, torch.float32),
        (torch.float32, torch.float16),
    ],
)
def test_the_result_is_rounded_once_to_a_given_dtype(dtype, wide):
    stack = torch.randn(3, 999).to(dtype)
    c = coefficients(stack)[None]
    result = _ops.adasum_combine(stack, c, [999], dtype=wide)
    assert result.dtype == wide
    assert_near_oracle(stack, result)
    if wide != torch.float16:  # torch itself rounds float64 to it by way of float32
        exact = _ops.adasum_combine(stack, c, [999], dtype=torch.float64)
        assert torch.equal(result, exact.to(wide))


def test_a_wider_result_holds_sums_that_the_leaves_cannot():
    stack = torch.zeros(2, 4, dtype=torch.float16)
    stack[0, :2] = 6e4
    stack[1, 0], stack[1, 1] = 6e4, -6e4
    c = torch.ones(1, 2, dtype=torch.float64)
    assert _ops.adasum_combine(stack, c, [4])[0].isposinf()
    wide = _ops.adasum_combine(stack, c, [4], dtype=torch.float32)
    assert wide.tolist() == [120000.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_numbers_are_pairs_of_reals(dtype):
    stack = torch.randn(3, 40, dtype=dtype)
    sizes = [7, 0, 33]
    reals = torch.view_as_real(stack).flatten(1)
    gram = _ops.adasum_gram(stack, sizes)
    assert torch.equal(gram, _ops.adasum_gram(reals, [14, 0, 66]))
    result = combine(stack, sizes)
    assert result.dtype == dtype
    assert torch.equal(
        torch.view_as_real(result).flatten(), combine(reals, [14, 0, 66])
    )
    pair = _ops.adasum_pair(stack[0].view(8, 5).t(), stack[1].view(8, 5).t(), [40])
    assert pair.shape == (5, 8) and pair.dtype == dtype
    # Conjugates are views that no kernel may read as they lie in memory.
    assert torch.equal(combine(stack.conj(), sizes), result.conj())
    assert torch.equal(_ops.adasum_gram(stack.conj(), sizes), gram)
    c = _ops.adasum_coefficients(gram)
    half = _ops.adasum_combine(stack, c, sizes, dtype=torch.complex64)
    assert half.dtype == torch.complex64


def test_weights_may_be_of_any_floating_dtype():
    gram = _ops.adasum_gram(torch.randn(3, 20), [20])
    weights = torch.tensor([1.0, 2.0, 0.0])
    want = _ops.adasum_coefficients(gram, weights=weights.double())
    assert torch.equal(_ops.adasum_coefficients(gram, weights=weights.half()), want)
    assert want[0, 2] == 0
    assert not torch.equal(want, _ops.adasum_coefficients(gram))


def square(p: int) -> torch.Tensor:
    return torch.eye(p, dtype=torch.float64)[None]


BAD = [
    (ValueError, "sum to 4, but got a sum of 5", lambda x: combine(x, [2, 3])),
    (ValueError, "sizes >= 0, but got -1", lambda x: combine(x, [5, -1])),
    (ValueError, r"\[p, N\]", lambda x: _ops.adasum_gram(x[0], [4])),
    (ValueError, r"\[p, N\]", lambda x: _ops.adasum_gram(x[:0], [4])),
    (ValueError, "'psum'.*'median'", lambda x: combine(x, mode="median")),
    (ValueError, "finite.*inf.*'scale'", lambda x: combine(x, scale=math.inf)),
    (TypeError, "Long", lambda x: _ops.adasum_gram(x.long(), [4])),
    (TypeError, "Bool", lambda x: _ops.adasum_pair(x[0] > 0, x[1] > 0, [4])),
    (TypeError, "Float8", lambda x: _ops.adasum_gram(x.to(torch.float8_e5m2), [4])),
    (TypeError, "ComplexHalf", lambda x: _ops.adasum_gram(x.to(torch.chalf), [4])),
    (
        TypeError,
        "float64 or float32, but got Half.*'accumulate_dtype'",
        lambda x: _ops.adasum_gram(x, [4], accumulate_dtype=torch.half),
    ),
    (
        TypeError,
        "Long.*'dtype'",
        lambda x: _ops.adasum_combine(x, square(2)[:, 0], [4], dtype=torch.long),
    ),
    (
        TypeError,
        "a real dtype, but got ComplexFloat.*'dtype'",
        lambda x: _ops.adasum_combine(x, square(2)[:, 0], [4], dtype=torch.cfloat),
    ),
    (TypeError, "float64", lambda x: _ops.adasum_coefficients(torch.ones(1, 2, 2))),
    (
        ValueError,
        r"\[L, p, p\]",
        lambda x: _ops.adasum_coefficients(torch.ones(1, 2, 3).double()),
    ),
    (
        ValueError,
        r"shape \[2\], but got \[3\].*'weights'",
        lambda x: _ops.adasum_coefficients(square(2), weights=torch.ones(3)),
    ),
    (
        ValueError,
        "finite weights >= 0, but got -1.*'weights'",
        lambda x: combine(x, weights=[1.0, -1.0]),
    ),
    (
        ValueError,
        "finite sum > 0, but got 0.*'weights'",
        lambda x: combine(x, weights=[0.0, 0.0]),
    ),
    (
        TypeError,
        "floating-point.*Long.*'weights'",
        lambda x: _ops.adasum_coefficients(
            square(2), weights=torch.ones(2, dtype=torch.long)
        ),
    ),
    (ValueError, "sum to 2, but got a sum of 3", lambda x: combine(x, nodes=[1, 2])),
    (ValueError, ">= 1 rank, but got 0", lambda x: combine(x, nodes=[2, 0])),
    (ValueError, "sum to 2, but got a sum of 0", lambda x: combine(x, nodes=[])),
    (
        ValueError,
        "'mean' or 'adasum', but got 'max'.*'inner'",
        lambda x: combine(x, nodes=[2], inner="max"),
    ),
    (
        ValueError,
        "'mean' for mode 'psum', but got 'adasum'.*'inner'",
        lambda x: combine(x, mode="psum", nodes=[1, 1], inner="adasum"),
    ),
    (
        ValueError,
        r"shape \[1, 2\]",
        lambda x: _ops.adasum_combine(x, torch.ones(1, 3).double(), [4]),
    ),
    (
        TypeError,
        "float64, but got Float.*'coefficients'",
        lambda x: _ops.adasum_combine(x, torch.ones(1, 2), [4]),
    ),
    (ValueError, "shape", lambda x: _ops.adasum_pair(x[0], x[1, :2], [4])),
    (ValueError, "dtype Float", lambda x: _ops.adasum_pair(x[0], x[1].double(), [4])),
    (
        ValueError,
        "weight >= 0.*'weight_a'",
        lambda x: _ops.adasum_pair(x[0], x[1], [4], weight_a=-1.0),
    ),
    (NotImplementedError, "Sparse", lambda x: combine(x.to_sparse(), [4])),
]


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize(("error", "text", "call"), BAD)
def test_bad_arguments(error, text, call):
    with pytest.raises(error, match=text):
        call(torch.ones(2, 4))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: _ops.adasum_gram(x, [2, 3]),
        lambda x: _ops.adasum_gram(x.long(), [4]),
        lambda x: _ops.adasum_pair(x[0], x[1, :2], [4]),
        lambda x: _ops.adasum_coefficients(x[None, :, :2].double(), "median"),
        lambda x: _ops.adasum_coefficients(x[None, :, :2].double(), nodes=[3]),
    ],
)
def test_fake_tensors_are_checked_alike(call):
    with pytest.raises((ValueError, TypeError)):
        call(torch.ones(2, 4, device="meta"))


def test_operators_pass_opcheck():
    stack = torch.randn(3, 10)
    sizes = [4, 6]
    gram = _ops.adasum_gram(stack, sizes)
    c = _ops.adasum_coefficients(gram)
    weights = torch.tensor([1.0, 2.0, 0.5])
    ops = torch.ops.torch_sm3
    for op, args, kwargs in [
        (ops.adasum_gram, (stack, sizes), {}),
        (ops.adasum_gram, (stack, sizes), {"accumulate_dtype": torch.float32}),
        (ops.adasum_gram, (stack.cfloat(), sizes), {}),
        (ops.adasum_coefficients, (gram, "psum"), {"scale": 2.0}),
        (
            ops.adasum_coefficients,
            (gram,),
            {"weights": weights, "nodes": [2, 1], "inner": "adasum"},
        ),
        (ops.adasum_combine, (stack, c, sizes), {}),
        (ops.adasum_combine, (stack, c, sizes), {"dtype": torch.float64}),
        (ops.adasum_pair, (stack[0], stack[1], [10]), {"weight_a": 2.0}),
        (ops.adasum_pair, (stack[0].cdouble(), stack[1].cdouble(), [10]), {}),
    ]:
        torch.library.opcheck(op.default, args, kwargs)


def test_backward_is_refused():
    stack = torch.randn(2, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="not implemented"):
        combine(stack).sum().backward()
    with pytest.raises(RuntimeError, match="not implemented"):
        _ops.adasum_pair(stack[0], stack[1], [4]).sum().backward()


def reduce_layers(stack: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    gram = torch.ops.torch_sm3.adasum_gram(stack, sizes, accumulate_dtype=torch.float64)
    c = torch.ops.torch_sm3.adasum_coefficients(
        gram, "tree", weights=torch.ones(2), nodes=[1, 1], inner="mean", scale=0.5
    )
    together = torch.ops.torch_sm3.adasum_combine(stack, c, sizes, dtype=torch.float32)
    return together + torch.ops.torch_sm3.adasum_pair(stack[0], stack[1], sizes)


def test_operators_work_in_torchscript():
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(reduce_layers), buffer)
    buffer.seek(0)
    loaded = torch.jit.load(buffer)
    stack = torch.randn(2, 10)
    assert torch.equal(loaded(stack, [3, 7]), reduce_layers(stack, [3, 7]))


class Reduce(torch.nn.Module):
    def forward(self, stack: torch.Tensor) -> torch.Tensor:
        return reduce_layers(stack, [stack.shape[1] - 3, 3])


@pytest.mark.parametrize("strict", [False, True])
def test_operators_work_in_export_with_a_dynamic_size(strict):
    stack = torch.randn(2, 10)
    size = torch.export.Dim("size", min=4, max=1000)
    program = torch.export.export(
        Reduce(), (stack,), dynamic_shapes=({1: size},), strict=strict
    )
    names = {str(node.target) for node in program.graph.nodes}
    assert any("adasum_coefficients" in name for name in names)
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    module = torch.export.load(buffer).module()
    for columns in (10, 77):
        stack = torch.randn(2, columns)
        assert torch.equal(module(stack), Reduce()(stack))
