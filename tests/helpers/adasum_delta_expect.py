# SPDX-License-Identifier: Apache-2.0
"""What delta mode must do, from the changes that twins have made."""

from __future__ import annotations

import numpy as np
import torch
from reference.adasum_oracle import adasum

from torch_sm3 import _ops


def real(tensor):
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def combine(leaves, **options):
    """Combine float32 or float64 changes, by the pure ops."""
    stack = torch.stack([real(leaf) for leaf in leaves])
    rows = stack.reshape(len(leaves), stack[0].numel())
    size = [rows.shape[1]]
    c = _ops.adasum_coefficients(_ops.adasum_gram(rows, size), **options)
    total = _ops.adasum_combine(rows, c, size).view(stack.shape[1:])
    return torch.view_as_complex(total) if leaves[0].is_complex() else total


def numbers(tensor):
    return real(tensor).double().numpy().ravel().astype(np.longdouble)


def assert_rule(ranks, steps_of, **options):
    """The end of each step is round(start + combined changes) on every rank.

    Bit for bit with the library's own combination, and by the oracle within the
    rounding of changes, sum and result.
    """
    world = len(ranks)
    everyone = [steps_of(rank) for rank in ranks]
    assert len(everyone[0]) > 0
    for step in range(len(everyone[0])):
        starts, _, ends = everyone[0][step]
        for other in everyone[1:]:
            assert all(map(torch.equal, other[step][0], starts))
            assert all(map(torch.equal, other[step][2], ends))
        for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
            leaves = [rank[step][1][index] for rank in everyone]
            if world == 1 and options.get("scale", 1.0) == 1.0:
                continue
            change = combine(leaves, **options)
            assert torch.equal(end, rounded_sum(start, change))
            if not options and start.numel():
                assert_is_oracle(start, leaves, end)


def rounded_sum(start, change):
    """Return start + change in the dtype of start, rounded once."""
    wide = real(start).double() + real(change).double()
    if start.dtype not in (torch.float16, torch.bfloat16):
        return start + change
    # Of the numbers around it the nearest: a cast from float64 would round twice.
    near = wide.to(start.dtype)
    around = [
        near,
        *(
            torch.nextafter(near, torch.full_like(near, s))
            for s in (torch.inf, -torch.inf)
        ),
    ]
    errors = torch.stack([(x.double() - wide).abs() for x in around])
    return torch.stack(around).gather(0, errors.argmin(0, keepdim=True))[0]


def assert_is_oracle(start, leaves, end):
    """Within the rounding of the changes, of their combination, and of the sum."""
    want = numbers(start) + adasum([numbers(leaf) for leaf in leaves])
    unit = torch.finfo(end.dtype).eps
    largest = max(1.0, float(np.abs(numbers(start)).max()))
    np.testing.assert_allclose(numbers(end), want, rtol=unit, atol=4 * 2**-24 * largest)
