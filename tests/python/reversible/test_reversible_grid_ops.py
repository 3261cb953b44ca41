# SPDX-License-Identifier: Apache-2.0
"""Sums on the grid: ``reversible_quantize``, ``reversible_grid_add`` and ``_sub``."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.bits import FLOATS, LAYOUTS, SPECIAL, denormals, integers
from helpers.instruction_sets import outputs
from reference import reversible_ops_oracle as oracle

from torch_sm3 import _ops

STREAMS = {torch.float32: 24, torch.float64: 53}


def numbers(dtype: torch.dtype) -> torch.Tensor:
    """Return numbers of all sizes, ties, special ones and those at the limits."""
    sizes = 2.0 ** torch.arange(-30, 60, dtype=torch.double)
    random = (torch.randn(len(sizes), dtype=torch.double) * sizes).to(dtype)
    halves = (torch.arange(-40, 40) * 0.5).to(dtype)
    edges = torch.tensor([2.0**k for k in range(60)], dtype=dtype)
    below = torch.nextafter(edges, torch.zeros_like(edges))
    special = torch.tensor(SPECIAL, dtype=dtype)
    return torch.cat([random, halves, edges, -edges, below, special, denormals(dtype)])


@pytest.mark.parametrize("dtype", STREAMS, ids=str)
@pytest.mark.parametrize("bits", [0, 1, 16, 22, "last"])
def test_quantize_is_the_nearest_number_of_the_grid(dtype, bits):
    precision = STREAMS[dtype]
    bits = precision - 1 if bits == "last" else bits
    x = numbers(dtype)
    for values in (x, x / 2**bits, x / 2 ** (bits + 1)):
        expected = [oracle.quantize(v, bits, precision) for v in values.tolist()]
        got = _ops.reversible_quantize(values, bits)
        expected = torch.tensor(expected, dtype=torch.double).to(dtype)
        # All NaNs of these arguments have one bit pattern.
        assert torch.equal(integers(got), integers(expected))


@pytest.mark.parametrize("dtype", STREAMS, ids=str)
def test_quantize_leaves_the_bits_of_a_nan(dtype):
    payload = integers(torch.tensor([math.nan], dtype=dtype)) + 77
    got = _ops.reversible_quantize(payload.view(dtype), 8)
    assert torch.equal(integers(got), payload)


@pytest.mark.parametrize("dtype", STREAMS, ids=str)
@pytest.mark.parametrize("value_dtype", FLOATS, ids=str)
def test_sums_cast_quantize_and_add(dtype, value_dtype):
    acc = torch.randn(37, 53, dtype=torch.double).to(dtype)
    value = (3 * torch.randn(37, 53, dtype=torch.double)).to(value_dtype)
    step = _ops.reversible_quantize(value.to(dtype), 11)
    out, amax = _ops.reversible_grid_add(acc, value, 11)
    assert torch.equal(out, acc + step)
    assert torch.equal(amax, (acc + step).abs().max()) and amax.dtype == dtype
    assert torch.equal(_ops.reversible_grid_sub(acc, value, 11), acc - step)


@pytest.mark.parametrize("dtype", STREAMS, ids=str)
def test_a_hundred_sums_are_undone_bit_for_bit(dtype):
    precision, bits = STREAMS[dtype], 12
    limit = 2.0 ** (precision - bits)
    start = _ops.reversible_quantize(numbers(dtype).clamp(-limit / 4, limit / 4), bits)
    start = start[start.isfinite()]
    # Zeros of both signs, in the stream and in what is added.
    steps = [torch.randn_like(start) * (i % 3) for i in range(100)]
    x = start
    for step in steps:
        x, amax = _ops.reversible_grid_add(x, step, bits)
        assert amax < limit
    for step in reversed(steps):
        x = _ops.reversible_grid_sub(x, step, bits)
    assert torch.equal(integers(x), integers(start))


@pytest.mark.parametrize("dtype", STREAMS, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["acc", "value", "opposite"])
def test_amax_of_anything_not_finite_is_infinite(dtype, bad, where):
    acc, value = torch.zeros(2, 1000, dtype=dtype).unbind()
    (value if where == "value" else acc)[777] = bad
    if where == "opposite":
        value[777] = -bad
    amax = _ops.reversible_grid_add(acc, value, 4)[1]
    assert amax.item() == math.inf and amax.shape == ()


def test_amax_of_an_overflow_and_of_negative_and_of_no_numbers():
    big = torch.full((3,), torch.finfo(torch.float32).max)
    assert _ops.reversible_grid_add(big, big, 4)[1].item() == math.inf
    x = torch.tensor([-3.0, 2.0])
    assert _ops.reversible_grid_add(x, torch.zeros(2), 4)[1].item() == 3.0
    out, amax = _ops.reversible_grid_add(torch.zeros(0, 3), torch.zeros(0, 3), 4)
    assert out.shape == (0, 3) and amax.item() == 0


@pytest.mark.parametrize("left", LAYOUTS)
@pytest.mark.parametrize("right", LAYOUTS)
def test_layouts(left, right):
    acc, value = torch.randn(2, 6, 8).unbind()
    acc, value = LAYOUTS[left](acc), LAYOUTS[right](value)
    out, amax = _ops.reversible_grid_add(acc, value, 5)
    expected = acc + torch.round(value * 32) / 32
    assert torch.equal(out, expected) and torch.equal(amax, expected.abs().max())
    assert out.stride() == torch.empty_like(acc).stride()
    meta = _ops.reversible_grid_add(acc.to("meta"), value.to("meta"), 5)
    assert [m.shape for m in meta] == [out.shape, amax.shape]
    assert _ops.reversible_quantize(torch.tensor(0.3), 2).item() == 0.25


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_threads(threads):
    before = torch.get_num_threads()
    acc, value = torch.randn(2, 300_001).unbind()
    acc[250_000] = -999.0
    expected = acc + torch.round(value * 256) / 256
    try:
        torch.set_num_threads(threads)
        out, amax = _ops.reversible_grid_add(acc, value, 8)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(out, expected)
    assert torch.equal(amax, expected.abs().max())


def test_gradients_pass_straight_through():
    acc = torch.randn(4, 3, requires_grad=True)
    value = torch.randn(4, 3, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(4, 3)
    x = torch.randn(4, 3, requires_grad=True)
    assert torch.equal(
        torch.autograd.grad(_ops.reversible_quantize(x, 3), x, grad)[0], grad
    )
    for op, sign in ((_ops.reversible_grid_add, 1), (_ops.reversible_grid_sub, -1)):
        out = op(acc, value, 3)
        if sign > 0:
            out, amax = out
            assert not amax.requires_grad
        acc_grad, value_grad = torch.autograd.grad(out, [acc, value], grad)
        assert torch.equal(acc_grad, grad)
        assert torch.equal(value_grad, sign * grad.bfloat16())


def test_gradients_are_differentiable():
    x = torch.randn(3, requires_grad=True)
    y = _ops.reversible_quantize(x, 20)
    (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(second, 6 * y)


CALLS = {
    "reversible_quantize": lambda x, f: (x, 7),
    "reversible_grid_add": lambda x, f: (x, f, 7),
    "reversible_grid_sub": lambda x, f: (x, f, 7),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("grad", [False, True])
def test_opcheck(name, grad):
    op = getattr(torch.ops.torch_sm3, name).default
    for dtype in STREAMS:
        for value_dtype in FLOATS:
            x = torch.randn(5, 4, dtype=dtype).t().requires_grad_(grad)
            f = torch.randn(4, 5, dtype=value_dtype, requires_grad=grad)
            torch.library.opcheck(op, CALLS[name](x, f))
    empty = torch.randn(0, 4, requires_grad=grad)
    torch.library.opcheck(op, CALLS[name](empty, empty))


def test_errors():
    x = torch.randn(2, 3)
    quantize, add = _ops.reversible_quantize, _ops.reversible_grid_add
    for dtype in (torch.half, torch.bfloat16, torch.long, torch.cfloat):
        with pytest.raises(
            TypeError, match=r"reversible_quantize: expected float32 or float64.*'x'"
        ):
            quantize(torch.zeros(3, dtype=dtype), 4)
        with pytest.raises(TypeError, match=r"reversible_grid_add: expected .*'acc'"):
            add(torch.zeros(2, 3, dtype=dtype), x, 4)
    for dtype in (torch.long, torch.cfloat):
        with pytest.raises(TypeError, match=r"reversible_grid_sub: .*'value'"):
            _ops.reversible_grid_sub(x, torch.zeros(2, 3, dtype=dtype), 4)
    for bits in (-1, 24):
        with pytest.raises(ValueError, match=rf"from 0 to 23, but got {bits} .*'bits'"):
            quantize(x, bits)
    with pytest.raises(ValueError, match=r"from 0 to 52, but got 53"):
        quantize(x.double(), 53)
    with pytest.raises(ValueError, match=r"expected the shape \[2, 3\], but got \[3\]"):
        add(x, torch.zeros(3), 4)
    with pytest.raises(ValueError, match=r"expected the device cpu, but got meta"):
        add(x, torch.zeros(2, 3, device="meta"), 4)


DIGEST = """
import hashlib
import torch
from torch_sm3 import _ops
torch.manual_seed(0)
digest = hashlib.sha256()
for a in (torch.float64, torch.float32):
    for v in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        x, f = torch.randn(70001).to(a) * 50, torch.randn(70001).to(v)
        for y in (
            _ops.reversible_quantize(x, 9),
            *_ops.reversible_grid_add(x, f, 13),
            _ops.reversible_grid_sub(x, f, 13),
        ):
            digest.update(y.numpy().tobytes())
print(digest.hexdigest())
"""


def test_bits_do_not_depend_on_the_instruction_set():
    assert len(outputs(DIGEST)) == 1
