# SPDX-License-Identifier: Apache-2.0
"""Attention in slices, for layers that run again in the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_sm3.reversible._attention_base import SplitAttention, merge, project
from torch_sm3.reversible._attention_reference import self_attention
from torch_sm3.reversible._attention_slices import Seeds, Slice
from torch_sm3.reversible._attention_windows import Windows, forbid_


class SelfAttention(SplitAttention):
    r"""Multi-head self-attention whose scores live for one slice at a time.

    .. math::
        Q_h = x W^Q_h, \quad K_h = x W^K_h, \quad V_h = x W^V_h, \qquad
        y = D_{out}\Big(\sum_h D_{att}\big(\operatorname{softmax}(
            Q_h K_h^\top / \sqrt{d_{qk}})\big)\, V_h W^O_h\Big)

    with dropouts :math:`D`. The layer loops over slices of ``n_parallel_heads``
    (example, head) pairs; in the backward pass it computes a slice's scores again and
    its gradients before it goes on. So it keeps no scores for the backward pass, and
    what it needs while it runs does not grow with batch and heads.

    With ``chunk_len`` the sequence is cut into chunks, and chunk :math:`c` attends the
    chunks that exist in :math:`[c - b, c + a]`; the last chunk may be shorter.

    Dropout masks are functions of a seed and of an element's place, (example, head,
    query, key) for attention and (example, query, feature) for the output, so they do
    not depend on ``n_parallel_heads``. ``forward`` draws the seed from torch's CPU
    generator when training with dropout, and no generator advances otherwise. A query
    that may attend nothing yields zero heads.

    Args:
        d_model: width of the sequences.
        n_heads: number of heads.
        d_qk: width of a head's queries and keys.
        d_v: width of a head's values.
        share_qk: use the queries as keys; there is no ``w_k`` then.
        causal: let a position attend itself and earlier ones only.
        masked: take a boolean tensor (batch, length), True where a position may be
            attended, as second input.
        chunk_len: length of a chunk; None for attention over the whole sequence.
        n_chunks_before: number of earlier chunks that a chunk attends.
        n_chunks_after: number of later chunks that it attends.
        bias: add ``b_q``, ``b_k``, ``b_v`` for each head and ``b_o``.
        attention_dropout: rate at which attention probabilities are dropped.
        output_dropout: rate at which output features are dropped.
        n_parallel_heads: number of (example, head) pairs in a slice: 1, a divisor of
            ``n_heads``, or a multiple of it that divides ``batch * n_heads``. None, or
            more than there are, takes all at once.
        use_reference_code: use a slow double loop over examples and heads under plain
            autograd, to compare with.
        device: of the weights.
        dtype: of the weights.

    Attributes:
        w_q, w_k: ``(n_heads, d_model, d_qk)``.
        w_v: ``(n_heads, d_model, d_v)``.
        w_o: ``(n_heads, d_v, d_model)``.

    Shape:
        - x: (batch, length, d_model).
        - mask: (batch, length).
        - Output: (batch, length, d_model).

    Raises:
        ValueError: if a size, a rate or ``n_parallel_heads`` does not fit.

    Example:
        >>> import torch
        >>> from torch_sm3.reversible import SelfAttention
        >>> layer = SelfAttention(16, n_heads=4, d_qk=4, d_v=4, causal=True,
        ...                       n_parallel_heads=1)
        >>> x = torch.randn(2, 10, 16)
        >>> layer(x).shape
        torch.Size([2, 10, 16])

        Output and gradients from one run, as a reversible block asks for them:

        >>> y, state, (gx,), weights_grad = layer.forward_and_or_backward(
        ...     (x,), output_grad=torch.ones_like(x))
        >>> gx.shape, len(weights_grad)
        (torch.Size([2, 10, 16]), 4)

    Source: Vaswani, Shazeer, Parmar, Uszkoreit, Jones, Gomez, Kaiser and Polosukhin,
    *Attention Is All You Need*, NeurIPS 2017, arXiv 1706.03762.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        d_qk: int,
        d_v: int,
        share_qk: bool = False,
        causal: bool = False,
        masked: bool = False,
        chunk_len: int | None = None,
        n_chunks_before: int = 0,
        n_chunks_after: int = 0,
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
            share_qk=share_qk,
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
        self.share_qk = share_qk

    def _plan(self, x: Tensor, seeds: Seeds) -> tuple[Windows, Tensor | None]:
        """Return the windows, and which keys of one no query may attend."""
        windows = Windows(
            x.shape[1], self.chunk_len, self.n_chunks_before, self.n_chunks_after
        )
        padded = windows.padded != windows.length
        reaches_out = windows.before > 0 or windows.after > 0
        if not (self.causal or padded or reaches_out):
            return windows, None
        queries, keys = windows.positions(x.device)
        missing = ((keys < 0) | (keys >= windows.length))[:, None]
        if not self.causal:
            return windows, missing
        return windows, missing | (keys[:, None] > queries[..., None])

    def _attend(
        self,
        x: Tensor,
        mask: Tensor | None,
        weights: dict[str, Tensor],
        where: Slice,
        state: Tensor | None,
        seeds: Seeds,
        plan: Any,
    ) -> tuple[Tensor, None]:
        windows, forbidden = plan
        q = project(x, weights, "q") * self.d_qk**-0.5
        k = project(x, weights, "q" if self.share_qk else "k")
        v = project(x, weights, "v")
        empty = None
        if mask is not None:
            # A forbidden value has probability 0, but 0 * inf is no number.
            visible = mask[:, None, :, None]
            k, v = k.where(visible, 0), v.where(visible, 0)
            forbidden, empty = _with_mask(windows, forbidden, mask)
        q, k, v = (windows.chunks(windows.pad(item)) for item in (q, k, v))
        scores = q @ windows.neighbours(k).mT
        if forbidden is not None:
            forbid_(scores, forbidden)
        probs = torch.softmax(scores, -1)
        del scores
        heads = self._weigh(probs, windows.neighbours(v), where, seeds, windows)
        if empty is not None:
            heads = heads.masked_fill(empty, 0)
        return merge(windows.join(heads), weights), None

    def _weigh(
        self, probs: Tensor, v: Tensor, where: Slice, seeds: Seeds, windows: Windows
    ) -> Tensor:
        """Drop probabilities, and sum values weighed by them.

        Element (query, key) of a pair has the same number in every window. Windows
        that begin before the sequence are taken chunk by chunk and without the keys
        that do not exist, because those have no number.
        """
        p = self.attention_dropout
        if not seeds.drops(p):
            return probs.to(v.dtype) @ v
        n, size = windows.length, windows.chunk_len
        pairs = where.examples.start * self.n_heads + where.heads.start
        strides = (self.n_heads * n * n, n * n, size * (n + 1), n, 1)
        cuts = [1] * windows.before + [windows.n_chunks - windows.before]
        heads = []
        for i, (prob, value) in enumerate(
            zip(probs.split(cuts, 2), v.split(cuts, 2), strict=True)
        ):
            missing = (windows.before - i) * size
            prob, value = prob[..., missing:], value[..., missing:, :]
            first = pairs * n * n + i * size * n
            prob = seeds.attention(prob, p, first, strides)
            heads.append(prob.to(value.dtype) @ value)
        return heads[0] if len(heads) == 1 else torch.cat(heads, 2)

    def _reference(
        self,
        inputs: Sequence[Tensor],
        weights: Sequence[Tensor],
        state: Tensor | None,
        seeds: Seeds,
    ) -> tuple[Tensor, Any]:
        named = dict(zip(self.weight_names, weights, strict=True))
        return self_attention(self, inputs, named, seeds), ()


def _with_mask(
    windows: Windows, forbidden: Tensor | None, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Return which keys of its window no query may attend, and who has none at all.

    Shapes ``(examples, 1, n_chunks, chunk_len or 1, width)`` and the same with width 1.
    """
    keys = windows.chunks(windows.pad(mask[..., None]))
    hidden = ~windows.neighbours(keys)[:, None].mT
    both = hidden if forbidden is None else hidden | forbidden
    return both, both.all(-1, keepdim=True)
