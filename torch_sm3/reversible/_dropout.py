# SPDX-License-Identifier: Apache-2.0
"""Dropout by a counter, in Python."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF


def _multiply(factor: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the high and the low word of a product of two words."""
    low, high = (x & 0xFFFF) * factor, (x >> 16) * factor
    middle = (low >> 16) + (high & 0xFFFF)
    words = (high >> 16) + (middle >> 16), (low & 0xFFFF) | (middle & 0xFFFF) << 16
    return words[0] & _WORD, words[1] & _WORD


def reversible_dropout(
    x: Tensor,
    p: float,
    seed: Tensor,
    offset: int = 0,
    strides: Sequence[int] | None = None,
) -> Tensor:
    """Drop elements by Philox-4x32-10 with key ``seed``."""
    if strides is None:
        strides = torch.empty(x.shape, device="meta").stride()
    n = torch.full(x.shape, offset, dtype=torch.int64, device=x.device)
    for d, (size, stride) in enumerate(zip(x.shape, strides, strict=True)):
        shape = [1] * x.dim()
        shape[d] = size
        n = n + (torch.arange(size, device=x.device) * stride).view(shape)
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    a, b = (n >> 2) & _WORD, (n >> 34) & _WORD
    c = d_ = torch.zeros_like(n)
    for _ in range(10):
        h0, l0 = _multiply(0xD2511F53, a)
        h1, l1 = _multiply(0xCD9E8D57, c)
        a, b, c, d_ = h1 ^ b ^ k0, l1, h0 ^ d_ ^ k1, l0
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    word = torch.stack([a, b, c, d_]).gather(0, (n & 3)[None])[0]
    keep = word >= math.floor(p * 2**32)
    factor = 0.0 if p == 1 else 1 / (1 - p)
    return torch.where(keep, x * factor, torch.zeros_like(x))
