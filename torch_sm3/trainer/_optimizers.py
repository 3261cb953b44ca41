# SPDX-License-Identifier: Apache-2.0
"""One optimizer for each layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_sm3.trainer._layers import Model


def attach(op: str, model: Model, optimizer_fn: Callable[..., Any]) -> None:
    """Make the optimizers of all layers that own parameters.

    Raises:
        TypeError: if ``optimizer_fn`` returns something else.
    """
    for layer in model.layers:
        if not layer.owned:
            continue
        optimizer = optimizer_fn(list(layer.owned))
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"{op}: expected an optimizer, but got {type(optimizer).__name__} "
                "(argument 'optimizer_fn')"
            )
        layer.optimizer = optimizer
