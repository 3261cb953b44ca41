# SPDX-License-Identifier: Apache-2.0
"""What a runner returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


@dataclass
class StepResult:
    r"""Hold what a step or an eval gave.

    Attributes:
        loss: the loss after ``loss_reduction`` over the microbatches of this replica, a
            scalar tensor of equal bits on every rank; None without ``loss_fn``, and
            with ``share_loss=False`` on all ranks but the last stage's.
        losses: what ``loss_fn`` returned as the loss of each microbatch, wherever
            ``loss`` is.
        outputs: the last stage's output for each microbatch, detached, on the rank
            of the last stage and if ``return_outputs`` was set; otherwise None.
        tokens: number of tokens over all microbatches and replicas; None unless
            ``loss_reduction`` is ``tokens``.
        metrics: the dicts that ``loss_fn`` returned, one for each microbatch, wherever
            ``loss`` is; None if it returned none.

    Example::

        >>> import torch
        >>> from torch_sm3.pipeline import StepResult
        >>> losses = torch.tensor([1.0, 3.0])
        >>> StepResult(losses.mean(), losses, outputs=None).loss
        tensor(2.)
    """

    loss: torch.Tensor | None
    losses: torch.Tensor | None
    outputs: list[Any] | None
    tokens: int | None = None
    metrics: list[dict[str, Any]] | None = None


class OptimResult(NamedTuple):
    r"""Hold what :meth:`PipelineRunner.optimizer_step` did.

    Attributes:
        applied: whether the optimizer stepped; False if a gradient was infinite or NaN.
        grad_norm: norm of the gradients of all stages before clipping; None without
            ``max_norm``.
    """

    applied: bool
    grad_norm: float | None
