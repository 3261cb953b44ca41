# SPDX-License-Identifier: Apache-2.0
"""Loss scaling and skipped steps: one flag for a whole step, kept on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_sm3 import _ops
from torch_sm3.optim._fused import is_fusable
from torch_sm3.optim._plan import Work


def on(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    """Return a one-element tensor on a device, without waiting between GPUs."""
    return None if tensor is None else tensor.to(device, non_blocking=True)


def nonfinite(works: Sequence[Work]) -> Tensor | None:
    """Return a flag that is not 0 if any gradient holds a NaN or an infinity.

    Args:
        works: calls of one step.

    Returns:
        A float32 tensor on the first call's device, or None without gradients.
    """
    grads: dict[torch.device, list[Tensor]] = {}
    for work in works:
        values = [grad.values() for grad in work.grads] if work.sparse else work.grads
        grads.setdefault(work.device, []).extend(values)
    total: Tensor | None = None
    for device, mine in grads.items():
        found = torch.zeros((), dtype=torch.float32, device=device)
        fusable = [grad for grad in mine if is_fusable(grad)]
        if fusable:
            _ops.sm3_nonfinite_(fusable, found)
        for grad in mine:
            if not is_fusable(grad):
                found = torch.maximum(found, (~grad.isfinite()).any().to(found.dtype))
        total = found if total is None else total + found.to(total.device)
    return total


def learning_rate(
    lr: float | Tensor, device: torch.device, differentiable: bool
) -> float | Tensor:
    """Return a learning rate that an operation on a device takes without a copy.

    Args:
        lr: the group's.
        device: of the parameters.
        differentiable: autograd is to reach a learning rate that is a tensor.
    """
    if not isinstance(lr, Tensor) or differentiable:
        return lr
    if lr.device.type == "cpu" or device.type == "cpu":
        return lr.item()
    return lr.detach().to(device, non_blocking=True)
