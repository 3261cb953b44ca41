# SPDX-License-Identifier: Apache-2.0
"""``reversible_checksum``: bits and order of all elements in one number."""

from __future__ import annotations

import pytest
import torch
from helpers.bits import FLOATS, LAYOUTS, SPECIAL, denormals, patterns
from helpers.instruction_sets import outputs
from reference import reversible_ops_oracle as oracle

from torch_sm3 import _ops


def test_the_mixing_is_that_of_splitmix64():
    # What splitmix64 gives first from the state 1234567, as published; the state
    # grows by the golden number before each.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    for i, number in enumerate(published):
        state = oracle.signed(1234567 + i * oracle.GOLDEN, 64)
        got = _ops.reversible_checksum(torch.tensor([state]))
        assert got.item() == oracle.signed(number, 64)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_equals_the_oracle(dtype):
    special = torch.tensor(SPECIAL, dtype=dtype)
    for x in (torch.randn(3, 41, 7).to(dtype), special, denormals(dtype)):
        got = _ops.reversible_checksum(x)
        assert got.dtype == torch.int64 and got.shape == ()
        assert got.item() == oracle.checksum(patterns(x))


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
)
def test_integers_count_by_their_bits(dtype):
    x = torch.randint(0, 100, (50,)).to(dtype) - 50
    width = 8 * x.element_size()
    bits = [b % 2**width for b in x.tolist()]
    assert _ops.reversible_checksum(x).item() == oracle.checksum(bits)


def test_bool_and_complex():
    x = torch.rand(9) < 0.5
    assert _ops.reversible_checksum(x).item() == oracle.checksum(map(int, x.tolist()))
    for dtype in (torch.cfloat, torch.cdouble):
        z = torch.randn(4, 5, dtype=dtype)
        real = torch.view_as_real(z)
        assert torch.equal(_ops.reversible_checksum(z), _ops.reversible_checksum(real))
        assert torch.equal(
            _ops.reversible_checksum(z.conj()),
            _ops.reversible_checksum(z.conj().resolve_conj()),
        )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_for_any_strides(layout):
    x = LAYOUTS[layout](torch.randn(12, 20))
    assert torch.equal(
        _ops.reversible_checksum(x), _ops.reversible_checksum(x.contiguous())
    )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_same_for_any_number_of_threads(dtype, threads):
    x = torch.randn(150_001).to(dtype)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        got = _ops.reversible_checksum(x)
    finally:
        torch.set_num_threads(before)
    assert got.item() == oracle.checksum(patterns(x))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_bit_and_every_place_counts(dtype):
    x = torch.randn(64).to(dtype)
    sums = {_ops.reversible_checksum(x).item()}
    for i in range(64):
        y = x.clone()
        y.view(torch.uint8)[i * x.element_size()] ^= 1
        sums.add(_ops.reversible_checksum(y).item())
        sums.add(_ops.reversible_checksum(x.roll(i + 1)).item())
    # The last roll is the whole circle.
    assert len(sums) == 1 + 64 + 63
    minus = torch.zeros(3, dtype=dtype)
    assert not torch.equal(
        _ops.reversible_checksum(minus), _ops.reversible_checksum(-minus)
    )


def test_nothing_and_one_number():
    assert _ops.reversible_checksum(torch.zeros(0, 3)).item() == 0
    x = torch.tensor(1.5)
    assert _ops.reversible_checksum(x).item() == oracle.checksum(patterns(x[None]))


def test_there_is_no_gradient():
    x = torch.randn(3, requires_grad=True)
    assert not _ops.reversible_checksum(x).requires_grad
    with pytest.raises(NotImplementedError):
        _ops.reversible_checksum(x.detach().to_sparse())


@pytest.mark.parametrize("grad", [False, True])
def test_opcheck(grad):
    op = torch.ops.torch_sm3.reversible_checksum.default
    for dtype in FLOATS:
        x = torch.randn(6, 5).to(dtype).t().requires_grad_(grad)
        torch.library.opcheck(op, (x,))
    torch.library.opcheck(op, (torch.zeros(0, requires_grad=grad),))
    meta = op(torch.zeros(3, device="meta"))
    assert meta.shape == () and meta.dtype == torch.int64


DIGEST = """
import torch
from torch_sm3 import _ops
torch.manual_seed(0)
for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int8):
    print(_ops.reversible_checksum((torch.randn(70001) * 9).to(dtype)).item())
"""


def test_bits_do_not_depend_on_the_instruction_set():
    assert len(outputs(DIGEST)) == 1
