# SPDX-License-Identifier: Apache-2.0
"""Seeds that are derived from seeds, without a generator."""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(key: int, counter: int) -> tuple[int, int, int, int]:
    r"""Return one block of Philox-4x32-10: four words of 32 random bits.

    Args:
        key: 64 bits, the low word first.
        counter: 128 bits, the low word first.

    Example:
        >>> from torch_sm3.reversible._seeds import philox
        >>> [hex(word) for word in philox(0, 0)]
        ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']

    Source: Salmon, Moraes, Dror and Shaw, *Parallel Random Numbers: As Easy as 1, 2,
    3*, SC 2011.
    """
    k0, k1 = key & _WORD, (key >> 32) & _WORD
    a, b, c, d = ((counter >> shift) & _WORD for shift in (0, 32, 64, 96))
    for _ in range(10):
        left, right = _MULTIPLIERS[0] * a, _MULTIPLIERS[1] * c
        a, b, c, d = (
            (right >> 32) ^ b ^ k0,
            right & _WORD,
            (left >> 32) ^ d ^ k1,
            (left & _WORD),
        )
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return a, b, c, d


def fold(seed: int, index: int) -> int:
    r"""Return the seed number ``index`` that descends from ``seed``.

    It is the first 64 bits, word 0 low, of the Philox block with key ``seed`` and
    counter ``index``; so it is never negative, and differs for every index.

    Args:
        seed: any integer; its lowest 64 bits count.
        index: at least 0.

    Example:
        >>> from torch_sm3.reversible._seeds import fold
        >>> fold(0, 0) == 0xE169C58D6627E8D5
        True
    """
    words = philox(seed, index)
    return words[0] | words[1] << 32


def random_seed() -> int:
    """Return a seed from one draw of the global CPU generator."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_())


def seed_tensor(seed: int, device: torch.device) -> Tensor:
    """Return the 64 bits of a seed as the key that the dropout operator takes."""
    seed &= (1 << 64) - 1
    signed = seed - (1 << 64) if seed >> 63 else seed
    return torch.tensor(signed, dtype=torch.int64, device=device)
