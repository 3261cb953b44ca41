# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of split backwards and of what a step leaves behind."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import os
import weakref
from typing import Any

import torch
from helpers.pipeline_chain import (
    WIDTH,
    accumulate,
    batches,
    chain,
    differing,
    own_stages,
    runner_of,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torch_sm3.pipeline import PipelineError, plan


class Twice(nn.Module):
    """Use one weight twice on one path."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w @ self.w


class Recomputed(nn.Module):
    """Count how often a block runs that is recomputed in the backward."""

    def __init__(self, module: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.module = module
        self.reentrant = reentrant
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        # A reentrant checkpoint needs an input that requires grad.
        x = x if x.requires_grad else x.detach().requires_grad_()
        return checkpoint(self._block, x, use_reentrant=self.reentrant)

    def _block(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.module(x)


def twice(rank: int, ranks: int) -> list[str]:
    """Compare ``x @ w @ w`` under split schedules with the full backward."""
    wrong = []
    for kind in ("zb_h1", "zbv", "v_min"):
        for split in ("auto", True, False):
            schedule = plan(kind, ranks, 4)
            mine: list[nn.Module] = [Twice() for _ in range(schedule.stages)]
            whole: list[nn.Module] = [Twice() for _ in range(schedule.stages)]
            items, targets = batches([2] * 4)
            options = {s: {"split": split} for s in range(schedule.stages)}
            runner = runner_of(mine, schedule, rank, options)
            runner.step(torch.cat(items), target=torch.cat(targets))
            runner.close()
            accumulate(whole, items, targets, [1 / 4] * 4)
            names = differing(mine, whole, own_stages(schedule, rank))
            wrong += [f"{kind} {split}: {name}" for name in names]
    return wrong


def recomputed(rank: int, ranks: int) -> list[str]:
    """Recompute a block exactly once per microbatch, under any schedule."""
    m, wrong = 4, []
    for kind in ("1f1b", "zb_h1", "zbv"):
        for reentrant in (False, True):
            schedule = plan(kind, ranks, m)
            mine = [Recomputed(x, reentrant) for x in chain(schedule.stages)]
            whole = chain(schedule.stages)
            items, targets = batches([2] * m)
            runner = runner_of(mine, schedule, rank)
            runner.step(torch.cat(items), target=torch.cat(targets))
            runner.close()
            accumulate(whole, items, targets, [1 / m] * m)
            own = own_stages(schedule, rank)
            names = differing([x.module for x in mine], whole, own)
            names += [f"{mine[s].calls} calls" for s in own if mine[s].calls != 2 * m]
            wrong += [f"{kind} {reentrant}: {name}" for name in names]
    return wrong


class Watched(nn.Module):
    """Remember weakly what it returned."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.outputs: list[weakref.ref[Tensor]] = []
        self.most = 0

    def alive(self) -> int:
        return sum(ref() is not None for ref in self.outputs)

    def forward(self, x: Tensor) -> Tensor:
        self.most = max(self.most, self.alive())
        y = self.module(x)
        self.outputs.append(weakref.ref(y))
        return y


def leftovers(rank: int, ranks: int, kind: str) -> list[int]:
    """Count outputs alive at once and after a step, without the collector's help."""
    schedule = plan(kind, ranks, 6)
    mine = [Watched(module) for module in chain(schedule.stages)]
    items, targets = batches([2] * 6)
    runner = runner_of(mine, schedule, rank)
    gc.collect()
    gc.disable()
    try:
        result = runner.step(torch.cat(items), target=torch.cat(targets))
        own = [mine[s] for s in own_stages(schedule, rank)]
        counts = [max(x.most for x in own), sum(x.alive() for x in own)]
        runner.eval(torch.cat(items), target=torch.cat(targets))
        counts.append(sum(x.alive() for x in own))
        assert result.outputs is None
    finally:
        gc.enable()
        runner.close()
    return counts


class _Heap(ctypes.Structure):
    """What glibc's ``mallinfo2`` returns."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks".split()
    ] + [(name, ctypes.c_size_t) for name in ("uordblks", "fordblks", "keepcost")]


def _heap() -> int:
    """Return the bytes that C and C++ hold in all arenas; 0 where none can tell."""
    count = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if count is None:
        return 0
    count.restype = _Heap
    found = count()
    return found.uordblks + found.hblkhd


class Fails(nn.Module):
    """Raise where it is told to."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.armed = False

    def forward(self, x: Tensor) -> Tensor:
        if self.armed:
            raise ArithmeticError("armed")
        return self.module(x)


def fifty_steps(rank: int, ranks: int, everything: bool) -> list[str]:
    """Run fifty steps; return what grew.

    Args:
        rank: this rank.
        ranks: their number.
        everything: whether to trace, to evaluate, to validate optimizer steps later
            and to let some steps fail as well.
    """
    modules = [Fails(module) for module in chain(ranks)]
    items, targets = batches([8] * 4)
    runner = runner_of(modules, plan("zb_h1", ranks, 4), rank, trace=everything)
    optimizer = torch.optim.Adam(modules[rank].parameters(), lr=1e-3)
    whole = torch.cat(items), torch.cat(targets)

    def state() -> dict[str, int]:
        gc.collect()
        tensors = sum(issubclass(type(x), Tensor) for x in gc.get_objects())
        return {
            "tensors": tensors,
            "threads": len(os.listdir("/proc/self/task")),
            "files": len(os.listdir("/proc/self/fd")),
        }

    before: dict[str, int] = {}
    heaps: list[int] = []
    for step in range(50):
        runner.zero_grad()
        runner.step(whole[0], target=whole[1])
        if everything:
            runner.optimizer_step(optimizer, max_norm=1e-2, post_validate=True)
            runner.eval(whole[0], target=whole[1])
        if everything and step % 5 == 0:
            modules[rank].armed = rank == step % ranks
            with contextlib.suppress(PipelineError):
                runner.step(whole[0], target=whole[1])
            modules[rank].armed = False
        if step == 9:
            before = state()
        if step % 10 == 9:
            gc.collect()
            heaps.append(_heap())
    after: dict[str, Any] = state()
    runner.close()
    grown = [
        f"{name}: {before[name]} to {n}"
        for name, n in after.items()
        if n > before[name]
    ]
    # Tables grow now and then; what is left behind by each step, were it a header,
    # makes it at least 5 KiB in every ten steps.
    least = min(b - a for a, b in itertools.pairwise(heaps))
    return grown + ([f"heap: {heaps}"] if least > 2048 else [])
