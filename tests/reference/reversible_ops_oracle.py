# SPDX-License-Identifier: Apache-2.0
"""The operators of the exact modes the slow way: Python integers and fractions.

One element after the other, written for reading. Tensors come as NumPy arrays;
bfloat16, which NumPy has not, as the integers of its bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import product

import numpy as np

Array = np.ndarray

# --- grid ------------------------------------------------------------------


def quantize(x: float, bits: int, precision: int) -> float:
    """Return the multiple of ``2**-bits`` nearest to ``x``, ties to even."""
    if not np.isfinite(x) or abs(x) >= 2.0 ** (precision - 1 - bits):
        return x
    # Python rounds fractions to even; adding zero makes -0 to +0.
    return float(round(Fraction(x) * 2**bits) / Fraction(2) ** bits) + 0.0


# --- sidecar ---------------------------------------------------------------

TILE = 4096


def ordered(bits: int, width: int) -> int:
    """Return the bits of a float as an integer, modulo 2**width, in its order."""
    if bits >> (width - 1):
        return bits ^ (2 ** (width - 1) - 1)
    return bits


def signed(value: int, width: int) -> int:
    """Return ``value`` modulo 2**width as two's complement."""
    value %= 2**width
    return value - 2**width if value >= 2 ** (width - 1) else value


def sidecar_encode(
    x: Sequence[int], estimate: Sequence[int], width: int
) -> tuple[list[int], list[int], list[int], list[list[int]]]:
    """Return codes of bytes, bytes, wide numbers and offsets of unlimited room."""
    codes, bytes_, wide, offsets = [], [], [], []
    for i, (a, b) in enumerate(zip(x, estimate, strict=True)):
        if i % TILE == 0:
            offsets.append([len(bytes_), len(wide)])
        e = signed(ordered(a, width) - ordered(b, width), width)
        codes.append({0: 0, 1: 1, -1: 2}.get(e, 3))
        if abs(e) > 1:
            fits = -128 < e < 128
            bytes_.append(e if fits else -128)
            if not fits:
                wide.append(e)
    codes += [0] * (-len(codes) % 4)
    packed = [
        sum(code << (2 * k) for k, code in enumerate(codes[i : i + 4]))
        for i in range(0, len(codes), 4)
    ]
    return packed, bytes_, wide, offsets


def sidecar_decode(
    estimate: Sequence[int],
    packed: Sequence[int],
    bytes_: Iterable[int],
    wide: Iterable[int],
    width: int,
) -> list[int]:
    """Return the bits that were encoded; escapes are read from front to back."""
    bytes_, wide = iter(bytes_), iter(wide)
    result = []
    for i, b in enumerate(estimate):
        code = packed[i // 4] >> (2 * (i % 4)) & 3
        e = {0: 0, 1: 1, 2: -1}.get(code)
        if e is None:
            e = next(bytes_)
            if e == -128:
                e = next(wide)
        result.append(ordered((ordered(b, width) + e) % 2**width, width))
    return result


# --- checksum --------------------------------------------------------------

WORD = 2**64
GOLDEN = 0x9E3779B97F4A7C15


def mix(z: int) -> int:
    """Return the last step of splitmix64."""
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % WORD
    z = (z ^ z >> 27) * 0x94D049BB133111EB % WORD
    return z ^ z >> 31


def checksum(bits: Iterable[int]) -> int:
    """Return the checksum of elements in logical order, as a signed number."""
    total = sum(mix((b + GOLDEN * (i + 1)) % WORD) for i, b in enumerate(bits))
    return signed(total, 64)


# --- dropout ---------------------------------------------------------------


def philox(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Return Philox-4x32-10 of four counter words and two key words."""
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [
            b >> 32 ^ c[1] ^ k[0],
            b % 2**32,
            a >> 32 ^ c[3] ^ k[1],
            a % 2**32,
        ]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def kept(
    shape: Sequence[int], p: float, seed: int, offset: int, strides: Sequence[int]
) -> Array:
    """Return which elements dropout keeps."""
    key = [seed % 2**32, seed >> 32 & (2**32 - 1)]
    result = np.empty(shape, dtype=bool)
    for index in product(*map(range, shape)):
        n = (offset + sum(i * s for i, s in zip(index, strides, strict=True))) % WORD
        block = n >> 2
        word = philox([block % 2**32, block >> 32, 0, 0], key)[n & 3]
        result[index] = word >= int(Fraction(p) * 2**32)
    return result


# --- affine ----------------------------------------------------------------


def log_scale(r: Array, clamp: float) -> tuple[Array, Array]:
    """Return s = clamp * tanh(r / clamp) and its derivative."""
    # The derivative 1 - tanh^2, without its cancellation.
    return clamp * np.tanh(r / clamp), 1 / np.cosh(r / clamp) ** 2


def affine(a: Array, r: Array, t: Array, clamp: float) -> Array:
    return a * np.exp(log_scale(r, clamp)[0]) + t


def affine_inverse(y: Array, r: Array, t: Array, clamp: float) -> Array:
    return (y - t) * np.exp(-log_scale(r, clamp)[0])


def affine_backward(g: Array, a: Array, r: Array, clamp: float) -> tuple[Array, Array]:
    s, slope = log_scale(r, clamp)
    return g * np.exp(s), g * a * np.exp(s) * slope
