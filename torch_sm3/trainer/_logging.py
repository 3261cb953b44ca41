# SPDX-License-Identifier: Apache-2.0
"""What the trainers write to the logger ``torch_sm3.trainer``."""

from __future__ import annotations

import logging
import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_sm3.trainer._layers import Layer

logger = logging.getLogger("torch_sm3.trainer")


def host_megabytes() -> float:
    """Return this process's memory on the host; the highest so far off Linux."""
    status = Path("/proc/self/statm")
    if status.exists():
        pages = int(status.read_text().split()[1])
        return pages * resource.getpagesize() / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


class StepLog:
    """Messages of one step.

    Args:
        step: number of the step.
        n_steps_per_log: steps from one message about memory to the next.
    """

    def __init__(self, step: int, n_steps_per_log: int) -> None:
        self._step = step
        self._wants_memory = step % n_steps_per_log == 1 % n_steps_per_log
        self._wants_memory &= logger.isEnabledFor(logging.INFO)
        is_power = step > 0 and step & (step - 1) == 0
        self._wants_summary = is_power and logger.isEnabledFor(logging.DEBUG)

    def inputs(self, stack: Sequence[Tensor]) -> None:
        """Write the shapes of a batch."""
        if logger.isEnabledFor(logging.DEBUG):
            shapes = ", ".join(_shape(tensor) for tensor in stack)
            logger.debug("step %d: inputs %s", self._step, shapes)

    def memory(self, phase: str, layer: Layer) -> None:
        """Write how much memory the process has at a layer of a phase."""
        if self._wants_memory:
            logger.info(
                "step %d: %s, %s, host memory %.0f MB",
                self._step,
                phase,
                layer.name,
                host_megabytes(),
            )

    def summary(self, layers: Sequence[Layer], stats: Mapping[str, Any]) -> None:
        """Write shapes and norms of all that a step has changed."""
        if not self._wants_summary:
            return
        for layer in layers:
            self._tensors(layer, "weight", dict(layer.module.named_parameters()))
            self._tensors(layer, "buffer", dict(layer.module.named_buffers()))
            if layer.optimizer is None:
                continue
            for group in layer.optimizer.param_groups:
                options = {k: v for k, v in group.items() if k != "params"}
                self._line(layer, "options", options)
                for i, parameter in enumerate(group["params"]):
                    state = layer.optimizer.state.get(parameter, {})
                    self._tensors(layer, f"slot {i}", state)
        for key, value in stats.items():
            logger.debug("step %d: %s %s", self._step, key, _number(value))

    def _tensors(self, layer: Layer, kind: str, named: Mapping[str, Any]) -> None:
        for name, value in named.items():
            if isinstance(value, Tensor):
                norm = torch.linalg.vector_norm(value.detach().double())
                text = f"{name} {_shape(value)} norm {float(norm):.6g}"
                self._line(layer, kind, text)

    def _line(self, layer: Layer, kind: str, text: object) -> None:
        logger.debug("step %d: %s: %s %s", self._step, layer.name, kind, text)


def _shape(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _number(value: Any) -> str:
    return f"{float(value):.6g}"
