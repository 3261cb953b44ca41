# SPDX-License-Identifier: Apache-2.0
"""Chunks of a sequence, and the windows of chunks that they attend."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


class Windows:
    r"""The geometry of chunked attention over a sequence.

    Positions are cut into chunks of ``chunk_len``, the last one filled up. Chunk
    :math:`c` attends the chunks that exist in :math:`[c - b, c + a]`.

    Args:
        length: number of positions.
        chunk_len: positions of a chunk; None for one chunk of all.
        before: number of earlier chunks that a chunk attends.
        after: number of later ones.
    """

    def __init__(
        self, length: int, chunk_len: int | None, before: int, after: int
    ) -> None:
        self.length = length
        self.chunk_len = max(length, 1) if chunk_len is None else chunk_len
        self.n_chunks = max(-(-length // self.chunk_len), 1)
        self.padded = self.n_chunks * self.chunk_len
        # Chunks farther away than the whole sequence never exist.
        self.before = min(before, self.n_chunks - 1)
        self.after = min(after, self.n_chunks - 1)
        self.width = (self.before + 1 + self.after) * self.chunk_len

    def pad(self, x: Tensor) -> Tensor:
        """Fill ``(…, length, d)`` up to whole chunks, with zeros."""
        if self.padded == self.length:
            return x
        return functional.pad(x, (0, 0, 0, self.padded - self.length))

    def chunks(self, x: Tensor) -> Tensor:
        """Cut ``(…, padded, d)`` into ``(…, n_chunks, chunk_len, d)``."""
        return x.unflatten(-2, (self.n_chunks, self.chunk_len))

    def join(self, x: Tensor) -> Tensor:
        """Undo :meth:`chunks` and :meth:`pad`."""
        return x.flatten(-3, -2).narrow(-2, 0, self.length)

    def neighbours(self, x: Tensor, fill: float = 0) -> Tensor:
        """Return the window of each chunk, ``(…, n_chunks, width, d)``.

        Args:
            x: chunks.
            fill: stands in chunks that do not exist.
        """
        if self.before == self.after == 0:
            return x
        x = functional.pad(x, (0, 0, 0, 0, self.before, self.after), value=fill)
        shifts = range(self.before + 1 + self.after)
        return torch.cat([x.narrow(-3, i, self.n_chunks) for i in shifts], dim=-2)

    def positions(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the position of each query and of each key of its window.

        Keys of chunks that do not exist are at negative positions or beyond the end.

        Returns:
            Shapes ``(n_chunks, chunk_len)`` and ``(n_chunks, width)``.
        """
        first = torch.arange(self.n_chunks, device=device)[:, None] * self.chunk_len
        queries = first + torch.arange(self.chunk_len, device=device)
        keys = first + torch.arange(self.width, device=device)
        return queries, keys - self.before * self.chunk_len


def forbid_(scores: Tensor, forbidden: Tensor) -> Tensor:
    """Give forbidden keys the lowest finite score, so that no row yields a NaN.

    In place, which autograd allows on the result of a product.
    """
    return scores.masked_fill_(forbidden, torch.finfo(scores.dtype).min)
