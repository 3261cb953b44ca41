# SPDX-License-Identifier: Apache-2.0
"""Losses by rows, and the last layers run on a few rows at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function

from torch_sm3.reversible._inventory import Learned
from torch_sm3.trainer._layers import StandardLayers
from torch_sm3.trainer._standard import Rerun, track


class CrossEntropy(nn.Module):
    r"""Take, for each row, the negative log-probability of its target.

    .. math::

        \ell_r = -\log p_{r, t_r}

    Shape:
        Log-probabilities :math:`(*, C)` and integer targets :math:`(*)`; returns
        losses :math:`(*)`. As a layer it takes two stack items.

    Example:
        >>> from torch_sm3.trainer import CrossEntropy
        >>> log_p = torch.tensor([[0.25, 0.75], [0.5, 0.5]]).log()
        >>> CrossEntropy()(log_p, torch.tensor([1, 0])).exp()
        tensor([1.3333, 2.0000])
    """

    n_in = 2

    def forward(self, log_probabilities: Tensor, targets: Tensor) -> Tensor:
        """Return one loss for each target."""
        picked = log_probabilities.gather(-1, targets.long().unsqueeze(-1))
        return -picked.squeeze(-1)


class WeightedMean(nn.Module):
    r"""Average values with weights.

    .. math::

        \sum_r w_r \ell_r \Big/ \sum_r w_r

    Shape:
        Values and weights :math:`(*)`; returns a scalar. As a layer it takes two
        stack items. All weights 0 give 0.

    Example:
        >>> from torch_sm3.trainer import WeightedMean
        >>> WeightedMean()(torch.tensor([1.0, 4.0]), torch.tensor([2.0, 1.0]))
        tensor(2.)
    """

    n_in = 2

    def forward(self, values: Tensor, weights: Tensor) -> Tensor:
        """Return the mean."""
        weights = weights.to(values.dtype)
        total = weights.sum()
        return (values * weights).sum() / torch.where(total == 0, 1, total)


class ChunkedRows(nn.Module):
    """Layers that treat each row by itself, run on a few rows at a time.

    A row is one position of one example. Of each chunk only the inputs and the
    outputs are kept; the rest, its logits above all, is computed again in the
    backward pass and freed after the chunk's vector-Jacobian product.

    Args:
        layers: the first takes an item of shape (*, features); what else they take
            from the stack has the leading shape of its rows. They return one item.
        chunk_size: number of rows.
    """

    def __init__(self, layers: Sequence[nn.Module], chunk_size: int) -> None:
        super().__init__()
        self.layers = StandardLayers(layers)
        self.chunk_size = chunk_size
        self.n_in = self._count(layers)
        self._learned = Learned()

    def forward(self, *stack: Any) -> Any:
        """Return what the layers return, with the leading shape of the rows."""
        lead = stack[0].shape[:-1]
        rows = [_as_rows(item, lead) for item in stack]
        if isinstance(stack[0], FakeTensor):
            result = self._first_for_all(rows)
            return result.view(*lead, *result.shape[1:])
        parameters = [p for p in self.parameters() if p.requires_grad]
        result = _Chunks.apply(self, len(rows), *rows, *parameters)
        return result.view(*lead, *result.shape[1:])

    def _first_for_all(self, rows: list[Tensor]) -> Tensor:
        """Run one chunk where only shapes count: there is one at a time."""
        (one,) = self.call([row[: self.chunk_size] for row in rows])
        rest = len(rows[0]) - len(one)
        return torch.cat([one, one.new_zeros(rest, *one.shape[1:])])

    def call(self, rows: list[Any]) -> list[Any]:
        """Run the layers on one chunk."""
        return self.layers.run(rows)[0]

    def reruns(self, count: int) -> list[Rerun]:
        """Return one call of the layers for each chunk of ``count`` rows."""
        n_chunks = -(-count // self.chunk_size)
        name = "chunked loss"
        return [
            Rerun(name, [self.layers], self.call, self._learned)
            for _ in range(n_chunks)
        ]

    @staticmethod
    def _count(layers: Sequence[nn.Module]) -> int:
        """Return how many items the layers take; each but the last returns one."""
        total = 1
        for layer in layers:
            total += getattr(layer, "n_in", 1) - 1
        return total


def _as_rows(item: Tensor, lead: torch.Size) -> Tensor:
    if item.shape[: len(lead)] != lead:
        raise ValueError(
            f"trainer: expected items with the leading shape {tuple(lead)} at the "
            f"border of the chunked loss, but got {tuple(item.shape)} "
            "(argument 'loss_chunk_size')"
        )
    return item.reshape(-1, *item.shape[len(lead) :])


class _Chunks(Function):
    """One node for all chunks, so that a parameter's gradient is summed in order."""

    @staticmethod
    def forward(ctx: Any, module: ChunkedRows, n_rows: int, *tensors: Tensor) -> Tensor:
        rows, parameters = tensors[:n_rows], tensors[n_rows:]
        reruns = module.reruns(len(rows[0]))
        parts = [row.split(module.chunk_size) for row in rows]
        outputs = []
        for i, rerun in enumerate(reruns):
            (output,) = rerun.first([part[i] for part in parts])
            outputs.append(output)
        ctx.save_for_backward(*tensors)
        ctx.module, ctx.n_rows, ctx.reruns = module, n_rows, reruns
        ctx.n_parameters = len(parameters)
        return torch.cat(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "trainer: expected a backward pass without create_graph over a chunked "
                "loss, but got create_graph=True (argument 'loss_chunk_size')"
            )
        (grad,) = grads
        saved = ctx.saved_tensors
        rows, parameters = saved[: ctx.n_rows], saved[ctx.n_rows :]
        size = ctx.module.chunk_size
        needs = ctx.needs_input_grad[2 : 2 + ctx.n_rows]
        parts = [row.split(size) for row in rows]
        row_grads = [
            torch.zeros_like(row) if need else None
            for row, need in zip(rows, needs, strict=True)
        ]
        totals: dict[Any, Tensor] = {}
        for i, (rerun, piece) in enumerate(
            zip(ctx.reruns, grad.split(size), strict=True)
        ):
            inputs = track([part[i] for part in parts], needs)
            outputs = rerun.again(inputs)
            found, by_parameter = rerun.product(inputs, outputs, [piece])
            for row_grad, one in zip(row_grads, found, strict=True):
                if row_grad is not None and one is not None:
                    row_grad.split(size)[i].copy_(one)
            for parameter, one in by_parameter.items():
                if parameter in totals:
                    totals[parameter] += one
                else:
                    totals[parameter] = one.clone()
        return None, None, *row_grads, *(totals.get(p) for p in parameters)
