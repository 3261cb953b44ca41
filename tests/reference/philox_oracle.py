# SPDX-License-Identifier: Apache-2.0
"""Philox-4x32-10 and the dropout masks made of it, in NumPy, one element at a time.

Written from the paper of Salmon and others, SC 2011; slow on purpose.
"""

from __future__ import annotations

import math

import numpy as np

Array = np.ndarray


def block(key: int, counter: int) -> list[int]:
    """Return the four words of one block."""
    k = [key % 2**32, (key >> 32) % 2**32]
    x = [(counter >> (32 * i)) % 2**32 for i in range(4)]
    for _ in range(10):
        p0, p1 = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [
            (p1 // 2**32) ^ x[1] ^ k[0],
            p1 % 2**32,
            (p0 // 2**32) ^ x[3] ^ k[1],
            p0 % 2**32,
        ]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return x


def fold(seed: int, index: int) -> int:
    words = block(seed, index)
    return words[0] + 2**32 * words[1]


def kept(key: int, n: int, p: float) -> bool:
    """Tell whether dropout with rate ``p`` keeps the element number ``n``."""
    return block(key, n // 4)[n % 4] >= math.floor(p * 2**32)


def factors(key: int, indices: Array, p: float) -> Array:
    """Return, for each element number, 0 or ``1 / (1 - p)``."""
    flat = [kept(key, int(n), p) / (1 - p) if p < 1 else 0.0 for n in indices.ravel()]
    return np.array(flat).reshape(indices.shape)
