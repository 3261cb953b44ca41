# SPDX-License-Identifier: Apache-2.0
"""``reversible_dropout``: a mask that a seed and the elements' numbers decide."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.bits import FLOATS, LAYOUTS, integers
from helpers.instruction_sets import outputs
from reference import reversible_ops_oracle as oracle
from torch import Tensor

from torch_sm3 import _ops

SEEDS = [0, 1, -1, 2**40 + 3, -(2**63)]


def seed_of(number: int) -> Tensor:
    return torch.tensor(number)


def contiguous(shape) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def expected(x, p, seed, offset=0, strides=None) -> Tensor:
    """Return what the oracle's mask makes of ``x``."""
    strides = contiguous(x.shape) if strides is None else strides
    mask = torch.from_numpy(oracle.kept(x.shape, p, seed, offset, strides))
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    scale = torch.tensor(1 / (1 - p) if p < 1 else 0.0, dtype=torch.double).to(wide)
    scaled = (x.to(wide) * scale).to(x.dtype)
    return torch.where(mask, scaled, torch.zeros((), dtype=x.dtype))


def test_philox_gives_the_published_words():
    # Known answers of Random123, in kat_vectors: philox4x32 10.
    ones = 2**32 - 1
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0]
    for counter, key, words in [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([ones] * 4, [ones] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (pi[:4], pi[4:], [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
    ]:
        assert oracle.philox(counter, key) == words


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("offset", [0, 1, 2, 3, 1001, 2**34 - 2, 2**62 + 5])
def test_equals_the_oracle(seed, offset):
    x = torch.randn(7, 9)
    got = _ops.reversible_dropout(x, 0.4, seed_of(seed), offset)
    assert torch.equal(got, expected(x, 0.4, seed, offset))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("p", [0.0, 0.1, 0.3, 0.5, 0.999, 1.0])
def test_what_is_kept_is_scaled_and_rounded_once(dtype, p):
    x = torch.randn(700, dtype=torch.double).to(dtype)
    got = _ops.reversible_dropout(x, p, seed_of(5), 3)
    assert torch.equal(integers(got), integers(expected(x, p, 5, 3)))
    if p == 0:
        assert torch.equal(got, x)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_special_values(dtype):
    x = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 1.0], dtype=dtype)
    assert torch.equal(
        integers(_ops.reversible_dropout(x, 1.0, seed_of(1))),
        torch.zeros_like(integers(x)),
    )
    torch.testing.assert_close(
        _ops.reversible_dropout(x, 0.0, seed_of(1)), x, rtol=0, atol=0, equal_nan=True
    )


def test_the_share_that_is_dropped():
    x = torch.ones(1_000_000)
    for p in (0.01, 0.37, 0.9):
        dropped = (_ops.reversible_dropout(x, p, seed_of(9)) == 0).double().mean()
        # Five standard deviations.
        assert abs(dropped - p) < 5 * math.sqrt(p * (1 - p) / len(x))


STRIDES = {
    "transposed": (1, 5),
    "gaps": (400, 3),
    "one number for a row": (1, 0),
    "negative": (-9, -1),
    "large": (2**61, 2**33),
}


@pytest.mark.parametrize("strides", STRIDES.values(), ids=STRIDES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_numbers_of_elements_by_strides(strides, layout):
    x = LAYOUTS[layout](torch.randn(5, 9))
    got = _ops.reversible_dropout(x, 0.5, seed_of(4), 77, strides)
    assert torch.equal(got, expected(x, 0.5, 4, 77, strides))
    assert got.stride() == torch.empty_like(x).stride()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_mask_does_not_depend_on_the_layout(layout):
    x = LAYOUTS[layout](torch.randn(70, 90))
    assert torch.equal(
        _ops.reversible_dropout(x, 0.5, seed_of(4)),
        _ops.reversible_dropout(x.contiguous(), 0.5, seed_of(4)),
    )


def test_parts_are_dropped_as_in_the_whole():
    x = torch.randn(4, 6, 10, 12)
    seed = seed_of(31)
    whole = _ops.reversible_dropout(x, 0.3, seed, 1000)
    strides = x.stride()
    for part, first in [
        ((slice(1, 3), slice(2, 5), slice(0, 7), slice(3, 12)), (1, 2, 0, 3)),
        ((slice(0, 4), slice(0, 6), slice(0, 10), slice(5, 6)), (0, 0, 0, 5)),
    ]:
        start = 1000 + sum(i * s for i, s in zip(first, strides, strict=True))
        for piece in (x[part], x[part].transpose(1, 3)):
            turned = piece.shape != x[part].shape
            order = [0, 3, 2, 1] if turned else [0, 1, 2, 3]
            got = _ops.reversible_dropout(
                piece, 0.3, seed, start, [strides[d] for d in order]
            )
            assert torch.equal(got, whole[part].permute(order))


def test_many_dimensions():
    # Twelve that cannot be merged, which is as many as there may be.
    x = torch.randn([2] * 12).permute(*reversed(range(12)))
    seed = seed_of(8)
    assert torch.equal(
        _ops.reversible_dropout(x, 0.5, seed),
        _ops.reversible_dropout(x.contiguous(), 0.5, seed),
    )


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (1, 1, 1), (1, 4, 1)])
def test_small_shapes(shape):
    x = torch.randn(shape)
    got = _ops.reversible_dropout(x, 0.5, seed_of(2), 6)
    assert torch.equal(got, expected(x, 0.5, 2, 6)) and got.shape == x.shape
    meta = _ops.reversible_dropout(x.to("meta"), 0.5, seed_of(2).to("meta"))
    assert (meta.shape, meta.dtype) == (x.shape, x.dtype)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_threads(threads):
    x = torch.randn(301, 101)
    before = torch.get_num_threads()
    for offset, strides in [(3, None), (0, (1, 301))]:
        want = expected(x, 0.5, 12, offset, strides)
        try:
            torch.set_num_threads(threads)
            got = _ops.reversible_dropout(x, 0.5, seed_of(12), offset, strides)
        finally:
            torch.set_num_threads(before)
        assert torch.equal(got, want)


@pytest.mark.parametrize("strides", [None, (1, 4)])
def test_gradients_are_dropped_alike(strides):
    x = torch.randn(4, 6, requires_grad=True)
    grad = torch.randn(6, 4).t()
    seed = seed_of(3)
    y = _ops.reversible_dropout(x, 0.4, seed, 9, strides)
    (got,) = torch.autograd.grad(y, x, grad, create_graph=True)
    assert torch.equal(got, _ops.reversible_dropout(grad, 0.4, seed, 9, strides))
    double = torch.randn(3, 5, dtype=torch.double, requires_grad=True)

    def f(x):
        return _ops.reversible_dropout(x, 0.4, seed, 9)

    assert torch.autograd.gradcheck(f, [double])
    assert torch.autograd.gradgradcheck(f, [double])


def test_a_seed_that_was_changed_is_noticed():
    x, seed = torch.randn(5, requires_grad=True), torch.tensor([3])
    y = _ops.reversible_dropout(x, 0.5, seed)
    seed.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("strides", [None, [1, 4]])
def test_opcheck(grad, strides):
    op = torch.ops.torch_sm3.reversible_dropout.default
    for dtype in FLOATS:
        x = torch.randn(5, 4, dtype=dtype).t().requires_grad_(grad)
        torch.library.opcheck(op, (x, 0.5, torch.tensor([7]), 3, strides))
    torch.library.opcheck(op, (torch.randn(4, 5, requires_grad=grad), 0.1, seed_of(1)))


def test_no_generator_is_touched():
    before = torch.get_rng_state()
    _ops.reversible_dropout(torch.randn(100).detach(), 0.5, seed_of(1))
    state = torch.get_rng_state()
    torch.set_rng_state(before)
    torch.randn(100)
    assert torch.equal(torch.get_rng_state(), state)


def test_errors():
    name, x, seed = "reversible_dropout", torch.randn(2, 3), seed_of(1)
    drop = _ops.reversible_dropout
    for bad in (torch.zeros(3, dtype=torch.long), x.cfloat()):
        with pytest.raises(TypeError, match=rf"{name}: expected float16, .*'x'"):
            drop(bad, 0.5, seed)
    for p in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match=rf"{name}: .* from 0 to 1, .*'p'"):
            drop(x, p, seed)
    with pytest.raises(TypeError, match=rf"{name}: expected Long, .*Int .*'seed'"):
        drop(x, 0.5, seed.int())
    with pytest.raises(ValueError, match=rf"{name}: expected one element, .*'seed'"):
        drop(x, 0.5, torch.tensor([1, 2]))
    with pytest.raises(ValueError, match=rf"{name}: expected the device .*'seed'"):
        drop(x, 0.5, seed.to("meta"))
    with pytest.raises(ValueError, match=rf"{name}: .* >= 0, .*-1 .*'offset'"):
        drop(x, 0.5, seed, -1)
    with pytest.raises(ValueError, match=rf"{name}: .*each of 2 dim.*1 .*'strides'"):
        drop(x, 0.5, seed, 0, [1])
    with pytest.raises(ValueError, match=rf"{name}: expected at most 12 dimensions"):
        drop(torch.zeros([2] * 13), 0.5, seed, 0, [0, 1] * 6 + [0])


DIGEST = """
import hashlib
import torch
from torch_sm3 import _ops
torch.manual_seed(0)
digest = hashlib.sha256()
for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
    x = torch.randn(301, 103).to(dtype)
    for strides in (None, (1, 500)):
        y = _ops.reversible_dropout(x, 0.3, torch.tensor(99), 5, strides)
        digest.update(y.view(torch.uint8).numpy().tobytes())
print(digest.hexdigest())
"""


def test_bits_do_not_depend_on_the_instruction_set():
    assert len(outputs(DIGEST)) == 1
