# SPDX-License-Identifier: Apache-2.0
"""Megatron's entry points by name, for scripts that call the plug themselves."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch_sm3.megatron.install import current


def get_forward_backward_func(*args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Return the forward-backward function of the pipeline at hand.

    Args:
        *args: as Megatron's function of this name takes them in the generation that is
            installed; none before core 0.16.
        **kwargs: likewise.

    Raises:
        RuntimeError: if nothing is installed.
    """
    return _entry("get_forward_backward_func")(*args, **kwargs)


def train_step(*args: Any, **kwargs: Any) -> Any:
    """Do one training step of all ranks, as Megatron's function of this name."""
    return _entry("train_step")(*args, **kwargs)


def train(*args: Any, **kwargs: Any) -> Any:
    """Train until an end is reached, as Megatron's function of this name."""
    return _entry("train")(*args, **kwargs)


def evaluate(*args: Any, **kwargs: Any) -> Any:
    """Average losses without training, as Megatron's function of this name."""
    return _entry("evaluate")(*args, **kwargs)


def training_log(*args: Any, **kwargs: Any) -> Any:
    """Log an iteration, as Megatron's function of this name."""
    return _entry("training_log")(*args, **kwargs)


def finetune(*args: Any, **kwargs: Any) -> Any:
    """Fine-tune over epochs, as the function of this name in Megatron's tasks."""
    return importlib.import_module("tasks.finetune_utils").finetune(*args, **kwargs)


def _entry(name: str) -> Callable[..., Any]:
    installation = current()
    found = installation.package.functions.get(name)
    if found is None:
        raise RuntimeError(
            f"{name}: expected a Megatron that has this function, but got "
            f"{installation.package.name} of generation {installation.generation}"
        )
    # The module holds the plug's by now, where there is one.
    function: Callable[..., Any] = getattr(found.module, name)
    return function
