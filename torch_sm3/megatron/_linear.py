# SPDX-License-Identifier: Apache-2.0
"""Megatron's linear layer with a weight gradient that can wait."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from torch_sm3.megatron.env import call_with

_NAME = "linear_with_grad_accumulation_and_async_allreduce"


def splittable(
    module: ModuleType,
) -> Iterator[tuple[Callable[..., Any], Callable[..., Any]]]:
    """Yield Megatron's linear function and one whose backward runs in two parts.

    Megatron's is one autograd function, which computes both gradients in one go. This
    one is made of PyTorch's own: the gradient of the input leaves at once, that of the
    weight when the schedule says so, and it reaches the weight as any other gradient,
    so that data parallelism adds it to ``main_grad`` once.

    Args:
        module: of tensor-parallel layers.
    """
    original = getattr(module, _NAME, None)
    if original is None:
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def linear(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        named = given.arguments
        if named.get("grad_output_buffer") is not None:
            # Megatron itself lets this weight's gradient wait.
            return original(*args, **kwargs)
        value, group = named["input"], named.get("tp_group")
        mappings: Any = inspect.getmodule(module.copy_to_tensor_model_parallel_region)
        sequence = _first(named, "sequence_parallel", "sequence_parallel_enabled")
        if sequence:
            gather = mappings.gather_from_sequence_parallel_region
            value = call_with(gather, value, group=group)
        elif _first(named, "allreduce_dgrad", "async_grad_allreduce"):
            copy = mappings.copy_to_tensor_model_parallel_region
            value = call_with(copy, value, group=group)
        return torch.nn.functional.linear(value, named["weight"], named["bias"])

    yield original, linear


def _first(named: dict[str, Any], *names: str) -> bool:
    return any(bool(named.get(name)) for name in names)
