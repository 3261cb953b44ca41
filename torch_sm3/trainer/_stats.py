# SPDX-License-Identifier: Apache-2.0
"""Figures of a step; they stay on the device until someone reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torch_sm3.trainer._clip import tensor_norms, total_norm


def layer_stats(
    prefix: str,
    parameters: Sequence[nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
    norms: Sequence[Tensor],
    device: torch.device,
) -> dict[str, Any]:
    """Return the figures of one layer after its update.

    Args:
        prefix: of the keys.
        parameters: of the layer.
        optimizer: of the layer.
        norms: of its gradients, before clipping.
        device: of the layer.
    """
    if optimizer is None:
        return {}
    return {
        f"{prefix}gradients_l2": total_norm(norms, device),
        f"{prefix}weights_l2": total_norm(tensor_norms(parameters), device),
        f"{prefix}learning_rate": optimizer.param_groups[0]["lr"],
    }
