# SPDX-License-Identifier: Apache-2.0
"""What Horovod tests of its Adasum, by the pure operators and for every world size.

Horovod compares parallel and orthogonal gradients with their mean and sum. Here each
result is also compared, element by element, with the slow oracle.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.adasum_pure import (
    DTYPES,
    ETA,
    WORLDS,
    as_rows,
    assert_near_oracle,
    combine,
)
from reference import adasum_oracle

from torch_sm3 import _ops

LONG = 2**19

worlds = pytest.mark.parametrize("p", WORLDS)
dtypes = pytest.mark.parametrize("dtype", DTYPES)


def lengths(p: int, first: int) -> list[int]:
    """Return the lengths of the four tensors that are in flight together."""
    return [20 * p - first, 2 * p + 1, p + 2, LONG]


def orthogonal(p: int, size: int, draw: np.random.RandomState) -> torch.Tensor:
    """Return p orthogonal rows: columns of a QR decomposition."""
    if size < p:
        return torch.from_numpy(np.eye(p, size))
    return torch.from_numpy(np.linalg.qr(draw.normal(size=(size, p)))[0].T.copy())


def parallel(p: int, size: int, draw: np.random.RandomState) -> torch.Tensor:
    return torch.from_numpy(np.outer(draw.normal(size=p), draw.normal(size=size)))


def assert_near_closed_form(
    result: torch.Tensor, closed: np.ndarray, p: int, kappa: float
) -> None:
    """Check Horovod's own tolerance, widened where rounding spoils parallelism."""
    kind = torch.finfo(result.dtype)
    norm = np.sqrt((closed * closed).sum())
    error = as_rows(result) - closed
    smallest = np.longdouble(kind.smallest_normal) * kind.eps
    limit = max(100.0, kappa) * (kind.eps * norm + p * smallest * len(closed) ** 0.5)
    limit += 8 * p * ETA * kappa**2 * norm
    assert np.sqrt((error * error).sum()) <= limit


def check(layers: list[torch.Tensor], dtype: torch.dtype, divisor: int) -> None:
    """Combine all layers in one call and check each against both tolerances."""
    rounded = [layer.to(dtype) for layer in layers]
    sizes = [layer.shape[1] for layer in layers]
    together = combine(torch.cat(rounded, dim=1), sizes)
    for stack, result in zip(rounded, together.split(sizes), strict=True):
        p = len(stack)
        closed = as_rows(stack).sum(axis=0) / divisor
        if stack.shape[1] == LONG:
            # The oracle takes long; the condition is that of a part of the layer.
            kappa = adasum_oracle.kappa(as_rows(stack[:, :2000]))
        else:
            kappa = assert_near_oracle(stack, result).kappa
        assert_near_closed_form(result, closed, p, kappa)


@dtypes
@worlds
def test_orthogonal_gradients_are_added(p, dtype):
    draw = np.random.RandomState(2)
    check([orthogonal(p, n, draw) for n in lengths(p, 17)], dtype, 1)


@dtypes
@worlds
def test_parallel_gradients_are_averaged(p, dtype):
    draw = np.random.RandomState(2)
    check([parallel(p, n, draw) for n in lengths(p, 13)], dtype, p)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("p", [3, 8])
@pytest.mark.parametrize("kind", [orthogonal, parallel])
def test_long_gradients_equal_the_oracle(kind, p, dtype):
    stack = kind(p, LONG, np.random.RandomState(2)).to(dtype)
    assert_near_oracle(stack, combine(stack))


@dtypes
@worlds
def test_subnormal_gradients_are_averaged(p, dtype):
    """Horovod's "stability": every element below the normal range."""
    draw = np.random.RandomState(2)
    tiny = torch.finfo(dtype).tiny
    leaf = draw.normal(size=1024)
    # The factors stay apart from zero, where float16 has no bits left to be parallel.
    stack = torch.from_numpy(np.outer(draw.normal(size=p), leaf) * tiny).to(dtype)
    assert stack.any(dim=1).all()
    if dtype == torch.float64 and p > 1:
        # Its squares vanish; pair scales such leaves, and so does the exchange.
        stack = stack[:2]
        result = _ops.adasum_pair(stack[0], stack[1], [1024])
    else:
        result = combine(stack)
    kappa = assert_near_oracle(stack, result).kappa
    closed = as_rows(stack).sum(axis=0) / len(stack)
    assert_near_closed_form(result, closed, len(stack), kappa)


@dtypes
@worlds
def test_gradients_over_the_whole_range_are_averaged(p, dtype):
    """Horovod's "stability 2": factors from tiny to the root of the largest number."""
    draw = np.random.RandomState(2)
    kind = torch.finfo(dtype)
    count = 2 if dtype == torch.float64 and p > 1 else p
    largest, tiny = np.sqrt(np.longdouble(kind.max)), np.longdouble(kind.tiny)
    exponents = [((i + 1) / count, (count - i - 1) / count) for i in range(count)]
    factors = np.array([largest**up * tiny**down for up, down in exponents])
    draw.shuffle(factors)
    leaf = draw.normal(size=1024)
    stack = torch.from_numpy(np.outer(factors, leaf).astype("f8")).to(dtype)
    if count < p or (dtype == torch.float64 and p == 2):
        result = _ops.adasum_pair(stack[0], stack[1], [1024])
    else:
        result = combine(stack)
    want = adasum_oracle.combine(as_rows(stack))
    closed = as_rows(stack).sum(axis=0) / count
    assert_near_closed_form(result, closed, count, want.kappa)


@pytest.mark.parametrize("nodes", [None, 2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@worlds
def test_two_tensors_in_one_call(p, dtype, nodes):
    draw = np.random.RandomState(2)
    layers = [torch.from_numpy(draw.uniform(size=(p, 4))).to(dtype) for _ in range(2)]
    runs = None if nodes is None else [min(nodes, p - i) for i in range(0, p, nodes)]
    result = combine(torch.cat(layers, dim=1), [4, 4], nodes=runs)
    tolerance = 1e-3 if dtype == torch.float16 else 1e-6
    for stack, own in zip(layers, result.split(4), strict=True):
        want = adasum_oracle.combine(as_rows(stack), nodes=runs).vector.astype("f8")
        np.testing.assert_allclose(own.double().numpy(), want, rtol=tolerance)
