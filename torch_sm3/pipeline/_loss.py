# SPDX-License-Identifier: Apache-2.0
"""Losses of the microbatches, and what they are worth in the loss of the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_sm3.pipeline._data import batch_size
from torch_sm3.pipeline._values import map_tensors, pack

REDUCTIONS = ("mean", "samples", "sum", "tokens")


def may_divide(reduction: str) -> bool:
    """Whether gradients may have to be divided at the end of a step."""
    return reduction in ("samples", "tokens")


class Losses:
    """What the last stage makes of the microbatches of one step.

    Args:
        loss_fn: the loss, or None.
        reduction: one of REDUCTIONS.
        dim: dimension of a target's samples.
        count: number of microbatches.
        targets: all targets where they are known, so that samples can be weighted
            from the start.
        keep: whether to keep the outputs.

    Attributes:
        outputs: the outputs, detached, or None.
        losses: what ``loss_fn`` returned as loss for each microbatch, detached.
        metrics: the dicts that it returned.
    """

    def __init__(
        self,
        loss_fn: Callable[[Any, Any], Any] | None,
        reduction: str,
        dim: int,
        count: int,
        targets: list[Any] | None,
        keep: bool,
    ) -> None:
        self.outputs: list[Any] | None = [] if keep else None
        self.losses: list[torch.Tensor] = []
        self.metrics: list[dict[str, Any]] = []
        self._loss_fn = loss_fn
        self._reduction = reduction
        self._dim = dim
        self._count = count
        # Samples or tokens of each microbatch.
        self._sizes: list[float] = []
        self._samples: int | None = None
        if reduction == "samples" and targets is not None and loss_fn is not None:
            self._samples = sum(self._samples_of(target) for target in targets)

    def finish(self, output: Any, target: Any) -> torch.Tensor | None:
        """Turn the output of a microbatch into its loss; None if there is none.

        Raises:
            TypeError: if ``loss_fn`` returns something else than it should.
        """
        if self.outputs is not None:
            self.outputs.append(map_tensors(output, torch.Tensor.detach))
        if self._loss_fn is None or target is None:
            return None
        loss = self._loss_fn(output, target)
        if self._reduction == "tokens":
            loss = self._count_tokens(loss)
        elif self._reduction == "samples":
            self._sizes.append(self._samples_of(target))
        if not isinstance(loss, torch.Tensor) or loss.dim() > 0:
            got = (
                f"shape {tuple(loss.shape)}"
                if isinstance(loss, torch.Tensor)
                else type(loss).__name__
            )
            raise TypeError(
                f"PipelineRunner: expected loss_fn to return a scalar tensor, but got "
                f"{got}"
            )
        # A copy: torch lets the results of some losses hold a storage as large as what
        # they are the mean of.
        self.losses.append(loss.detach().clone())
        return loss

    @property
    def complete(self) -> bool:
        """Whether the losses of all microbatches are there."""
        return len(self.losses) == self._count

    @property
    def weights(self) -> list[float]:
        """What :meth:`gradient` gives each microbatch; empty if that is not known."""
        if self._reduction == "samples":
            return []
        return [1.0 / self._count if self._reduction == "mean" else 1.0] * self._count

    def gradient(self, microbatch: int, loss: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the step's loss with respect to a microbatch's."""
        weight = 1.0
        if self._reduction == "mean":
            weight = 1.0 / self._count
        elif self._reduction == "samples":
            weight = self._sizes[microbatch] / (self._samples or 1)
        return torch.full_like(loss, weight)

    @property
    def total(self) -> float | None:
        """What this replica's gradients are still to be divided by, if anything."""
        if self._reduction == "tokens" or (self._samples is None and self._sizes):
            return sum(self._sizes)
        return None

    def reduced(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the loss of the step and those of its microbatches."""
        if not self.losses:
            return None, None
        losses = torch.stack(self.losses)
        # One by one and in microbatch order, so that the bits do not depend on how a
        # sum is taken.
        first, *others = self._weighted(losses).unbind()
        loss = sum(others, start=first)
        if self.total is not None:
            loss = loss / self.total if self.total else torch.zeros_like(loss)
        return loss, losses

    def _weighted(self, losses: torch.Tensor) -> torch.Tensor:
        """Multiply each microbatch's loss by what it is worth."""
        if self._reduction == "mean":
            return losses * (1.0 / len(losses))
        if self._reduction == "samples":
            return losses * losses.new_tensor(
                [size / (self._samples or 1) for size in self._sizes]
            )
        return losses

    def _count_tokens(self, result: Any) -> Any:
        """Take (sum, count[, metrics]) apart; return the sum."""
        if type(result) not in (tuple, list) or len(result) not in (2, 3):
            raise TypeError(
                "PipelineRunner: expected loss_fn to return (sum, count) or (sum, "
                f"count, metrics) for loss_reduction 'tokens', but got "
                f"{type(result).__name__}"
            )
        loss, count, *metrics = result
        self._sizes.append(float(count))
        if metrics:
            detached = map_tensors(dict(metrics[0]), torch.Tensor.detach)
            pack(detached, "loss_fn")  # refused here, where its action is known
            self.metrics.append(detached)
        return loss

    def _samples_of(self, target: Any) -> int:
        size = batch_size(target, self._dim, "target")
        if size is None:
            raise ValueError(
                "step: expected tensors to count the samples of, but got none "
                "(argument 'target')"
            )
        return size


class _NoBackward(torch.autograd.Function):
    """A loss that looks like one of plain PyTorch and says what to call instead."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, loss: torch.Tensor, losses: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return loss.view_as(loss), losses.view_as(losses)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(
            "PipelineRunner: expected no backward of a loss that step returned, since "
            "step has run the backward; call optimizer_step or the optimizer's own step"
        )


# What makes a loss look as if it required grad.
_ANCHOR = torch.empty(0, requires_grad=True)


def guarded(
    loss: torch.Tensor | None, losses: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return losses whose backward says that the step has done it.

    Args:
        loss: of the step.
        losses: of its microbatches; None where the loss is.
    """
    if loss is None or losses is None:
        return loss, losses
    with torch.enable_grad():
        return _NoBackward.apply(_ANCHOR, loss, losses)
