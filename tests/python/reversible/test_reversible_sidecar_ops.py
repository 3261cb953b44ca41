# SPDX-License-Identifier: Apache-2.0
"""Corrections bit for bit: ``reversible_sidecar_encode`` and ``_decode``."""

from __future__ import annotations

import pytest
import torch
from helpers.bits import (
    FLOATS,
    INTEGERS,
    LAYOUTS,
    SPECIAL,
    denormals,
    from_patterns,
    integers,
    patterns,
)
from helpers.instruction_sets import outputs
from reference import reversible_ops_oracle as oracle
from torch import Tensor

from torch_sm3 import _ops

TILE = oracle.TILE


def encode(
    x: Tensor, estimate: Tensor, byte_room: int | None = None, wide_room: int = -1
) -> list[Tensor]:
    """Encode with room for all escapes, or as much as is given."""
    byte_room = x.numel() if byte_room is None else byte_room
    wide_room = x.numel() if wide_room < 0 else wide_room
    return list(_ops.reversible_sidecar_encode(x, estimate, byte_room, wide_room))


def shrunk(parts: list[Tensor]) -> list[Tensor]:
    """Cut what is not used, as callers do to keep it."""
    codes, bytes_, wide, offsets, used = parts
    n, m = used.tolist()
    return [codes, bytes_.narrow(0, 0, n).clone(), wide[:m].clone(), offsets]


def neighbours(dtype: torch.dtype, count: int, far: float = 0.03) -> tuple:
    """Return numbers and estimates that differ by little, some by much."""
    x = torch.randn(count, dtype=torch.double).to(dtype)
    step = torch.randint(-1, 2, (count,), dtype=INTEGERS[dtype.itemsize])
    estimate = (integers(x) + step).view(dtype)
    away = torch.rand(count) < far
    estimate[away] *= 1 + torch.randn(int(away.sum())).to(dtype) * 2**-6
    return x, estimate


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("count", [1, 3, 4, 5, TILE - 1, TILE, TILE + 1, 3 * TILE + 9])
def test_equals_the_oracle(dtype, count):
    x, estimate = neighbours(dtype, count)
    width = 8 * dtype.itemsize
    codes, bytes_, wide, offsets = oracle.sidecar_encode(
        patterns(x), patterns(estimate), width
    )
    got = encode(x, estimate)
    n, m = len(bytes_), len(wide)
    assert got[0].tolist() == codes
    assert got[1].tolist() == bytes_ + [0] * (count - n)
    assert got[2].tolist() == wide + [0] * (count - m)
    assert got[3].tolist() == offsets
    assert got[4].tolist() == [n, m]
    decoded = oracle.sidecar_decode(patterns(estimate), codes, bytes_, wide, width)
    assert decoded == patterns(x)
    back = _ops.reversible_sidecar_decode(estimate, *shrunk(got))
    assert patterns(back) == decoded


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_bit_pattern_against_others(dtype):
    x = from_patterns(list(range(2**16)), dtype)
    for shift in (0, 1, 127, 128, 129, 0x7FFF, 0x8000, 0xFF81):
        estimate = from_patterns([(i + shift) % 2**16 for i in range(2**16)], dtype)
        parts = shrunk(encode(x, estimate))
        assert torch.equal(
            integers(_ops.reversible_sidecar_decode(estimate, *parts)), integers(x)
        )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_special_values_against_each_other(dtype):
    nan = integers(torch.tensor([float("nan")] * 2, dtype=dtype))
    payloads = (nan + torch.tensor([5, 9], dtype=nan.dtype)).view(dtype)
    special = torch.cat(
        [torch.tensor(SPECIAL, dtype=dtype), denormals(dtype), payloads, -payloads]
    )
    n = len(special)
    x, estimate = special.repeat_interleave(n), special.repeat(n)
    parts = shrunk(encode(x, estimate))
    back = _ops.reversible_sidecar_decode(estimate, *parts)
    assert torch.equal(integers(back), integers(x))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_zeros_of_both_signs_are_neighbours(dtype):
    x = torch.tensor([-0.0, 0.0], dtype=dtype)
    assert encode(x, -x)[0].tolist() == [0b0110]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_residual_that_is_undone_costs_little(dtype):
    x, f = torch.randn(2, 200_000, dtype=torch.double).to(dtype).unbind()
    estimate = _ops.reversible_sub(_ops.reversible_add(x, f / 8), f / 8)
    parts = shrunk(encode(x, estimate))
    bits = 8 * sum(p.numel() * p.element_size() for p in parts)
    assert bits / x.numel() <= 3.25
    back = _ops.reversible_sidecar_decode(estimate, *parts)
    assert torch.equal(integers(back), integers(x))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("room", [1.0, 0.5, 0.0])
def test_any_number_of_threads(dtype, threads, room):
    x, estimate = neighbours(dtype, 40 * TILE + 5, far=0.2)
    before = torch.get_num_threads()
    width = 8 * dtype.itemsize
    full = oracle.sidecar_encode(patterns(x), patterns(estimate), width)
    n, m = len(full[1]), len(full[2])
    byte_room, wide_room = int(n * room), int(m * room)
    try:
        torch.set_num_threads(threads)
        parts = encode(x, estimate, byte_room, wide_room)
        if room == 1:
            back = _ops.reversible_sidecar_decode(estimate, *parts[:4])
            assert torch.equal(integers(back), integers(x))
        else:
            with pytest.raises(ValueError, match="expected the escapes of all codes"):
                _ops.reversible_sidecar_decode(estimate, *parts[:4])
    finally:
        torch.set_num_threads(before)
    # What was needed is told; what has room is the same for any number of threads.
    assert parts[4].tolist() == [n, m]
    assert parts[1].tolist() == full[1][:byte_room]
    assert parts[2].tolist() == full[2][:wide_room]
    assert parts[0].tolist() == full[0] and parts[3].tolist() == full[3]


@pytest.mark.parametrize("left", LAYOUTS)
@pytest.mark.parametrize("right", LAYOUTS)
def test_layouts(left, right):
    x, noise = torch.randn(2, 90, 70).unbind()
    x, estimate = LAYOUTS[left](x), LAYOUTS[right](x + noise * 1e-6)
    parts = shrunk(encode(x, estimate))
    # A rebuilt stream lies in memory as the dense stream that it was.
    rebuilt = torch.empty_like(x).copy_(estimate)
    back = _ops.reversible_sidecar_decode(rebuilt, *parts)
    assert torch.equal(back, x) and back.stride() == rebuilt.stride()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1, 1)])
def test_small_shapes(shape):
    x = torch.randn(shape)
    parts = encode(x, x * 3, 9, 7)
    n = x.numel()
    assert [tuple(p.shape) for p in parts] == [(n,), (9,), (7,), (n, 2), (2,)]
    assert torch.equal(_ops.reversible_sidecar_decode(x * 3, *parts[:4]), x)
    meta = encode(x.to("meta"), x.to("meta"), 9, 7)
    assert [(p.shape, p.dtype) for p in meta] == [(p.shape, p.dtype) for p in parts]


def test_sizes_stay_symbols_when_exported():
    class Both(torch.nn.Module):
        def forward(self, x, estimate):
            n = x.numel()
            encoded = torch.ops.torch_sm3.reversible_sidecar_encode(
                x, estimate, n // 8, n // 256
            )
            return torch.ops.torch_sm3.reversible_sidecar_decode(estimate, *encoded[:4])

    # Two tiles or more: torch takes sizes of one for fixed.
    rows = torch.export.Dim("rows", min=17, max=4096)
    x = torch.randn(64, 256)
    program = torch.export.export(
        Both(), (x, x), dynamic_shapes={"x": {0: rows}, "estimate": {0: rows}}
    )
    y = torch.randn(128, 256)
    assert torch.equal(program.module()(y, y), y)


def test_gradients_are_refused():
    x = torch.randn(4, requires_grad=True)
    parts = encode(x.detach(), x.detach())
    out = _ops.reversible_sidecar_decode(x, *parts[:4])
    with pytest.raises(RuntimeError, match="not implemented"):
        out.sum().backward()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("count", [0, 5, 2 * TILE])
def test_opcheck(dtype, count):
    x, estimate = neighbours(dtype, count)
    ops = torch.ops.torch_sm3
    torch.library.opcheck(
        ops.reversible_sidecar_encode.default, (x, estimate, count, count)
    )
    torch.library.opcheck(
        ops.reversible_sidecar_decode.default, (estimate, *encode(x, estimate)[:4])
    )


def test_errors_of_encoding():
    x = torch.randn(2, 3)
    name = "reversible_sidecar_encode"
    with pytest.raises(TypeError, match=rf"{name}: expected float16, .* got Long"):
        encode(torch.arange(3), torch.arange(3))
    with pytest.raises(TypeError, match=rf"{name}: expected float16, .*Complex"):
        encode(x.cfloat(), x.cfloat())
    with pytest.raises(TypeError, match=rf"{name}: expected the dtype Float, .*Half"):
        encode(x, x.half())
    with pytest.raises(ValueError, match=rf"{name}: expected the shape \[2, 3\]"):
        encode(x, x.t())
    with pytest.raises(ValueError, match=rf"{name}: expected the device"):
        encode(x, x.to("meta"))
    with pytest.raises(ValueError, match=rf"{name}: .*-1 \(argument 'byte_capacity'\)"):
        _ops.reversible_sidecar_encode(x, x, -1, 0)
    with pytest.raises(ValueError, match=rf"{name}: .*-2 \(argument 'wide_capacity'\)"):
        _ops.reversible_sidecar_encode(x, x, 0, -2)


def test_errors_of_decoding():
    x, estimate = neighbours(torch.float32, TILE + 1, far=0.5)
    good = encode(x, estimate)[:4]
    name = "reversible_sidecar_decode"

    def fails(error, match, index=None, part=None, estimate=estimate):
        parts = [part if i == index else p for i, p in enumerate(good)]
        with pytest.raises(error, match=match):
            _ops.reversible_sidecar_decode(estimate, *parts)

    fails(ValueError, rf"{name}: expected the shape \[1025\].*'codes'", 0, good[0][:-1])
    fails(ValueError, rf"{name}: expected the shape \[2, 2\]", 3, good[3][:1])
    fails(ValueError, rf"{name}: expected one dimension", 1, good[1][None])
    fails(TypeError, rf"{name}: expected Char, but got Byte", 1, good[1].byte())
    fails(TypeError, rf"{name}: expected Int, but got Long", 2, good[2].long())
    fails(TypeError, rf"{name}: expected Short, .*'wide'", estimate=estimate.half())
    fails(TypeError, rf"{name}: expected float16, .*'estimate'", estimate=x.long())
    fails(ValueError, rf"{name}: expected the device", 0, good[0].to("meta"))
    fails(ValueError, "expected the escapes of all codes", 1, good[1][:10])
    fails(ValueError, "expected the escapes of all codes", 2, good[2][:0])
    fails(ValueError, "expected the escapes of all codes", 3, good[3] - 5000)
    fails(ValueError, "expected the escapes of all codes", 3, good[3] + 2**62)


DIGEST = """
import hashlib
import torch
from torch_sm3 import _ops
torch.manual_seed(0)
digest = hashlib.sha256()
for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
    x, f = torch.randn(2, 70001).to(dtype).unbind()
    y = (x + f) - f
    parts = _ops.reversible_sidecar_encode(x, y, 70001, 70001)
    back = _ops.reversible_sidecar_decode(y, *parts[:4])
    assert torch.equal(back, x)
    for part in parts:
        digest.update(part.numpy().tobytes())
print(digest.hexdigest())
"""


def test_bits_do_not_depend_on_the_instruction_set():
    assert len(outputs(DIGEST)) == 1
