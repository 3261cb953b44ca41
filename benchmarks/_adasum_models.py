# SPDX-License-Identifier: Apache-2.0
"""The model of ``make train`` under DDP, with Adasum or with torch's own hook."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import torch_sm3

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from gpt import GPT, Shape, loss_of

#: The defaults of examples/train_gpt.py.
WIDTH, DEPTH, HEADS, CONTEXT, BATCH, VOCABULARY = 64, 12, 4, 64, 32, 90

MEAN = "allreduce_hook"


def under_ddp(
    model: torch.nn.Module, state: torch_sm3.AdasumState | None, **options: object
) -> DistributedDataParallel:
    """Wrap a model, with torch's hook if there is no state."""
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, **options)  # type: ignore[arg-type]
    if state is None:
        wrapped.register_comm_hook(dist.group.WORLD, allreduce_hook)
    else:
        wrapped.register_comm_hook(state, torch_sm3.adasum_hook)
    return wrapped


def training_step(
    state: torch_sm3.AdasumState | None, blocks: str
) -> Callable[[], object]:
    """Return a function that does one step of examples/train_gpt.py."""
    torch.manual_seed(0)
    model = GPT(Shape(VOCABULARY, WIDTH, DEPTH, HEADS, CONTEXT, blocks))
    wrapped = under_ddp(model, state)
    optimizer = torch_sm3.SM3(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(dist.get_rank())
    text = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1), generator=generator)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(wrapped(text[:, :-1]), text[:, 1:]).backward()
        optimizer.step()

    return step


def perceptron(width: int, depth: int) -> torch.nn.Sequential:
    """Return a deep perceptron: many parameters for little computation."""
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for _ in range(depth):
        layers += [torch.nn.Linear(width, width), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers)
