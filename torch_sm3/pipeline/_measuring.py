# SPDX-License-Identifier: Apache-2.0
"""Time and memory of one stage."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_sm3.pipeline._data import tensors_of
from torch_sm3.pipeline._stashed import Stashed, stash, untouched
from torch_sm3.pipeline._values import map_tensors


class Measured(NamedTuple):
    """Seconds and bytes of one stage."""

    forward: float
    input: float
    backward: float
    stashed: Stashed
    static_bytes: int


class _Entry(torch.autograd.Function):
    """Brings a tensor into a graph whose gradients end there.

    No leaf: a stage may change its inputs in place, and nobody adds up their
    gradients.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor) -> Tensor:
        """Return a copy."""
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None]:
        """Return nothing."""
        return None, None


@contextmanager
def kept_state(module: torch.nn.Module) -> Iterator[None]:
    """Put the buffers and the random number generators back afterwards."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    device = _device(module)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.enable_grad():
        yield
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)


def _device(module: torch.nn.Module) -> torch.device:
    for tensor in (*module.parameters(), *module.buffers()):
        return tensor.device
    return torch.device("cpu")


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class _Run:
    """Runs one stage in parts."""

    def __init__(self, body: Callable[[Any], Any], value: Any) -> None:
        self._body = body
        self._value = value
        self._anchor = torch.zeros((), requires_grad=True)

    def enter(self) -> tuple[Any, list[Tensor]]:
        """Return what other stages sent, and the tensors whose gradients are wanted."""

        def fresh(tensor: Tensor) -> Tensor:
            if tensor.requires_grad:
                return _Entry.apply(self._anchor, tensor.detach())
            return tensor.clone()

        value = map_tensors(self._value, fresh)
        return value, [x for x in tensors_of(value) if x.requires_grad]

    def forward(self, value: Any) -> tuple[Any, list[Tensor]]:
        """Return the output, and those of its tensors that have a graph."""
        output = self._body(value)
        return output, [x for x in tensors_of(output) if x.requires_grad]

    def input_gradient(self, roots: list[Tensor], inputs: list[Tensor]) -> None:
        """Run the backward as far as the inputs need it."""
        ones = [torch.ones_like(x) for x in roots]
        torch.autograd.grad(roots, inputs, ones, allow_unused=True)

    def backward(self, roots: list[Tensor], inputs: list[Tensor]) -> None:
        """Run the whole backward; the gradients of the weights add up.

        Not ``grad``, since a reentrant checkpoint knows ``backward`` only.
        """
        ones = [torch.ones_like(x) for x in roots]
        torch.autograd.backward(roots, ones)


def _seconds(
    run: _Run, device: torch.device, whole: bool
) -> tuple[float, float] | None:
    """Return the time of a forward, and of a whole or partial backward.

    None if the backward cannot be run in parts.
    """
    value, inputs = run.enter()
    start = _now(device)
    _, roots = run.forward(value)
    middle = _now(device)
    if not roots or not (whole or inputs):
        return middle - start, 0.0
    try:
        (run.backward if whole else run.input_gradient)(roots, inputs)
    except RuntimeError:
        if whole:
            raise
        return None
    return middle - start, _now(device) - middle


def measure(
    module: torch.nn.Module,
    body: Callable[[Any], Any],
    value: Any,
    split: bool | str,
    repeats: int,
    warmup: int,
    *,
    first: bool,
    last: bool,
) -> tuple[Measured, Any]:
    """Measure one stage.

    Args:
        module: the stage.
        body: calls the stage, and on the last one the loss, with what others sent.
        value: what other stages sent; the gradients of its tensors that require grad
            are the input gradients.
        split: of the stage.
        repeats: runs that count.
        warmup: runs before them.
        first: whether there is no stage before.
        last: whether it ends in a loss.

    Returns:
        The figures, and the output for the next stage.
    """
    device = _device(module)
    run = _Run(body, value)
    whole, parts = [], []
    with untouched(module):
        for count in range(warmup + repeats):
            full = _seconds(run, device, True)
            part = _seconds(run, device, False) if split is not False else None
            assert full is not None, "a whole backward runs or raises"
            if count >= warmup:
                whole.append(full)
                parts.append(part)
    backward = statistics.median(b for _, b in whole)
    partials = [part[1] for part in parts if part is not None]
    # Noise must not make a part longer than the whole.
    partial = min(backward, statistics.median(partials)) if partials else backward
    output = map_tensors(
        run.forward(run.enter()[0])[0],
        lambda x: x.detach().requires_grad_(x.requires_grad),
    )
    stashed = stash(module, body, value, first, last, split)
    weights = [x.nbytes for x in module.parameters()]
    grads = [x.nbytes for x in module.parameters() if x.requires_grad]
    static = sum(weights) + sum(grads) + sum(x.nbytes for x in module.buffers())
    figures = Measured(
        statistics.median(a for a, _ in whole),
        partial,
        backward,
        stashed,
        static,
    )
    return figures, output
