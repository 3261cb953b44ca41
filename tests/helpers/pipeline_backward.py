# SPDX-License-Identifier: Apache-2.0
"""Runs stages forward and backward: by torch alone, whole and in two parts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torch_sm3 import _ops

Stage = Callable[..., Any]
Absent = Sequence[int]


def backward(split: str = "auto") -> Any:
    """Return the backward of one microbatch."""
    return _ops.pipeline_backward_class()(split)


def tensors_of(value: Any) -> list[Tensor]:
    """Return a stage's outputs as a list."""
    return [value] if isinstance(value, Tensor) else list(value)


def gradient_for(output: Tensor, index: int) -> Tensor:
    """Return some gradient of an output, a function of nothing but its shape."""
    ramp = torch.arange(output.numel(), dtype=torch.float64)
    wave = torch.sin(0.7 * ramp + index).reshape(output.shape)
    return wave.to(output.dtype)


@dataclass
class Run:
    """What a stage's steps left: gradients of inputs and weights, and events."""

    inputs: list[list[Tensor | None]] = field(default_factory=list)
    weights: dict[str, Tensor | None] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)


def named(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the gradients of a module."""
    return {name: weight.grad for name, weight in module.named_parameters()}


def by_torch(
    module: nn.Module,
    batches: Sequence[Sequence[Tensor]],
    absent: Absent = (),
    requires_grad: bool = True,
) -> Run:
    """Run forward and backward with leaves and ``torch.autograd.backward``."""
    run = Run()
    for batch in batches:
        leaves = [
            x.detach().clone().requires_grad_(requires_grad and x.is_floating_point())
            for x in batch
        ]
        inner = [x.clone() for x in leaves]
        outputs = tensors_of(module(*inner))
        roots = [
            (output, gradient_for(output, i))
            for i, output in enumerate(outputs)
            if output.requires_grad and i not in absent
        ]
        if roots:
            torch.autograd.backward([y for y, _ in roots], [g for _, g in roots])
        run.inputs.append([x.grad for x in leaves])
    run.weights = named(module)
    return run


def by_us(
    module: nn.Module,
    batches: Sequence[Sequence[Tensor]],
    split: str,
    *,
    absent: Absent = (),
    requires_grad: bool = True,
    free: bool = False,
) -> Run:
    """Run forward and backward of all microbatches.

    Args:
        module: the stage.
        batches: its inputs, by microbatch.
        split: ``"full"``, or how to split; then all ``input`` come before the first
            ``weight``, so that the parts of several microbatches are open at once.
        absent: outputs whose gradient does not arrive.
        requires_grad: whether the inputs require grad.
        free: whether to free the outputs before the backward.
    """
    run = Run()
    opened: list[tuple[Any, list[Tensor | None]]] = []
    for batch in batches:
        one = backward("auto" if split == "full" else split)
        flags = [requires_grad and x.is_floating_point() for x in batch]
        outputs = tensors_of(module(*one.enter([x.clone() for x in batch], flags)))
        one.leave(outputs)
        gradients = [
            None if i in absent else gradient_for(output, i)
            for i, output in enumerate(outputs)
        ]
        if free:
            one.free(outputs)
        opened.append((one, gradients))
    for one, gradients in opened:
        run.events.append("full" if split == "full" else "input")
        found = one.full(gradients) if split == "full" else one.input(gradients)
        run.inputs.append(list(found))
    if split != "full":
        for one, _ in opened:
            run.events.append("weight")
            one.weight()
            assert not one.owes_weight()
    run.weights = named(module)
    return run


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Return whether two gradients are the same bits, or both absent."""
    if a is None or b is None:
        return a is b
    if a.layout != b.layout:
        return False
    if a.is_sparse:
        a, b = a.coalesce(), b.coalesce()
        return torch.equal(a.indices(), b.indices()) and torch.equal(
            a.values(), b.values()
        )
    return torch.equal(a, b)


def assert_same(run: Run, expected: Run, *, inputs: bool = True) -> None:
    """Check that two runs left the same bits."""
    assert run.weights.keys() == expected.weights.keys()
    for name, gradient in expected.weights.items():
        assert same(run.weights[name], gradient), name
    if inputs:
        for found, wanted in zip(run.inputs, expected.inputs, strict=True):
            for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
                assert same(a, b), f"input {i}"


def twin(module: nn.Module) -> nn.Module:
    """Return a copy without gradients."""
    other = copy.deepcopy(module)
    other.zero_grad(set_to_none=True)
    return other
