# SPDX-License-Identifier: Apache-2.0
"""The residual sums: ``reversible_add`` and ``reversible_sub``."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest
import torch

from torch_sm3 import _ops

REAL = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
COMPLEX = [torch.complex64, torch.complex128]
PAIRS = list(itertools.product(REAL, REAL)) + list(
    itertools.product(COMPLEX, REAL + COMPLEX)
)
OPS = {
    "reversible_add": (_ops.reversible_add, torch.add),
    "reversible_sub": (_ops.reversible_sub, torch.sub),
}


def random(scale, dtype):
    wide = torch.cdouble if dtype.is_complex else torch.double
    return (scale * torch.randn(37, 53, dtype=wide)).to(dtype)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize(("acc_dtype", "value_dtype"), PAIRS, ids=str)
def test_equals_a_cast_and_a_sum_bit_for_bit(name, acc_dtype, value_dtype):
    ours, theirs = OPS[name]
    acc = random(100, acc_dtype)
    value = random(1, value_dtype)
    got = ours(acc, value)
    assert got.dtype == acc_dtype
    assert torch.equal(got, theirs(acc, value.to(acc_dtype)))


def test_special_values():
    inf, nan = float("inf"), float("nan")
    for dtype in REAL:
        acc = torch.tensor([inf, -inf, nan, 1.0, -0.0, 65504.0, 1e-7], dtype=dtype)
        value = torch.tensor([-inf, 1.0, 1.0, nan, -0.0, 65504.0, 1e-7], dtype=dtype)
        torch.testing.assert_close(
            _ops.reversible_add(acc, value), acc + value, rtol=0, atol=0, equal_nan=True
        )


LAYOUTS = {
    "transposed": lambda: torch.randn(5, 7).t(),
    "channels_last": lambda: torch.randn(2, 3, 4, 5).to(
        memory_format=torch.channels_last
    ),
    "slice": lambda: torch.randn(9, 8)[::2, 1::3],
    "expanded": lambda: torch.randn(4, 1).expand(4, 6),
    "scalar": lambda: torch.randn(()),
    "empty": lambda: torch.randn(0, 3),
    "one": lambda: torch.randn(1, 5, 1),
}


@pytest.mark.parametrize("left", LAYOUTS)
@pytest.mark.parametrize("copied", [False, True])
def test_layouts(left, copied):
    acc = LAYOUTS[left]()
    value = LAYOUTS[left]()
    if copied:
        value = value.contiguous()
    got = _ops.reversible_add(acc, value)
    assert torch.equal(got, acc + value)
    assert got.stride() == torch.empty_like(acc).stride()
    meta = _ops.reversible_add(acc.to("meta"), value.to("meta"))
    assert (meta.shape, meta.dtype) == (got.shape, got.dtype)


def test_arguments_are_not_changed_and_nothing_is_shared():
    acc, value = torch.randn(2, 5).unbind()
    before = acc.clone(), value.clone()
    _ops.reversible_sub(acc, value).zero_()
    assert torch.equal(acc, before[0]) and torch.equal(value, before[1])


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize(
    ("acc_dtype", "value_dtype"),
    [
        (torch.float64, torch.float64),
        (torch.complex128, torch.complex128),
        (torch.complex128, torch.float64),
    ],
)
def test_gradients(name, acc_dtype, value_dtype):
    op = OPS[name][0]
    acc = torch.randn(3, 4, dtype=acc_dtype, requires_grad=True)
    value = torch.randn(4, 3, dtype=value_dtype).t().requires_grad_()
    assert torch.autograd.gradcheck(op, (acc, value))
    assert torch.autograd.gradgradcheck(op, (acc, value))


@pytest.mark.parametrize(("acc_dtype", "value_dtype"), PAIRS, ids=str)
def test_gradients_are_cast_back(acc_dtype, value_dtype):
    acc = torch.randn(5, dtype=acc_dtype, requires_grad=True)
    value = torch.randn(5, dtype=value_dtype, requires_grad=True)
    grad = torch.randn(5, dtype=acc_dtype)
    _ops.reversible_sub(acc, value).backward(grad)
    assert torch.equal(acc.grad, grad)
    expected = grad if value.is_complex() or not grad.is_complex() else grad.real
    assert torch.equal(value.grad, -expected.to(value_dtype))


@pytest.mark.parametrize("name", OPS)
def test_opcheck(name):
    op = getattr(torch.ops.torch_sm3, name).default
    for acc_dtype, value_dtype in [
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.float64),
        (torch.complex64, torch.complex64),
    ]:
        for grad in (False, True):
            acc = torch.randn(3, 4, dtype=acc_dtype, requires_grad=grad)
            value = torch.randn(3, 4, dtype=value_dtype, requires_grad=grad)
            torch.library.opcheck(op, (acc, value))
    torch.library.opcheck(op, (torch.randn(6, 4).t(), torch.randn(4, 6)))


@pytest.mark.parametrize("name", OPS)
def test_errors(name):
    op, x = OPS[name][0], torch.randn(2, 3)
    with pytest.raises(ValueError, match=rf"{name}: expected the shape \[2, 3\]"):
        op(x, torch.randn(3))
    with pytest.raises(TypeError, match="expected a floating or complex accumulator"):
        op(torch.arange(3), torch.randn(3))
    with pytest.raises(TypeError, match=r"expected a floating value .* but got Long"):
        op(x, torch.zeros(2, 3, dtype=torch.long))
    with pytest.raises(TypeError, match="expected a floating value"):
        op(x, torch.zeros(2, 3, dtype=torch.cfloat))
    with pytest.raises(ValueError, match="device"):
        op(x, torch.empty(2, 3, device="meta"))


CAPABILITIES = """
import torch
from torch_sm3 import _ops
torch.manual_seed(0)
torch.set_num_threads(2)
out = []
for a in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
    for v in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        x, f = torch.randn(70001).to(a), torch.randn(70001).to(v)
        out.append(_ops.reversible_sub(x, f).double())
import hashlib
print(hashlib.sha256(torch.cat(out).numpy().tobytes()).hexdigest())
"""


def test_bits_do_not_depend_on_the_instruction_set():
    digests = set()
    for capability in ("scalar", "avx2", "avx512"):
        env = {**os.environ, "TORCH_SM3_CPU_CAPABILITY": capability}
        run = subprocess.run(
            [sys.executable, "-c", CAPABILITIES],
            env=env,
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        digests.add(run.stdout)
    assert len(digests) == 1
