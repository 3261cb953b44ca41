# SPDX-License-Identifier: Apache-2.0
"""Hashing of vectors into buckets, and the order in which buckets put them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from torch_sm3.reversible._attention_windows import Windows


def check_buckets(op: str, n_buckets: int | Sequence[int]) -> tuple[int, ...]:
    """Return the factors of the number of buckets.

    Raises:
        ValueError: if one is odd or below 2.
    """
    factors = (n_buckets,) if isinstance(n_buckets, int) else tuple(n_buckets)
    if not factors or any(f < 2 or f % 2 for f in factors):
        raise ValueError(
            f"{op}: expected an even number of at least 2, or a list of such, but got "
            f"{n_buckets} (argument 'n_buckets')"
        )
    return factors


def rotations(
    seed: int, n_heads: int, width: int, n_hashes: int, factors: Sequence[int]
) -> Tensor:
    """Return random directions, ``(n_heads, width, n_hashes, sum(factors) / 2)``.

    They are drawn on the CPU, by a generator of their own, so every device gets the
    same ones and no global generator moves.
    """
    generator = torch.Generator("cpu").manual_seed(seed & (1 << 63) - 1)
    shape = (n_heads, width, n_hashes, sum(factors) // 2)
    return torch.randn(shape, generator=generator, dtype=torch.float32)


def hash_vectors(x: Tensor, directions: Tensor, factors: Sequence[int]) -> Tensor:
    r"""Return the bucket of every vector in every round.

    For one factor :math:`f` and random directions :math:`R \in R^{d \times f/2}` it is
    :math:`\arg\max [xR; -xR]`: vectors at a small angle share it likely. Several
    factors are hashed one by one and are the digits of the bucket, the first one the
    least significant.

    Args:
        x: ``(examples, heads, length, d)``.
        directions: what :func:`rotations` returned, for these heads.
        factors: the factors of the number of buckets.

    Returns:
        int64 ``(examples, heads, n_hashes, length)``, below the product of ``factors``.
    """
    with torch.autocast(x.device.type, enabled=False):
        dtype = torch.promote_types(x.dtype, torch.float32)
        rotated = torch.einsum("ehld,hdrf->ehrlf", x.to(dtype), directions.to(dtype))
    buckets = torch.zeros(rotated.shape[:-1], dtype=torch.int64, device=x.device)
    base, start = 1, 0
    for factor in factors:
        part = rotated.narrow(-1, start, factor // 2)
        buckets += base * torch.cat([part, -part], -1).argmax(-1)
        base, start = base * factor, start + factor // 2
    return buckets


def mark_forbidden(
    buckets: Tensor, mask: Tensor | None, factors: Sequence[int]
) -> Tensor:
    """Put positions that may not be attended into a bucket of their own, the last.

    So they never change which chunk another position is in.
    """
    if mask is None:
        return buckets
    return buckets.masked_fill(~mask[:, None, None], math.prod(factors))


class Order:
    """The order that one slice's buckets put positions in, round by round.

    Args:
        buckets: ``(examples, heads, n_hashes, length)``.
        windows: of the sorted positions.
    """

    def __init__(self, buckets: Tensor, windows: Windows) -> None:
        self._windows = windows
        # Stable: equal buckets keep the order of the sequence.
        order = buckets.sort(stable=True, dim=-1).indices
        fill = torch.arange(windows.length, windows.padded, device=buckets.device)
        fill = fill.expand(*order.shape[:-1], len(fill))
        #: Position at every place: ``(examples, heads, n_hashes, padded)``.
        self.position = torch.cat([order, fill], -1)
        places = torch.arange(windows.padded, device=buckets.device)
        #: Place of every position.
        self.place = torch.empty_like(self.position).scatter_(
            -1, self.position, places.expand_as(self.position)
        )

    @property
    def queries(self) -> Tensor:
        """Position of every query, ``(…, n_hashes, n_chunks, chunk_len)``."""
        return self._windows.chunks(self.position[..., None])[..., 0]

    @property
    def keys(self) -> Tensor:
        """Position of every key of every window, ``(…, n_chunks, width)``.

        Keys of chunks that do not exist have the first position that no chunk has.
        """
        chunks = self._windows.chunks(self.position[..., None])
        return self._windows.neighbours(chunks, fill=self._windows.padded)[..., 0]

    def sort(self, x: Tensor) -> Tensor:
        """Return ``x``, ``(examples, heads, length, d)``, in chunks for every round.

        Shape ``(examples, heads, n_hashes, n_chunks, chunk_len, d)``.
        """
        x = self._windows.pad(x)[:, :, None].expand(
            -1, -1, self.position.shape[2], -1, -1
        )
        ordered: Tensor = _Reorder.apply(x, self.position, self.place)
        return self._windows.chunks(ordered)

    def unsort(self, x: Tensor) -> Tensor:
        """Return ``(examples, heads, n_hashes, length, d)`` from sorted chunks."""
        joined = x.flatten(-3, -2)
        back: Tensor = _Reorder.apply(joined, self.place, self.position)
        return back.narrow(-2, 0, self._windows.length)

    def unsort_places(self, x: Tensor) -> Tensor:
        """Return ``(examples, heads, n_hashes, padded)`` from a value per place."""
        return x.flatten(-2).gather(-1, self.place)

    def at(self, values: Tensor, positions: Tensor) -> Tensor:
        """Look values of positions, ``(examples, heads, n)``, up at ``positions``."""
        n_hashes = self.position.shape[2]
        values = values[:, :, None].expand(-1, -1, n_hashes, -1)
        return values.gather(-1, positions.flatten(3)).view(positions.shape)


class _Reorder(Function):
    """Permute rows; the gradient is permuted back, without a scatter's atomics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x.gather(-2, order[..., None].expand_as(x))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (back,) = ctx.saved_tensors
        return grads[0].gather(-2, back[..., None].expand_as(grads[0])), None, None


class SoftmaxWithLse(Function):
    r"""Softmax over the last dimension, and the logarithm of its denominator.

    With :math:`p = e^{s - l}` and :math:`l = \log \sum e^s` the gradient is
    :math:`g_s = p\,(g_p - \langle g_p, p\rangle + g_l)`; only :math:`p` is kept.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> tuple[Tensor, Tensor]:
        probs = torch.softmax(scores, -1)
        ctx.save_for_backward(probs)
        # The highest probability is 1 / sum(exp(scores - highest)); torch.logsumexp
        # would take the exponentials again, in a tensor of its own.
        highest = scores.amax(-1, keepdim=True)
        return probs, highest - probs.amax(-1, keepdim=True).log()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (probs,) = ctx.saved_tensors
        grad_probs, grad_lse = grads
        grad = grad_probs * probs
        shift = grad_lse - grad.sum(-1, keepdim=True)
        return grad.addcmul_(probs, shift)


def normalise(q: Tensor) -> Tensor:
    """Return keys of root mean square 1, the same directions as ``q``."""
    return q * torch.rsqrt(q.square().mean(-1, keepdim=True) + 1e-6)
