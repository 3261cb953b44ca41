# SPDX-License-Identifier: Apache-2.0
"""What the plug asks of a Megatron: arguments, timers, groups, microbatches."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from torch_sm3.megatron.detect import Package


class Environment:
    """One Megatron, asked in the same way whatever its generation.

    Args:
        package: the Megatron.

    Attributes:
        package: the Megatron.
        state: its module of parallel groups.
    """

    def __init__(self, package: Package) -> None:
        self.package = package
        self.state: Any = package.modules["state"]

    def args(self) -> Any:
        """Return Megatron's arguments; None for megatron-core alone."""
        module: Any = self.package.modules.get("globals")
        return None if module is None else module.get_args()

    def timers(self) -> Any:
        """Return Megatron's timers; None for megatron-core alone."""
        module: Any = self.package.modules.get("globals")
        return None if module is None else module.get_timers()

    def microbatches(self) -> int:
        """Return the number of microbatches of the step at hand."""
        module: Any = self.package.modules["microbatches"]
        return int(module.get_num_microbatches())

    # --- parallel groups ---------------------------------------------------

    @property
    def stages(self) -> int:
        """Number of ranks of a pipeline."""
        return int(self.state.get_pipeline_model_parallel_world_size())

    @property
    def rank(self) -> int:
        """Number of this rank in its pipeline."""
        return int(self.state.get_pipeline_model_parallel_rank())

    @property
    def chunks(self) -> int | None:
        """Number of chunks of a rank; None without interleaving."""
        get = getattr(
            self.state, "get_virtual_pipeline_model_parallel_world_size", None
        )
        if get is not None:
            return get()
        return getattr(self.args(), "virtual_pipeline_model_parallel_size", None)

    def pipeline_group(self) -> dist.ProcessGroup | None:
        """Return the ranks of this rank's pipeline; None without a process group."""
        if not dist.is_initialized():
            return None
        group = self.state.get_pipeline_model_parallel_group()
        # Some releases keep one group for each decoder rank behind an encoder's.
        return group[0] if isinstance(group, list) else group

    def replicas(self) -> dist.ProcessGroup | None:
        """Return the ranks with the same stages as this one."""
        if not dist.is_initialized():
            return None
        return call_with(self.state.get_data_parallel_group, with_context_parallel=True)

    def tensor_group(self, parameter: torch.Tensor) -> dist.ProcessGroup:
        """Return the ranks that hold parts of a parameter.

        Args:
            parameter: the parameter, maybe of an expert.
        """
        expert = getattr(self.state, "get_expert_tensor_parallel_group", None)
        if expert is not None and not getattr(parameter, "allreduce", True):
            return expert()
        return self.state.get_tensor_model_parallel_group()

    def context_size(self, given: Mapping[str, Any]) -> int:
        """Return the number of ranks that share a sequence.

        Args:
            given: arguments of a forward-backward function, which may bring groups.
        """
        groups = given.get("pg_collection") or given.get("grad_finalize_pgs")
        group = getattr(groups, "cp", None)
        if group is not None:
            return int(group.size())
        get = getattr(self.state, "get_context_parallel_world_size", None)
        return 1 if get is None else int(get())

    def enter_chunk(self, chunk: int) -> None:
        """Let Megatron know which chunk of this rank is at work."""
        if self.chunks is not None:
            self.state.set_virtual_pipeline_model_parallel_rank(chunk)


def call_with(function: Callable[..., Any], /, *positions: Any, **known: Any) -> Any:
    """Call a function with those of some keywords that it names.

    Args:
        function: the function.
        *positions: positional arguments.
        **known: what is there to pass.
    """
    names = inspect.signature(function).parameters
    return function(*positions, **{k: v for k, v in known.items() if k in names})


def unwrapped(module: torch.nn.Module) -> Any:
    """Return a model without the wrappers of data parallelism and precision."""
    model: Any = module
    while hasattr(model, "module") and (
        not hasattr(model, "set_input_tensor") or _is_wrapper(model)
    ):
        model = model.module
    return model


def _is_wrapper(model: Any) -> bool:
    """Whether a module is around another one, some of which have its methods, too."""
    return [name for name, _ in model.named_children()] == ["module"]


def chunks_of(model: Any) -> list[Any]:
    """Return the chunks of a model, which is one itself where there are no others."""
    return list(model) if isinstance(model, (list, tuple)) else [model]


def scheduler_of(given: Mapping[str, Any]) -> Any:
    """Return the scheduler among arguments of the loop, by either of its names."""
    return given.get("lr_scheduler") or given["opt_param_scheduler"]


def device_of(model: Any) -> torch.device:
    """Return the device of a model or of its chunks."""
    for chunk in chunks_of(model):
        for parameter in chunk.parameters():
            return parameter.device
    return torch.device("cpu")


def at_home(module: torch.nn.Module) -> AbstractContextManager[Any]:
    """Let code that asks for the current CUDA device get the CPU, if a model is there.

    Megatron's models take buffers on the current CUDA device, which a model on the CPU
    has no use for, and which need not exist.

    Args:
        module: the model.
    """
    device = device_of(module)
    if device.type != "cpu":
        return nullcontext()
    return mock.patch("torch.cuda.current_device", return_value=device)
