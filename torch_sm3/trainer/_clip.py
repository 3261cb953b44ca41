# SPDX-License-Identifier: Apache-2.0
"""Norms of gradients, as torch.nn.utils.clip_grad_norm_ takes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_


def tensor_norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the 2-norm of each tensor."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, tensor.dtype), []).append(i)
    norms: dict[int, Tensor] = {}
    for places in groups.values():
        found = torch._foreach_norm([_values(tensors[i]) for i in places])
        norms.update(zip(places, found, strict=True))
    return [norms[i] for i in range(len(tensors))]


def total_norm(norms: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the 2-norm of norms, 0 where there are none."""
    if not norms:
        return torch.zeros((), device=device)
    return torch.linalg.vector_norm(torch.stack([n.to(device) for n in norms]))


def clip_(parameters: Sequence[nn.Parameter], limit: float, total: Tensor) -> None:
    """Scale the gradients of parameters as their total norm demands."""
    clip_grads_with_norm_(parameters, limit, total)


def _values(tensor: Tensor) -> Tensor:
    return tensor.detach().coalesce().values() if tensor.is_sparse else tensor.detach()
