# SPDX-License-Identifier: Apache-2.0
"""Cut whole batches into microbatches; gather losses and outputs of the last stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_sm3.pipeline._values import map_tensors


def _tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_tensors(value, found.append)
    return found


def cut(value: Any, parts: int, dim: int, argument: str) -> tuple[list[Any], list[int]]:
    """Cut a value into parts as even as possible: 8 in 3 gives 3, 3, 2.

    Args:
        value: tensors in nested tuples, lists and dicts, all cut along ``dim``; what
            is no tensor goes to every part.
        parts: number of parts.
        dim: dimension to cut.
        argument: name of the argument, for errors.

    Returns:
        The parts and the size of each; sizes are 0 if there is no tensor.

    Raises:
        ValueError: if the sizes differ or are smaller than ``parts``.
    """
    sizes = set()
    for tensor in _tensors(value):
        if not -tensor.dim() <= dim < tensor.dim():
            raise ValueError(
                f"step: expected tensors with dimension {dim} (batch_dim), but got "
                f"shape {tuple(tensor.shape)} (argument '{argument}')"
            )
        sizes.add(tensor.shape[dim])
    if len(sizes) > 1:
        raise ValueError(
            f"step: expected tensors of one batch size, but got {sorted(sizes)} "
            f"(argument '{argument}')"
        )
    if not sizes:
        return [value] * parts, [0] * parts
    size = sizes.pop()
    if size < parts:
        raise ValueError(
            f"step: expected a batch of at least {parts} samples, one for each "
            f"microbatch, but got {size} (argument '{argument}')"
        )
    lengths = [size // parts + (i < size % parts) for i in range(parts)]
    starts = [sum(lengths[:i]) for i in range(parts)]

    def part(start: int, length: int) -> Any:
        return map_tensors(value, lambda x: x.narrow(dim, start, length))

    return [part(*span) for span in zip(starts, lengths, strict=True)], lengths


def weights(reduction: str, sizes: list[int]) -> list[float]:
    """Return the factor of each microbatch's loss in the loss of the step.

    Args:
        reduction: mean, samples or sum.
        sizes: number of samples of each microbatch.

    Raises:
        ValueError: if samples are to be counted and there are none.
    """
    if reduction == "sum":
        return [1.0] * len(sizes)
    if reduction == "mean":
        return [1.0 / len(sizes)] * len(sizes)
    if sum(sizes) == 0:
        raise ValueError(
            "step: expected tensors to count the samples of, but got none "
            "(argument 'target')"
        )
    return [size / sum(sizes) for size in sizes]


class Batch:
    """What the last stage makes of the microbatches of one step.

    Args:
        loss_fn: the loss, or None.
        keep: whether to keep the outputs.
    """

    def __init__(self, loss_fn: Callable[[Any, Any], Any] | None, keep: bool) -> None:
        self.loss_fn = loss_fn
        self.targets: list[Any] | None = None
        self.weights: list[float] = []
        self.outputs: list[Any] | None = [] if keep else None
        self.losses: list[torch.Tensor] = []

    def finish(self, output: Any, microbatch: int) -> torch.Tensor | None:
        """Turn the output of a microbatch into its loss; None if there is none."""
        if self.outputs is not None:
            self.outputs.append(map_tensors(output, torch.Tensor.detach))
        if self.loss_fn is None or self.targets is None:
            return None
        loss = self.loss_fn(output, self.targets[microbatch])
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
        self.losses.append(loss.detach())
        return loss

    def reduced(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the loss of the step and those of its microbatches."""
        if not self.losses:
            return None, None
        losses = torch.stack(self.losses)
        # In microbatch order, so that the bits do not depend on the ranks.
        total = torch.zeros((), dtype=losses.dtype, device=losses.device)
        for loss, weight in zip(self.losses, self.weights, strict=True):
            total = total + loss * weight
        return total, losses
