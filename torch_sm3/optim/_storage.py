# SPDX-License-Identifier: Apache-2.0
"""How results are rounded to fewer bits than they were computed with."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

#: Elements of the last dimension that share one scale of an int8 buffer.
BLOCK = 256


def round_stochastically(x: Tensor, bits: Tensor) -> Tensor:
    """Round float32 to bfloat16, up with the probability of the lost fraction.

    Args:
        x: float32.
        bits: random int64; the lower 16 bits are used.
    """
    noise = (bits & 0xFFFF).to(torch.int32)
    # The sum carries at most into infinity, never beyond, and infinity itself stays.
    upper = (x.view(torch.int32) + noise) >> 16
    rounded = upper.to(torch.int16).view(torch.bfloat16)
    return torch.where(torch.isnan(x), torch.full_like(rounded, torch.nan), rounded)


def decode_blocks(codes: Tensor, scales: Tensor) -> Tensor:
    """Return what an int8 buffer stands for, in float32."""
    blocks = _blocks(codes.to(torch.float32))
    return _unblock(blocks * scales.reshape(blocks.shape[:-1]).unsqueeze(-1), codes)


def encode_blocks(x: Tensor, bits: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return int8 codes and one float32 scale per block of 256 along the last dim.

    Args:
        x: float32, at least one element.
        bits: random int64 to round stochastically (bits 16 to 31 are used), or
            None to round to nearest.
    """
    blocks = _blocks(x)
    finite = torch.isfinite(blocks)
    largest = torch.where(finite, blocks, torch.zeros_like(blocks)).abs().amax(-1)
    # By a tensor: a number would become a multiplication with 1/127 on CUDA.
    scales = largest / torch.full_like(largest, 127.0)
    ratio = blocks / scales.unsqueeze(-1)
    if bits is None:
        codes = ratio.round()
    else:
        fraction = ((_blocks(bits) >> 16) & 0xFFFF).to(torch.float32) * 2.0**-16
        codes = (ratio + fraction).floor()
    kept = finite & (scales != 0).unsqueeze(-1)
    codes = torch.where(kept, codes.clamp(-127, 127), torch.zeros_like(codes))
    return _unblock(codes, x).to(torch.int8), scales


def _blocks(x: Tensor) -> Tensor:
    """Reshape to [..., blocks, 256], with zeros after the last element of a row."""
    rows = x if x.dim() else x.reshape(1)
    return pad(rows, (0, -rows.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))


def _unblock(blocks: Tensor, like: Tensor) -> Tensor:
    last = like.shape[-1] if like.dim() else 1
    return blocks.flatten(-2)[..., :last].reshape(like.shape)
