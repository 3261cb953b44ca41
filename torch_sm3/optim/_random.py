# SPDX-License-Identifier: Apache-2.0
"""Counter-based random numbers: a function of seed, step, parameter and element.

They do not depend on threads, tiles or shards, and leave torch's generators alone.
The arithmetic is that of uint64; torch's int64 wraps around to the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_sm3.optim._batch import Place

_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64


def _shift(z: Tensor, bits: int) -> Tensor:
    """Shift right as an unsigned number."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift(z, 30)) * _FIRST
    z = (z ^ _shift(z, 27)) * _SECOND
    return z ^ _shift(z, 31)


def random_bits(seed: int, step: Tensor, ordinal: int, numbers: Tensor) -> Tensor:
    """Return 64 random bits for each element.

    Args:
        seed: of the run.
        step: int64 scalar, the count after this step.
        ordinal: of the parameter.
        numbers: int64, the elements' numbers in the whole parameter.
    """
    start = torch.full_like(step, seed)
    key = _mix(_mix(_mix(start) + step) + ordinal)
    return _mix((numbers + 1) * _GOLDEN + key)


def element_numbers(shape: torch.Size, place: Place, device: torch.device) -> Tensor:
    """Return every element's number in the whole parameter, of ``shape``."""
    numbers = torch.full((1,) * len(shape), place.start, device=device)
    for dim, (size, stride) in enumerate(zip(shape, place.strides, strict=True)):
        along = torch.arange(size, device=device) * stride
        numbers = numbers + along.reshape(
            [-1 if d == dim else 1 for d in range(len(shape))]
        )
    return numbers
