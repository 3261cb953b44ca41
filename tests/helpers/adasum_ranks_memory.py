# SPDX-License-Identifier: Apache-2.0
"""Bytes that Adasum needs beside the gradients, as each rank measures them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from helpers.adasum_ranks import Grads, grads
from helpers.memory_meter import memory_meter
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import torch_sm3

WIDTH = 1024
LAYERS = 5  # of 4 MiB each, and their biases


def make_net() -> torch.nn.Module:
    """Return a model with one layer of 16 MiB after some of 4 MiB."""
    torch.manual_seed(3)
    parts = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS - 1)]
    return torch.nn.Sequential(*parts, torch.nn.Linear(WIDTH, 4 * WIDTH))


def inputs(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(2, WIDTH, generator=generator)


def peaks(
    rank: int, size: int, options: dict[str, Any], wrapper: str | None
) -> tuple[list[int], list[int], Grads, Grads]:
    """Peaks of three iterations with DDP's own hook and with Adasum's.

    The first has one bucket for the whole model, the others one of 25 MiB at most.
    """
    found = []
    wrap = getattr(default_hooks, wrapper) if wrapper else lambda hook: hook
    state = torch_sm3.AdasumState(**options)
    for mine in (False, True):
        model = DistributedDataParallel(make_net())
        if mine:
            model.register_comm_hook(state, wrap(torch_sm3.adasum_hook))
        else:
            model.register_comm_hook(None, wrap(default_hooks.allreduce_hook))
        run = []
        for step in range(3):
            dist.barrier()
            with memory_meter() as meter:
                model.zero_grad()
                model(inputs(rank, step)).square().mean().backward()
            run.append(meter.peak)
        found.append(run)
    state.close()
    after = grads(model)
    net = make_net()
    net(inputs(rank, 2)).square().mean().backward()
    return found[0], found[1], grads(net), after
