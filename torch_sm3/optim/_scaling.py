# SPDX-License-Identifier: Apache-2.0
"""Loss scaling, skipped steps and other options, on the device of their tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_sm3 import _ops
from torch_sm3.optim._batch import Options
from torch_sm3.optim._fused import is_fusable
from torch_sm3.optim._plan import Work


def _on(tensor: Tensor | None, device: torch.device) -> Tensor | None:
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
        found = nonfinite_in(mine, device)
        total = found if total is None else total + found.to(total.device)
    return total


def nonfinite_in(grads: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return a flag that is not 0 if any gradient of a device holds NaN or infinity."""
    found = torch.zeros((), dtype=torch.float32, device=device)
    fusable = [grad for grad in grads if is_fusable(grad)]
    if fusable:
        _ops.sm3_nonfinite_(fusable, found)
    for grad in grads:
        if not is_fusable(grad):
            found = torch.maximum(found, (~grad.isfinite()).any().to(found.dtype))
    return found


def _learning_rate(
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


def step_options(
    group: Mapping[str, Any],
    device: torch.device,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> Options:
    """Return the options of one call.

    Args:
        group: options of a parameter group.
        device: of the parameters, which tensors are moved to.
        grad_scale: gradients are divided by it.
        found_inf: the step is skipped where it is not 0.
    """
    return Options(
        lr=_learning_rate(group["lr"], device, group["differentiable"]),
        momentum=group["momentum"],
        beta2=group["beta2"],
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        variant=group["variant"],
        compat=group["compat"],
        maximize=group["maximize"],
        stochastic_rounding=group["stochastic_rounding"],
        seed=group["seed"],
        capturable=group["capturable"],
        differentiable=group["differentiable"],
        grad_scale=_on(grad_scale, device),
        found_inf=_on(found_inf, device),
    )
