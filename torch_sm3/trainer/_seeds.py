# SPDX-License-Identifier: Apache-2.0
"""Seeds of ranks, layers and microbatches, all folded from one seed of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
# The golden ratio and sqrt(3) - 1, as fractions of 2^32.
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox(key: int, counter: int) -> tuple[int, int, int, int]:
    """Return the four words of Philox-4x32-10.

    Args:
        key: 64 bits, the low word first.
        counter: 128 bits, the low word first.

    Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011.
    """
    k0, k1 = key & _WORD, key >> 32 & _WORD
    c0, c1, c2, c3 = (counter >> shift & _WORD for shift in (0, 32, 64, 96))
    for _ in range(_ROUNDS):
        left, right = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1 = (right >> 32) ^ c1 ^ k0, right & _WORD
        c2, c3 = (left >> 32) ^ c3 ^ k1, left & _WORD
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def fold(seed: int, index: int) -> int:
    """Return the seed of the part ``index`` of what ``seed`` is for, 64 bits."""
    low, high, _, _ = philox(seed, index)
    return low | high << 32


def draw(op: str, rng: int | torch.Generator | None) -> int:
    """Return the seed of a step.

    Args:
        op: how messages call the caller.
        rng: the seed, or a generator to draw it from; None is the global one of the
            CPU.

    Raises:
        TypeError: for another type.
    """
    if isinstance(rng, int) and not isinstance(rng, bool):
        return rng & (1 << 64) - 1
    if rng is not None and not isinstance(rng, torch.Generator):
        raise TypeError(
            f"{op}: expected an int, a torch.Generator or None, but got "
            f"{type(rng).__name__} (argument 'rng')"
        )
    device = "cpu" if rng is None else rng.device
    seed = torch.empty((), dtype=torch.int64, device=device).random_(generator=rng)
    return int(seed)


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Run with the generators of the CPU and of a device set to a seed.

    Args:
        seed: for all of them.
        device: where layers run. Its generator and the CPU's are restored afterwards.
    """
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index])
    before = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)
