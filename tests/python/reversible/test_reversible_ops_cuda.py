# SPDX-License-Identifier: Apache-2.0
"""The tensor operators on a GPU, where there is one: the bits of the CPU, graphs.

Without a GPU the kernels run on the host, in
``tests/cpp/test_reversible_ops_on_host.cpp``.
"""

from __future__ import annotations

import pytest
import torch
from helpers.bits import FLOATS, SPECIAL, denormals, integers
from torch import Tensor

import torch_sm3
from torch_sm3 import _ops

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and torch_sm3.BUILD_INFO["cuda"]),
    reason="needs a GPU and a library built with CUDA",
)
SIZES = [0, 1, 5, 4096, 100_003]


def numbers(count: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    x = (torch.randn(count, dtype=torch.double) * scale).to(dtype)
    special = torch.cat([torch.tensor(SPECIAL, dtype=dtype), denormals(dtype)])
    n = min(count // 2, len(special))
    x[:n] = special[:n]
    return x


def assert_same(on_cpu: object, on_gpu: object) -> None:
    """Compare bits; one NaN is as good as another."""
    if isinstance(on_cpu, Tensor):
        on_cpu, on_gpu = (on_cpu,), (on_gpu,)
    for a, b in zip(on_cpu, on_gpu, strict=True):
        assert b.is_cuda
        b = b.cpu()
        if a.dtype in FLOATS:
            assert torch.equal(a.isnan(), b.isnan())
            a, b = (integers(x.masked_fill(x.isnan(), 0.0)) for x in (a, b))
        assert torch.equal(a, b)


def compare(op, *tensors, extra=()) -> None:
    """Call an operator on both devices, dense and with other strides."""
    assert_same(op(*tensors, *extra), op(*(t.cuda() for t in tensors), *extra))
    if tensors[0].numel() > 1 and tensors[0].dim() == 1:
        steps = [t.cuda().repeat_interleave(2)[::2] for t in tensors]
        assert_same(op(*tensors, *extra), op(*steps, *extra))


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("value_dtype", FLOATS, ids=str)
def test_grid(count, dtype, value_dtype):
    x, f = numbers(count, dtype, 100), numbers(count, value_dtype, 100)
    compare(_ops.reversible_quantize, x, extra=(9,))
    compare(_ops.reversible_grid_add, x, f, extra=(9,))
    compare(_ops.reversible_grid_sub, x, f, extra=(9,))


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_sidecar(count, dtype):
    x = numbers(count, dtype)
    estimate = (x * (1 + torch.randn(count).to(dtype) * 1e-7)).roll(count // 500)
    for room in (count, count // 20):
        compare(_ops.reversible_sidecar_encode, x, estimate, extra=(room, room))
    parts = _ops.reversible_sidecar_encode(x, estimate, count, count)[:4]
    on_gpu = [p.cuda() for p in parts]
    back = _ops.reversible_sidecar_decode(estimate.cuda(), *on_gpu)
    assert torch.equal(integers(back.cpu()), integers(x))


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("other", FLOATS, ids=str)
def test_affine(count, dtype, other):
    a, g = numbers(count, dtype), numbers(count, dtype)
    r, t = numbers(count, other, 5), numbers(count, other)
    compare(_ops.reversible_affine, a, r, t, extra=(2.0,))
    compare(_ops.reversible_affine_inverse, a, r, t, extra=(2.0,))
    compare(_ops.reversible_affine_backward, g, a, r, extra=(2.0,))


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8, torch.cfloat], ids=str)
def test_checksum(count, dtype):
    compare(_ops.reversible_checksum, (torch.randn(count) * 50).to(dtype))


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("offset", [0, 3])
def test_dropout(count, dtype, offset):
    x, seed = numbers(count, dtype), torch.tensor([2**50 + 1])
    for strides in (None, [1], [7]):
        assert_same(
            _ops.reversible_dropout(x, 0.3, seed, offset, strides),
            _ops.reversible_dropout(x.cuda(), 0.3, seed.cuda(), offset, strides),
        )


def test_a_captured_graph_reads_new_inputs_and_a_new_seed():
    x, f = torch.randn(2, 9000).unbind()
    seed = torch.tensor([1])
    on_gpu = [t.cuda() for t in (x, f, seed)]

    def everything(x: Tensor, f: Tensor, seed: Tensor) -> list[Tensor]:
        y = _ops.reversible_add(x, f)
        parts = _ops.reversible_sidecar_encode(x, y - f, 1125, 35)
        return [
            *_ops.reversible_grid_add(x, f, 12),
            *parts,
            _ops.reversible_sidecar_decode(y - f, *parts[:4]),
            _ops.reversible_affine(x, f, f, 2.0),
            _ops.reversible_checksum(x),
            _ops.reversible_dropout(x, 0.5, seed),
        ]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        everything(*on_gpu)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = everything(*on_gpu)
    for _ in range(3):
        x, f, seed = torch.randn(9000), torch.randn(9000) / 8, seed + 1
        for to, new in zip(on_gpu, (x, f, seed), strict=True):
            to.copy_(new)
        graph.replay()
        assert_same(everything(x, f, seed), results)
