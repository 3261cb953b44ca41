# SPDX-License-Identifier: Apache-2.0
"""Time and memory of one stage."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_sm3.pipeline._data import tensors_of
from torch_sm3.pipeline._live import LiveBytes
from torch_sm3.pipeline._values import map_tensors


class Measured(NamedTuple):
    """Seconds and bytes of one stage."""

    forward: float
    input: float
    backward: float
    kept_bytes: int
    transient_bytes: int
    static_bytes: int


class _Entry(torch.autograd.Function):
    """Brings a tensor into a graph that does not hold on to it.

    A leaf would be kept by the node that accumulates its gradient, and would be
    counted as saved by a stage that saves nothing.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor) -> Tensor:
        """Return a copy."""
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None]:
        """Return nothing: the gradients end here."""
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

    def __init__(
        self, module: torch.nn.Module, body: Callable[[Any], Any], value: Any
    ) -> None:
        self._body = body
        self._value = map_tensors(value, torch.Tensor.detach)
        self._anchor = torch.zeros((), requires_grad=True)
        self._weights = [x for x in module.parameters() if x.requires_grad]
        self._sums = [torch.zeros_like(x) for x in self._weights]

    def enter(self) -> tuple[Any, list[Tensor]]:
        """Return what other stages sent, and the tensors whose gradients are wanted."""

        def fresh(tensor: Tensor) -> Tensor:
            smooth = tensor.is_floating_point() or tensor.is_complex()
            return _Entry.apply(self._anchor, tensor) if smooth else tensor.clone()

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
        """Run the whole backward and add the gradients of the weights up."""
        ones = [torch.ones_like(x) for x in roots]
        wanted = [*inputs, *self._weights]
        found: Sequence[Tensor | None]
        try:
            found = torch.autograd.grad(roots, wanted, ones, allow_unused=True)
        except RuntimeError:
            # A reentrant checkpoint knows `backward` only.
            before = [x.grad for x in self._weights]
            for weight in self._weights:
                weight.grad = None
            torch.autograd.backward(roots, ones)
            found = (*inputs, *(x.grad for x in self._weights))
            for weight, gradient in zip(self._weights, before, strict=True):
                weight.grad = gradient
        for total, gradient in zip(self._sums, found[len(inputs) :], strict=True):
            if gradient is not None:
                total.add_(gradient)


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


def _memory(run: _Run, output_bytes: int) -> tuple[int, int]:
    """Return the bytes that the graph keeps, and the transient ones."""
    with LiveBytes() as bytes_kept:
        value, inputs = run.enter()
        output, roots = run.forward(value)
        nodes = [x.grad_fn for x in roots]
        # As in a pipeline: what was sent and what came in live on in the graph alone.
        del value, inputs, output, roots
    kept = bytes_kept.live()
    del nodes
    with LiveBytes() as bytes_used:
        value, inputs = run.enter()
        output, roots = run.forward(value)
        del value
        if roots:
            # The output stands for its gradient, which a pipeline would have here.
            run.backward(roots, inputs)
        del inputs, output, roots
    return kept, max(0, bytes_used.peak - kept - output_bytes)


def measure(
    module: torch.nn.Module,
    body: Callable[[Any], Any],
    value: Any,
    split: bool,
    repeats: int,
    warmup: int,
) -> tuple[Measured, Any]:
    """Measure one stage.

    Args:
        module: the stage.
        body: calls the stage, and on the last one the loss, with what others sent.
        value: what other stages sent; its gradients are the input gradients.
        split: whether the backward may be run in parts.
        repeats: runs that count.
        warmup: runs before them.

    Returns:
        The figures, and the output for the next stage.
    """
    device = _device(module)
    run = _Run(module, body, value)
    whole, parts = [], []
    for count in range(warmup + repeats):
        full = _seconds(run, device, True)
        part = _seconds(run, device, False) if split else None
        assert full is not None, "a whole backward runs or raises"
        if count >= warmup:
            whole.append(full)
            parts.append(part)
    backward = statistics.median(b for _, b in whole)
    partials = [part[1] for part in parts if part is not None]
    # Noise must not make a part longer than the whole.
    partial = min(backward, statistics.median(partials)) if partials else backward
    output = map_tensors(run.forward(run.enter()[0])[0], torch.Tensor.detach)
    size = sum(x.nbytes for x in tensors_of(output))
    kept, transient = _memory(run, size)
    weights = [x.nbytes for x in module.parameters()]
    grads = [x.nbytes for x in module.parameters() if x.requires_grad]
    static = sum(weights) + sum(grads) + sum(x.nbytes for x in module.buffers())
    figures = Measured(
        statistics.median(a for a, _ in whole),
        partial,
        backward,
        kept,
        transient,
        static,
    )
    return figures, output
