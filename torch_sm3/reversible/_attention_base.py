# SPDX-License-Identifier: Apache-2.0
"""What the attention layers share: weights, checks, and both ways to be called."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torch_sm3.reversible._attention_slices import (
    Seeds,
    Slice,
    SliceRun,
    check_parallel,
)
from torch_sm3.reversible._seeds import random_seed
from torch_sm3.reversible._split import SplitResult, apply_split, check_asked, vjp


class SplitAttention(nn.Module):
    """Base of the attention layers; see :class:`SelfAttention` for the arguments."""

    weight_names: tuple[str, ...]

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        d_qk: int,
        d_v: int,
        *,
        share_qk: bool,
        causal: bool,
        masked: bool,
        chunk_len: int | None,
        n_chunks_before: int,
        n_chunks_after: int,
        bias: bool,
        attention_dropout: float,
        output_dropout: float,
        n_parallel_heads: int | None,
        use_reference_code: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        op = type(self).__name__
        sizes = {"d_model": d_model, "n_heads": n_heads, "d_qk": d_qk, "d_v": d_v}
        if chunk_len is not None:
            sizes["chunk_len"] = chunk_len
        for name, size in sizes.items():
            _check(op, size >= 1, "at least 1", size, name)
        reach = {"n_chunks_before": n_chunks_before, "n_chunks_after": n_chunks_after}
        for name, count in reach.items():
            _check(op, count >= 0, "at least 0", count, name)
            fits = chunk_len is not None or count == 0
            _check(op, fits, "0 without chunk_len", count, name)
        rates = {
            "attention_dropout": attention_dropout,
            "output_dropout": output_dropout,
        }
        for name, p in rates.items():
            _check(op, 0 <= p <= 1, "a rate in [0, 1]", p, name)
        check_parallel(op, n_heads, n_parallel_heads)
        self.d_model, self.n_heads, self.d_qk, self.d_v = d_model, n_heads, d_qk, d_v
        self.causal = causal
        self.masked = masked
        #: Number of inputs.
        self.n_in = 2 if masked else 1
        self.chunk_len = chunk_len
        self.n_chunks_before = n_chunks_before
        self.n_chunks_after = n_chunks_after
        self.attention_dropout = attention_dropout
        self.output_dropout = output_dropout
        self.n_parallel_heads = n_parallel_heads
        self.use_reference_code = use_reference_code
        shapes: dict[str, tuple[int, ...]] = {
            "w_q": (n_heads, d_model, d_qk),
            "w_k": (n_heads, d_model, d_qk),
            "w_v": (n_heads, d_model, d_v),
            "w_o": (n_heads, d_v, d_model),
        }
        if bias:
            shapes |= {
                "b_q": (n_heads, d_qk),
                "b_k": (n_heads, d_qk),
                "b_v": (n_heads, d_v),
                "b_o": (d_model,),
            }
        if share_qk:
            shapes = {n: s for n, s in shapes.items() if not n.endswith("_k")}
        for name, shape in shapes.items():
            empty = torch.empty(shape, device=device, dtype=dtype)
            self.register_parameter(name, nn.Parameter(empty))
        self.weight_names = tuple(shapes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        r"""Draw every matrix uniformly in :math:`\pm\sqrt{6 / (n_{in} + n_{out})}`.

        Heads are matrices of their own, but their outputs are summed, so that all of
        them count in :math:`n_{in}` of ``w_o``. Biases become zero.
        """
        for name in self.weight_names:
            weight = getattr(self, name)
            if name.startswith("b_"):
                nn.init.zeros_(weight)
                continue
            n_in, n_out = weight.shape[1:]
            if name == "w_o":
                n_in *= self.n_heads
            bound = math.sqrt(6 / (n_in + n_out))
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend, under ordinary autograd.

        Only ``x``, the mask, the weights and a seed are kept for the backward pass,
        which computes the scores again.

        Args:
            x: the sequences.
            mask: with ``masked=True``, which positions may be attended.

        Returns:
            A tensor of the shape of ``x``.

        Raises:
            TypeError: if the mask is missing or not expected, or a dtype is wrong.
            ValueError: if a shape is wrong or ``n_parallel_heads`` does not fit it.
        """
        inputs = (x,) if mask is None else (x, mask)
        self._check_inputs(inputs)
        weights = self._own_weights()
        rng = self.draw_seed()
        if self.use_reference_code:
            seeds = Seeds(rng, self.training, x.device, remembers=True)
            return self._reference(inputs, weights, None, seeds)[0]
        return apply_split(self, inputs, weights, rng, self.training)

    def forward_and_or_backward(
        self,
        inputs: tuple[Tensor, ...],
        weights: Sequence[Tensor] | None = None,
        state: Any = None,
        rng: int = 0,
        output_grad: Tensor | None = None,
        compute_output: bool = True,
        update_state: bool = True,
    ) -> SplitResult:
        """Compute the output, the gradients, or both in one pass over the slices.

        Nothing is cached between calls, and no generator is used.

        Args:
            inputs: ``(x,)``, or ``(x, mask)`` with ``masked=True``.
            weights: tensors to use in place of the layer's own, in the order of
                ``parameters()``.
            state: what an earlier call returned as the new state; None at first.
            rng: seed of all random numbers.
            output_grad: gradient of the output; gradients are computed iff it is
                given.
            compute_output: whether the output is returned.
            update_state: whether a new state is computed and returned.

        Returns:
            ``(output, new_state, inputs_grad, weights_grad)``, None where not asked
            for. The gradient of the mask is None, and so, with ``weights=None``, is
            that of a parameter that does not require grad.

        Raises:
            ValueError: if neither the output nor gradients are asked for, the number
                of weights or a shape is wrong, or ``n_parallel_heads`` does not fit.
            TypeError: if the number of inputs or a dtype is wrong.
        """
        op = type(self).__name__
        check_asked(op, output_grad, compute_output)
        self._check_inputs(inputs)
        own = self._own_weights()
        given = own if weights is None else tuple(weights)
        n_weights = len(own)
        _check(
            op, len(given) == n_weights, f"{n_weights} weights", len(given), "weights"
        )
        self._check_state(inputs[0], state)
        if output_grad is not None and output_grad.shape != inputs[0].shape:
            raise ValueError(
                f"{op}: expected shape {tuple(inputs[0].shape)}, but got "
                f"{tuple(output_grad.shape)} (argument 'output_grad')"
            )
        wanted = [item.is_floating_point() for item in inputs]
        wanted += [weights is not None or w.requires_grad for w in own]
        with torch.no_grad():
            return self._split(
                inputs,
                given,
                state,
                rng,
                output_grad,
                compute_output,
                update_state,
                self.training,
                wanted,
                False,
            )

    def draw_seed(self) -> int:
        """Return the seed of one call; a generator is used in training only."""
        return random_seed() if self.training and self._is_random() else 0

    def extra_repr(self) -> str:
        """Return what ``print`` shows."""
        sizes = f"{self.d_model}, n_heads={self.n_heads}, d_qk={self.d_qk}"
        return f"{sizes}, d_v={self.d_v}, causal={self.causal}, masked={self.masked}"

    def _is_random(self) -> bool:
        return self.attention_dropout > 0 or self.output_dropout > 0

    def _own_weights(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, name) for name in self.weight_names)

    def _split(
        self,
        inputs: tuple[Tensor, ...],
        weights: tuple[Tensor, ...],
        state: Any,
        rng: int,
        output_grad: Tensor | None,
        compute_output: bool,
        update_state: bool,
        training: bool,
        wanted: Sequence[bool],
        remembers: bool,
    ) -> SplitResult:
        seeds = Seeds(rng, training, inputs[0].device, remembers)
        old = state if isinstance(state, Tensor) and not update_state else None
        if not self.use_reference_code:
            run = SliceRun(self, inputs, weights, old, seeds, output_grad, wanted)
            return run(compute_output, update_state)
        with_grad = output_grad is not None
        leaves = [
            item.detach().requires_grad_(with_grad and on)
            for item, on in zip((*inputs, *weights), wanted, strict=True)
        ]
        n = len(inputs)
        with torch.set_grad_enabled(with_grad):
            output, new = self._reference(leaves[:n], leaves[n:], old, seeds)
        grads = [] if output_grad is None else vjp(output, leaves, output_grad)
        return (
            output.detach() if compute_output else None,
            new if update_state else None,
            tuple(grads[:n]) if with_grad else None,
            tuple(grads[n:]) if with_grad else None,
        )

    def _plan(self, x: Tensor, seeds: Seeds) -> Any:
        raise NotImplementedError

    def _attend(
        self,
        x: Tensor,
        mask: Tensor | None,
        weights: dict[str, Tensor],
        where: Slice,
        state: Tensor | None,
        seeds: Seeds,
        plan: Any,
    ) -> tuple[Tensor, Tensor | None]:
        raise NotImplementedError

    def _reference(
        self,
        inputs: Sequence[Tensor],
        weights: Sequence[Tensor],
        state: Tensor | None,
        seeds: Seeds,
    ) -> tuple[Tensor, Any]:
        raise NotImplementedError

    def _check_state(self, x: Tensor, state: Any) -> None:
        """Check a state that was given."""

    def _check_inputs(self, inputs: Sequence[Any]) -> None:
        op = type(self).__name__
        if len(inputs) != self.n_in:
            raise TypeError(
                f"{op}: expected {self.n_in} inputs with masked={self.masked}, but got "
                f"{len(inputs)} (argument 'inputs')"
            )
        x = inputs[0]
        if not isinstance(x, Tensor) or not x.is_floating_point():
            got = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(
                f"{op}: expected a floating tensor, but got {got} (argument 'x')"
            )
        fits = x.dim() == 3 and x.shape[2] == self.d_model
        wanted = f"shape (batch, length, {self.d_model})"
        _check(op, fits, wanted, tuple(x.shape), "x")
        if self.masked:
            mask = inputs[1]
            if not isinstance(mask, Tensor) or mask.dtype is not torch.bool:
                got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
                raise TypeError(
                    f"{op}: expected a boolean tensor, but got {got} (argument 'mask')"
                )
            wanted = f"shape {tuple(x.shape[:2])}"
            fits = mask.shape == x.shape[:2]
            _check(op, fits, wanted, tuple(mask.shape), "mask")


def _check(op: str, fits: bool, wanted: str, value: Any, argument: str) -> None:
    if not fits:
        raise ValueError(
            f"{op}: expected {wanted}, but got {value} (argument '{argument}')"
        )


def project(x: Tensor, weights: dict[str, Tensor], kind: str) -> Tensor:
    """Return every head's queries, keys or values: ``(examples, heads, length, d)``."""
    heads = torch.einsum("eld,hdk->ehlk", x, weights[f"w_{kind}"])
    bias = weights.get(f"b_{kind}")
    return heads if bias is None else heads + bias.to(heads.dtype)[:, None]


def merge(heads: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """Return the sum of all heads' outputs, ``(examples, length, d_model)``."""
    return torch.einsum("ehlv,hvd->eld", heads, weights["w_o"])
