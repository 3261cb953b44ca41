# SPDX-License-Identifier: Apache-2.0
"""Attention among positions that locality-sensitive hashing brings together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from torch_sm3.reversible._attention_base import SplitAttention, merge, project
from torch_sm3.reversible._attention_reference import lsh_attention
from torch_sm3.reversible._attention_slices import Seeds, Slice
from torch_sm3.reversible._attention_windows import Windows, forbid_
from torch_sm3.reversible._lsh_buckets import (
    Order,
    SoftmaxWithLse,
    check_buckets,
    hash_vectors,
    mark_forbidden,
    normalise,
    rotations,
)


class _Plan:
    """What all slices of a call share."""

    def __init__(self, windows: Windows, draw: Callable[[], Tensor]) -> None:
        self.windows = windows
        self._draw = draw

    @cached_property
    def directions(self) -> Tensor:
        """The directions of hashing, which a run with given buckets does not need."""
        return self._draw()


class LSHSelfAttention(SplitAttention):
    r"""Self-attention of a position to those that hashing brings near to it.

    Queries are keys as well, of root mean square 1. In each of ``n_hashes`` rounds
    every query is hashed into a bucket, so that similar ones likely share it; positions
    are sorted by bucket, in the order of the sequence within one, and cut into chunks.
    A chunk attends itself and the chunks that exist from ``n_chunks_before`` before to
    ``n_chunks_after`` after it. With :math:`P_i` the positions that :math:`i` meets so
    in any round,

    .. math::
        k_j = q_j \Big/ \sqrt{\tfrac{1}{d}\textstyle\sum q_j^2 + \epsilon}, \qquad
        o_i = \sum_{j \in P_i} \frac{e^{s_{ij}}}{\sum_{j' \in P_i} e^{s_{ij'}}} v_j,
        \qquad s_{ij} = q_i^\top k_j / \sqrt{d} .

    It is computed round by round: round :math:`r` yields the softmax
    :math:`o_i^{(r)}` over its own window, with scores
    :math:`s_{ij} - \log N_{ij}` where :math:`N_{ij}` counts the rounds in which the
    two meet, and the log of its denominator :math:`l_i^{(r)}`; then
    :math:`o_i = \sum_r e^{l_i^{(r)} - l_i} o_i^{(r)}` with
    :math:`l_i = \log \sum_r e^{l_i^{(r)}}`. So a pair that meets in several rounds
    counts once. A position attends itself only if it may attend nothing else; if the
    mask forbids that as well, its heads are zero.

    The cost is that of chunked attention, :math:`n_{hashes} \cdot length \cdot` window,
    in slices as in :class:`SelfAttention`. Attention dropout is keyed by (example,
    head, round, place of the query, place in its window).

    **State.** The buckets, int64 (batch, n_heads, n_hashes, length), in
    :math:`[0, n_{buckets}]`; the last is where positions are that the mask excludes,
    so that they change nobody's chunk. The split call hashes if it is asked for a new
    state or given none, and takes the buckets of ``state`` otherwise: a run in the
    backward pass never hashes again. The directions of hashing follow from ``rng``;
    in training ``forward`` draws one for every call, in eval mode it takes 0.

    Args:
        d_model: width of the sequences.
        n_heads: number of heads.
        d_qk: width of a head's queries.
        d_v: width of a head's values.
        causal: let a position attend earlier ones only.
        masked: take a boolean tensor (batch, length), True where a position may be
            attended, as second input.
        chunk_len: length of a chunk; the last chunk of a round may be shorter.
        n_chunks_before: number of earlier chunks that a chunk attends.
        n_chunks_after: number of later chunks that it attends.
        n_hashes: number of rounds.
        n_buckets: number of buckets, even; or a list of even factors, which costs the
            sum of them where one number costs the product.
        bias: add ``b_q`` and ``b_v`` for each head and ``b_o``.
        attention_dropout: rate at which attention probabilities are dropped.
        output_dropout: rate at which output features are dropped.
        n_parallel_heads: as in :class:`SelfAttention`.
        use_reference_code: as in :class:`SelfAttention`.
        device: of the weights.
        dtype: of the weights.

    Attributes:
        w_q: ``(n_heads, d_model, d_qk)``.
        w_v: ``(n_heads, d_model, d_v)``.
        w_o: ``(n_heads, d_v, d_model)``.

    Shape:
        - x: (batch, length, d_model).
        - mask: (batch, length).
        - Output: (batch, length, d_model).

    Raises:
        ValueError: if a size, a rate, ``n_buckets`` or ``n_parallel_heads`` does not
            fit.

    Example:
        >>> import torch
        >>> from torch_sm3.reversible import LSHSelfAttention
        >>> layer = LSHSelfAttention(16, n_heads=2, d_qk=8, d_v=8, causal=True,
        ...                          chunk_len=8, n_hashes=2, n_buckets=[2, 4])
        >>> x = torch.randn(1, 64, 16)
        >>> y, buckets, _, _ = layer.forward_and_or_backward((x,), rng=1)
        >>> buckets.shape
        torch.Size([1, 2, 2, 64])

        The second run takes the buckets of the first:

        >>> again, _, (gx,), _ = layer.forward_and_or_backward(
        ...     (x,), state=buckets, output_grad=torch.ones_like(y), update_state=False)
        >>> torch.equal(again, y)
        True

    Source: Kitaev, Kaiser and Levskaya, *Reformer: The Efficient Transformer*, ICLR
    2020, arXiv 2001.04451.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        d_qk: int,
        d_v: int,
        causal: bool = False,
        masked: bool = False,
        chunk_len: int = 128,
        n_chunks_before: int = 1,
        n_chunks_after: int = 0,
        n_hashes: int = 1,
        n_buckets: int | Sequence[int] = 256,
        bias: bool = False,
        attention_dropout: float = 0.0,
        output_dropout: float = 0.0,
        n_parallel_heads: int | None = None,
        use_reference_code: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            d_model,
            n_heads,
            d_qk,
            d_v,
            share_qk=True,
            causal=causal,
            masked=masked,
            chunk_len=chunk_len,
            n_chunks_before=n_chunks_before,
            n_chunks_after=n_chunks_after,
            bias=bias,
            attention_dropout=attention_dropout,
            output_dropout=output_dropout,
            n_parallel_heads=n_parallel_heads,
            use_reference_code=use_reference_code,
            device=device,
            dtype=dtype,
        )
        op = type(self).__name__
        if n_hashes < 1:
            raise ValueError(
                f"{op}: expected at least 1, but got {n_hashes} (argument 'n_hashes')"
            )
        self.n_hashes = n_hashes
        self.factors = check_buckets(op, n_buckets)

    def hash(
        self,
        q: Tensor,
        mask: Tensor | None,
        heads: slice,
        directions: Tensor,
    ) -> Tensor:
        """Return the buckets of some heads' queries.

        Args:
            q: ``(examples, heads, length, d_qk)``.
            mask: which positions may be attended.
            heads: which heads they are.
            directions: of all heads.
        """
        buckets = hash_vectors(q.detach(), directions[heads], self.factors)
        return mark_forbidden(buckets, mask, self.factors)

    def directions(self, seeds: Seeds, device: torch.device) -> Tensor:
        """Return the directions that the seed of a call gives."""
        drawn = rotations(
            seeds.hashing, self.n_heads, self.d_qk, self.n_hashes, self.factors
        )
        return drawn.to(device)

    def _is_random(self) -> bool:
        return True

    def _check_state(self, x: Tensor, state: Any) -> None:
        if state is None:
            return
        shape = (x.shape[0], self.n_heads, self.n_hashes, x.shape[1])
        fits = isinstance(state, Tensor) and state.dtype is torch.int64
        if not fits or state.shape != shape:
            got = type(state).__name__
            if isinstance(state, Tensor):
                got = f"{state.dtype} of shape {tuple(state.shape)}"
            raise ValueError(
                f"{type(self).__name__}: expected int64 of shape {shape}, but got "
                f"{got} (argument 'state')"
            )

    def _plan(self, x: Tensor, seeds: Seeds) -> _Plan:
        windows = Windows(
            x.shape[1], self.chunk_len, self.n_chunks_before, self.n_chunks_after
        )
        return _Plan(windows, lambda: self.directions(seeds, x.device))

    def _attend(
        self,
        x: Tensor,
        mask: Tensor | None,
        weights: dict[str, Tensor],
        where: Slice,
        state: Tensor | None,
        seeds: Seeds,
        plan: _Plan,
    ) -> tuple[Tensor, Tensor]:
        windows = plan.windows
        q = project(x, weights, "q")
        v = project(x, weights, "v")
        buckets = state
        if buckets is None:
            buckets = self.hash(q, mask, where.heads, plan.directions)
            buckets = seeds.choose(buckets)
        k = normalise(q)
        if mask is not None:
            # What nobody attends has probability 0, but 0 * inf is no number.
            visible = mask[:, None, :, None]
            k, v = k.where(visible, 0), v.where(visible, 0)
        order = Order(buckets, windows)
        keys = windows.neighbours(order.sort(k))
        scores = (order.sort(q) * self.d_qk**-0.5) @ keys.mT
        if self.n_hashes > 1:
            scores.sub_(_meetings(order, windows).to(scores.dtype).log_())
        forbid_(scores, self._forbidden(order, windows, mask))
        probs, lse = SoftmaxWithLse.apply(scores)
        del scores
        probs = self._drop(probs, where, seeds)
        rounds = probs.to(v.dtype) @ windows.neighbours(order.sort(v))
        share = torch.softmax(order.unsort(lse), dim=2)
        heads = (order.unsort(rounds) * share.to(v.dtype)).sum(2)
        return merge(heads, weights), buckets

    def _forbidden(self, order: Order, windows: Windows, mask: Tensor | None) -> Tensor:
        """Return which keys of its window a query must not attend.

        Among them is the query itself, except where no round shows it any other.
        """
        queries, keys = order.queries[..., None], order.keys
        real = torch.arange(windows.padded + 1, device=keys.device) < windows.length
        real = real.expand(keys.shape[0], keys.shape[1], -1)
        if mask is not None:
            visible = torch.nn.functional.pad(mask, (0, real.shape[-1] - mask.shape[1]))
            real = visible[:, None].expand_as(real)
        others = order.at(real, keys)[..., None, :]
        keys = keys[..., None, :]
        allowed = others & ((keys < queries) if self.causal else (keys != queries))
        some = order.unsort_places(allowed.any(-1))
        lonely = order.at(~some.any(2), order.queries)[..., None]
        return ~allowed & ~(lonely & (keys == queries))

    def _drop(self, probs: Tensor, where: Slice, seeds: Seeds) -> Tensor:
        """Drop probabilities, numbered as in the scores of all examples and heads."""
        pair = probs[0, 0].numel() if probs.numel() else 0
        offset = (where.examples.start * self.n_heads + where.heads.start) * pair
        inner = torch.empty(probs.shape[2:], device="meta").stride()
        strides = (self.n_heads * pair, pair, *inner)
        return seeds.attention(probs, self.attention_dropout, offset, strides)

    def _reference(
        self,
        inputs: Sequence[Tensor],
        weights: Sequence[Tensor],
        state: Tensor | None,
        seeds: Seeds,
    ) -> tuple[Tensor, Any]:
        named = dict(zip(self.weight_names, weights, strict=True))
        if state is None:
            mask = inputs[1] if self.masked else None
            with torch.no_grad():
                q = project(inputs[0], named, "q")
                directions = self.directions(seeds, q.device)
                state = self.hash(q, mask, slice(0, self.n_heads), directions)
                state = seeds.choose(state)
        return lsh_attention(self, inputs, named, state, seeds), state


def _meetings(order: Order, windows: Windows) -> Tensor:
    """Count, for each query and key of its window, the rounds in which they meet.

    At least 1, as uint8 where that is wide enough: the scores' size is what counts.
    """
    queries, keys = order.queries, order.keys
    n_rounds = queries.shape[2]
    counts = torch.zeros(
        *queries.shape,
        keys.shape[-1],
        dtype=torch.uint8 if n_rounds < 256 else torch.int32,
        device=keys.device,
    )
    # Keys that do not exist are in no chunk.
    chunk = torch.nn.functional.pad(
        order.place // windows.chunk_len, (0, 1), value=2 * windows.n_chunks
    )
    for r in range(n_rounds):
        ahead = order.at(chunk[:, :, r], keys)[..., None, :]
        own = order.at(chunk[:, :, r], queries)[..., None]
        meet = ahead >= own - windows.before
        meet &= ahead <= own + windows.after
        counts += meet
    return counts.clamp_(min=1)
