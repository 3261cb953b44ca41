# SPDX-License-Identifier: Apache-2.0
"""Ranks by generation of Megatron: a process imports one package of that name only."""

from __future__ import annotations

from helpers.pool import Pool, Pools


class StubPools:
    """Pools of ranks for one generation at a time."""

    def __init__(self) -> None:
        self._generation = ""
        self._pools = Pools()

    def __call__(self, generation: str, size: int) -> Pool:
        """Return ranks that import no other generation.

        Args:
            generation: a letter.
            size: number of ranks.
        """
        if generation != self._generation:
            self.close()
            self._generation, self._pools = generation, Pools()
        return self._pools(size)

    def close(self) -> None:
        """End all processes."""
        self._pools.close()
