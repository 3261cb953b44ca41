# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of tensor-parallel SM3."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torch_sm3 import SM3, Cover
from torch_sm3.megatron._shards import TensorParallelSM3

# Shapes, and the axis of which each rank holds a part; None: all of it.
PARTS: list[tuple[tuple[int, ...], int | None]] = [
    ((8, 6), 0),
    ((6, 8), 1),
    ((8,), 0),
    ((6,), None),
    ((6, 4), None),
    ((4, 8, 3), 1),
]
STEPS = 4


def part_of(whole: Tensor, axis: int | None, rank: int, ranks: int) -> Tensor:
    """Return a rank's part of a tensor."""
    return whole if axis is None else whole.chunk(ranks, axis)[rank].contiguous()


def marked(part: Tensor, axis: int | None) -> nn.Parameter:
    """Return a parameter with the attributes that Megatron gives it."""
    parameter: Any = nn.Parameter(part.clone())
    parameter.tensor_model_parallel = axis is not None
    parameter.partition_dim = -1 if axis is None else axis
    parameter.partition_stride = 1
    return parameter


def like_whole(rank: int, ranks: int, options: dict[str, Any]) -> list[str]:
    """Step parts and wholes with equal gradients; return where they differ."""
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(shape, generator=generator) for shape, _ in PARTS]
    wholes = [nn.Parameter(value.clone()) for value in values]
    parts = [
        marked(part_of(value, axis, rank, ranks), axis)
        for value, (_, axis) in zip(values, PARTS, strict=True)
    ]
    reference = SM3(wholes, lr=0.1, **options)
    optimizer = TensorParallelSM3(parts, lambda _: dist.group.WORLD, lr=0.1, **options)
    wrong = []
    for step in range(STEPS):
        for number, (whole, part) in enumerate(zip(wholes, parts, strict=True)):
            axis = PARTS[number][1]
            whole.grad = torch.randn(whole.shape, generator=generator)
            part.grad = part_of(whole.grad, axis, rank, ranks)
        reference.step()
        optimizer.step()
        for number, (whole, part) in enumerate(zip(wholes, parts, strict=True)):
            axis = PARTS[number][1]
            if not torch.equal(part, part_of(whole.detach(), axis, rank, ranks)):
                wrong.append(f"step {step}, parameter {number}")
    return wrong


def refused(rank: int, ranks: int) -> str:
    """Return the error of a cover that is one of a view."""
    parameter = marked(torch.zeros(4, 6), 0)
    cover = Cover.heads(0, 2)
    optimizer = TensorParallelSM3(
        [parameter], lambda _: dist.group.WORLD, lr=0.1, cover=cover
    )
    parameter.grad = torch.ones_like(parameter)
    try:
        optimizer.step()
    except ValueError as error:
        return str(error)
    return "nothing"
