# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of inputs that broke other implementations."""

from __future__ import annotations

import time
from typing import Any

import torch
from helpers.pipeline_chain import batches, chain, differing, runner_of, squared
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torch_sm3.pipeline import plan

#: Long against the forward of a small layer, also on a busy machine.
HELD = 0.5


class Stamped(nn.Module):
    """Note when each forward begins; the clock is the same for all processes."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.times: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.times.append(time.monotonic())
        return self.module(x)


def slow_link(rank: int, ranks: int) -> list[float]:
    """Hold messages back; return when the forwards of the warm-up began."""
    m = 4
    mine = [Stamped(module) for module in chain(ranks)]
    schedule = plan("1f1b", ranks, m, warmup=2)
    delay = {(0, 1): HELD, (1, 0): HELD}
    runner = runner_of(mine, schedule, rank, link_delay=delay)
    items, targets = batches([2] * m)
    # Connections and first calls take their time.
    runner.step(microbatches=items, targets=targets)
    mine[rank].times.clear()
    torch.distributed.barrier()
    runner.step(microbatches=items, targets=targets)
    runner.close()
    return mine[rank].times[: 2 if rank == 0 else 1]


class Partly(nn.Module):
    """Recompute a microbatch only where it is told to."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.told: list[bool] = []

    def forward(self, x: Tensor, scale: Tensor, recompute: bool) -> Tensor:
        self.told.append(recompute)
        if recompute:
            y: Tensor = checkpoint(self.module, x * scale, use_reentrant=False)
            return y
        return self.module(x * scale)


class Plain(nn.Module):
    """Take two arguments and no more."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.module(x * scale)


def partly_checkpointed(rank: int, ranks: int) -> tuple[list[str], list[bool]]:
    """Checkpoint some microbatches of one stage; return what differs and was told."""
    m = 4

    def models() -> list[Any]:
        first, second = chain(2)
        return [Partly(first), Plain(second)]

    mine, whole = models(), models()
    options = {0: {"kwargs": ("scale", "recompute")}, 1: {"kwargs": ("scale",)}}
    runner = runner_of(mine, plan("zb_h1", ranks, m), rank, options)
    items, targets = batches([2] * m)
    scales, _ = batches([2] * m, seed=9)
    named = [
        {"scale": scale, "recompute": i % 2 == 0} for i, scale in enumerate(scales)
    ]
    runner.step(torch.cat(items), target=torch.cat(targets), kwargs=named)
    runner.close()
    for x, scale, target in zip(items, scales, targets, strict=True):
        y = whole[1](whole[0](x, scale, False), scale)
        (squared(y, target) / m).backward()
    told = mine[0].told if rank == 0 else []
    return differing(mine, whole, [rank]), told
