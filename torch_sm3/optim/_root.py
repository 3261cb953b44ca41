# SPDX-License-Identifier: Apache-2.0
"""The correctly rounded square root, which ``torch.sqrt`` on the CPU is not."""

from __future__ import annotations

import torch
from torch import Tensor

# Splits a float64 into two halves of 26 bits, whose products are exact.
_SPLIT = 2.0**27 + 1.0
# Outside these bounds the exact square of the root would leave float64's range.
_SMALL, _LARGE = 2.0**-900, 2.0**1000


def square_root(x: Tensor) -> Tensor:
    """Return the root of ``x``, rounded once; differentiable.

    PyTorch's CPU build takes roots with MKL, which misses the nearest float32 in
    one case of six. CUDA's are right.

    Args:
        x: float32 or float64, no element negative.
    """
    if x.device.type != "cpu":
        return x.sqrt()
    if x.dtype == torch.float64:
        return _root_of_double(x)
    # A float32's root is at least 2^-50 of itself away from the middle between two
    # float32, and float64's root errs by 2^-52: the second rounding is harmless.
    return x.double().sqrt().to(x.dtype)


def _root_of_double(x: Tensor) -> Tensor:
    root = x.sqrt()
    return root + _correction(x.detach(), root.detach())


def _correction(x: Tensor, root: Tensor) -> Tensor:
    """Return -1, 0 or +1 unit in the last place of ``root``, which errs by one at most.

    With a = root and v its distance to the next number, a is too small iff
    x > (a + v/2)^2, that is x - a^2 > a v + v^2/4. All terms but the last are
    multiples of v^2, so that x - a^2 > a v says the same; alike on the other side.
    """
    # A power of two, its square for x: both are scaled exactly.
    scale = torch.ones_like(x)
    scale = scale.masked_fill(x < _SMALL, 2.0**100).masked_fill(x > _LARGE, 2.0**-100)
    a = root * scale
    above = torch.nextafter(a, torch.full_like(a, torch.inf)) - a
    below = a - torch.nextafter(a, torch.zeros_like(a))
    rest = _minus_square(x * (scale * scale), a)
    step = torch.where(rest > a * above, above, torch.zeros_like(a))
    step = torch.where(rest <= -(a * below), -below, step)
    # Zero, infinity and NaN are their own roots, and right.
    regular = (x > 0) & torch.isfinite(x)
    return torch.where(regular, step / scale, torch.zeros_like(a))


def _minus_square(x: Tensor, a: Tensor) -> Tensor:
    """Return x - a^2 rounded once, for a near the root of x (Dekker's product)."""
    square = a * a
    scaled = a * _SPLIT
    high = scaled - (scaled - a)
    low = a - high
    cross = high * low
    error = ((high * high - square) + cross + cross) + low * low
    return (x - square) - error
