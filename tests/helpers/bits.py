# SPDX-License-Identifier: Apache-2.0
"""Bit patterns of tensors: what ``torch.equal`` does not tell apart."""

from __future__ import annotations

import torch
from torch import Tensor

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
SPECIAL = [0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan")]


def integers(x: Tensor) -> Tensor:
    """Return the same bits as integers, to be compared by ``torch.equal``."""
    return x.contiguous().view(INTEGERS[x.element_size()])


def patterns(x: Tensor) -> list[int]:
    """Return the bits of the elements in logical order, not negative."""
    width = 8 * x.element_size()
    return [b % 2**width for b in integers(x).flatten().tolist()]


def from_patterns(bits: list[int], dtype: torch.dtype) -> Tensor:
    """Return the floating tensor of these bits."""
    width = 8 * dtype.itemsize
    wrapped = [b - 2**width if b >> (width - 1) else b for b in bits]
    return torch.tensor(wrapped, dtype=INTEGERS[dtype.itemsize]).view(dtype)


def denormals(dtype: torch.dtype) -> Tensor:
    """Return the smallest numbers of a dtype and their largest subnormal."""
    tiny = torch.finfo(dtype).tiny
    tensor = torch.tensor([tiny, tiny], dtype=dtype)
    bits = integers(tensor)
    bits = torch.cat([bits[:1] - 1, torch.ones_like(bits[:1]), bits[:1]])
    return torch.cat([bits.view(dtype), -bits.view(dtype)])


# Ways in which the elements of a matrix may lie in memory.
LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t().contiguous().t(),
    "slice": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "steps": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "expanded": lambda x: x[:1].expand(x.shape),
}
