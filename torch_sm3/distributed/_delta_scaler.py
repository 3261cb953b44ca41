# SPDX-License-Identifier: Apache-2.0
"""Loss scaling in delta mode: ranks agree on a skip before anything else."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim.optimizer import Optimizer

from torch_sm3.distributed._delta_group import Group


def agreed_to_skip(
    optimizer: Optimizer, group: Group, grad_scaler: GradScaler | None
) -> bool:
    """Tell whether any rank found an infinity; else unscale gradients that need it.

    Collective where a ``GradScaler`` calls the step, which then is on every rank.

    Args:
        optimizer: with what the scaler has left on it.
        group: the ranks.
        grad_scaler: told what was agreed, so that all scales stay equal.
    """
    found: Tensor | None = getattr(optimizer, "found_inf", None)
    if found is None:
        return False
    own = (found.detach().reshape(1) != 0).to("cpu", torch.float32)
    skip = bool(group.swap(own, "AdasumOptimizer.step: found_inf").any())
    if grad_scaler is not None:
        for value in grad_scaler._found_inf_per_device(optimizer).values():
            value.fill_(float(skip))
    scale: Tensor | None = getattr(optimizer, "grad_scale", None)
    if scale is not None and not skip:
        params = (p for g in optimizer.param_groups for p in g["params"])
        _unscale((p.grad for p in params if p.grad is not None), float(scale))
    return skip


def _unscale(grads: Iterable[Tensor], scale: float) -> None:
    for grad in grads:
        if grad.is_sparse and not grad.is_coalesced():
            # Its values may be shared by several entries of one element.
            grad._values().mul_(1.0 / scale)
        else:
            grad.mul_(1.0 / scale)
