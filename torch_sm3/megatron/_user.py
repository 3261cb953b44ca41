# SPDX-License-Identifier: Apache-2.0
"""Megatron's user step, with what the plug sees to around it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from torch_sm3.megatron.env import device_of

UserStep = Callable[..., Any]


def user_step(
    step: UserStep, chunks: list[Any], config: Any, per_token: bool
) -> UserStep:
    """Return a user step that does what Megatron's schedules leave out.

    A microbatch of which all tokens are masked has a loss of 0, not of 0/0, and
    autocast is that of the model's device.

    Args:
        step: the user's.
        chunks: of this rank.
        config: of the model, or None.
        per_token: whether the loss stays a sum until all tokens are counted.

    Raises:
        TypeError: if the configuration asks for a third argument that it does not take.
    """
    if partial_checkpoints(config) is not None and not _takes_three(step):
        raise TypeError(
            "forward_backward: expected a step of three arguments, since "
            "num_microbatches_with_partial_activation_checkpoints is set, but got "
            f"{inspect.signature(step)} (argument 'forward_step_func')"
        )
    device = device_of(chunks)
    autocast = getattr(config, "enable_autocast", False) and device.type != "cuda"

    @functools.wraps(step)
    def own(*args: Any) -> Any:
        context: Any = nullcontext()
        if autocast:
            context = torch.autocast(device.type, dtype=config.autocast_dtype)
        with context:
            result = step(*args)
        if type(result) is tuple and len(result) == 2 and callable(result[1]):
            output, loss = result
            return output, loss if per_token else _with_tokens(loss)
        return result

    return own


def partial_checkpoints(config: Any) -> int | None:
    """Return how many microbatches keep all of their activations; None for no limit."""
    name = "num_microbatches_with_partial_activation_checkpoints"
    limit: int | None = getattr(config, name, None)
    return limit


def _takes_three(step: UserStep) -> bool:
    parameters = inspect.signature(step).parameters.values()
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    several = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return several or sum(p.kind in kinds for p in parameters) >= 3


def _with_tokens(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Return a loss function that never counts less than one token."""

    @functools.wraps(loss)
    def counted(*args: Any, **kwargs: Any) -> Any:
        result = loss(*args, **kwargs)
        if type(result) is not tuple or len(result) != 3:
            return result
        total, tokens, reduced = result
        return total, torch.clamp(tokens, min=1), reduced

    return counted
