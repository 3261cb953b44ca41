# SPDX-License-Identifier: Apache-2.0
"""Roundings to few bits, in NumPy, on the bits of float32."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from reference.sm3_options import Place

_WORD = 2**64


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % _WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % _WORD
    return z ^ (z >> 31)


def mix_bits(seed: int, step: int, place: Place, shape: Sequence[int]) -> np.ndarray:
    """Return 64 random bits per element, in whole numbers of any size."""
    key = _mix((_mix((_mix(seed) + step) % _WORD) + place.ordinal) % _WORD)
    numbers = place.numbers(shape)
    bits = [
        _mix((key + 0x9E3779B97F4A7C15 * (int(n) + 1)) % _WORD) for n in numbers.flat
    ]
    return np.array(bits, dtype=np.uint64).reshape(numbers.shape)


def nearest(x: np.ndarray, dtype: str) -> np.ndarray:
    """Round float32 to the nearest number of a 16-bit type, returned as float32."""
    x = np.asarray(x, dtype=np.float32)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16).astype(np.float32)
    bits = x.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    rounded = (rounded & np.uint32(0xFFFF0000)).view(np.float32)
    return np.where(np.isnan(x), np.float32(np.nan), rounded)


def stochastic(x: np.ndarray, random: np.ndarray) -> np.ndarray:
    """Round float32 to bfloat16 by adding 16 random bits and cutting 16 off."""
    x = np.asarray(x, dtype=np.float32)
    noise = (random & np.uint64(0xFFFF)).astype(np.uint32)
    bits = (x.view(np.uint32) + noise) & np.uint32(0xFFFF0000)
    kept = np.where(np.isinf(x), x, bits.view(np.float32))
    return np.where(np.isnan(x), np.float32(np.nan), kept)


def to_blocks(
    x: np.ndarray, random: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return int8 codes and the float32 scales of blocks of 256 along the last dim."""
    rows = np.atleast_1d(np.asarray(x, dtype=np.float32))
    codes = np.zeros(rows.shape, np.int8)
    scales = np.zeros((*rows.shape[:-1], -(-rows.shape[-1] // 256)), np.float32)
    random = None if random is None else random.reshape(rows.shape)
    for block in np.ndindex(scales.shape):
        part = (*block[:-1], slice(256 * block[-1], 256 * (block[-1] + 1)))
        values = rows[part]
        finite = np.isfinite(values)
        largest = np.abs(values[finite]).max(initial=np.float32(0))
        scale = np.float32(largest) / np.float32(127)
        scales[block] = scale
        if scale == 0:
            continue
        with np.errstate(invalid="ignore", over="ignore"):
            ratio = values / scale
        if random is None:
            whole = np.rint(ratio)
        else:
            upper = (random[part] >> np.uint64(16)) & np.uint64(0xFFFF)
            whole = np.floor(ratio + upper.astype(np.float32) * np.float32(2.0**-16))
        whole = np.where(finite, np.clip(whole, -127, 127), 0)
        codes[part] = whole.astype(np.int8)
    return codes.reshape(np.shape(x)), scales
