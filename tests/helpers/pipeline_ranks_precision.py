# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of the optimizer's step and of wrong uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from helpers.pipeline_chain import (
    accumulate,
    batches,
    chain,
    looped,
    own_stages,
    runner_of,
)
from helpers.pipeline_ranks_gradients import grid
from torch import Tensor, nn

import torch_sm3
from torch_sm3.pipeline import PipelineError, plan

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "SM3": lambda p: torch_sm3.SM3(p, lr=0.1),
    "SM3 with momentum": lambda p: torch_sm3.SM3(p, lr=0.1, momentum=0.9),
    "fused SM3": lambda p: torch_sm3.SM3(p, lr=0.1, fused=True),
}


def torch_optimizers() -> dict[str, Callable[[Any], torch.optim.Optimizer]]:
    """Return all optimizers that this torch has, but those that need more.

    Not LBFGS, which calls a closure, and SparseAdam, which wants sparse gradients.
    """
    found: dict[str, Callable[[Any], torch.optim.Optimizer]] = {}
    for name, kind in vars(torch.optim).items():
        if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer):
            continue
        if name not in ("Optimizer", "LBFGS", "SparseAdam", "Muon"):
            found[name] = lambda p, kind=kind: kind(p, lr=0.05)  # type: ignore[misc]
    if hasattr(torch.optim, "Muon"):
        # It takes matrices only.
        found["Muon"] = lambda p: torch.optim.Muon([x for x in p if x.ndim == 2])
    return found


def _parameters(modules: list[nn.Module], own: list[int]) -> list[nn.Parameter]:
    return [p for s in own for p in modules[s].parameters()]


def clipped(
    rank: int, ranks: int, placement: list[int], scaled: bool, every: bool = False
) -> Any:
    """Train a few steps with a clipped norm; return norms and what differs.

    Args:
        rank: this rank.
        ranks: their number.
        placement: rank of each stage.
        scaled: whether a scaler scales the loss.
        every: whether to take all of torch's optimizers instead of some and ours.
    """
    m, wrong, norms = 4, [], []
    schedule = looped(placement, m)
    own = own_stages(schedule, rank)
    for name, make in (torch_optimizers() if every else OPTIMIZERS).items():
        mine, whole = chain(4), chain(4)
        optimizer = make(_parameters(mine, own))
        other = make(_parameters(whole, list(range(4))))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if scaled else None
        runner = runner_of(mine, schedule, rank)
        for step in range(3):
            items, targets = batches([2] * m, seed=step)
            runner.zero_grad()
            runner.step(torch.cat(items), target=torch.cat(targets), scaler=scaler)
            result = runner.optimizer_step(optimizer, max_norm=0.05, scaler=scaler)
            for module in whole:
                module.zero_grad()
            accumulate(whole, items, targets, [1 / m] * m)
            norm = nn.utils.clip_grad_norm_(_parameters(whole, list(range(4))), 0.05)
            other.step()
            if not result.applied or result.grad_norm is None:
                wrong.append(f"{name} {step}: {result}")
            norms.append(result.grad_norm)
            if abs(float(norm) - norms[-1]) > 1e-6:
                wrong.append(f"{name} {step}: norm {norms[-1]} for {norm}")
        runner.close()
        for s in own:
            pairs = zip(mine[s].parameters(), whole[s].parameters(), strict=True)
            if not all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in pairs):
                wrong.append(f"{name}: stage {s}")
    return wrong, norms


class Poisons(nn.Module):
    """Make the gradient infinite where it is told to."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.module(x)
        if self.training and self.factor != 1.0 and y.requires_grad:
            y.register_hook(lambda g: g * self.factor)
        return y


def infinite(rank: int, ranks: int, frozen: bool) -> list[Any]:
    """Force an infinity on stage 1 in the second of four steps.

    Args:
        rank: this rank.
        ranks: their number.
        frozen: whether stage 0 has nothing to train.

    Returns:
        For each step whether it was applied, the scale after it and whether the
        parameters moved.
    """
    mine = [Poisons(module) for module in chain(ranks)]
    if frozen:
        mine[0].requires_grad_(False)
    parameters = list(mine[rank].parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    runner = runner_of(mine, plan("1f1b", ranks, 4), rank)
    items, targets = batches([2] * 4)
    seen = []
    for step in range(4):
        mine[rank].factor = float("inf") if rank == 1 and step == 1 else 1.0
        before = [p.detach().clone() for p in parameters]
        runner.zero_grad()
        runner.step(torch.cat(items), target=torch.cat(targets), scaler=scaler)
        result = runner.optimizer_step(optimizer, scaler=scaler)
        pairs = zip(before, parameters, strict=True)
        moved = any(not torch.equal(a, b) for a, b in pairs)
        moved = moved or (frozen and rank == 0 and result.applied)
        seen.append((result.applied, scaler.get_scale(), moved))
        assert runner.state_dict()["loss_scale"] == scaler.get_scale()
    runner.close()
    return seen


def infinite_replica(rank: int, ranks: int) -> list[Any]:
    """Force an infinity in one replica that shares no gradients with the other."""
    with grid(rank) as place:
        mine = [Poisons(module) for module in chain(2)]
        optimizer = torch.optim.SGD(mine[place.stage].parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        runner = runner_of(
            mine,
            plan("1f1b", 2, 2),
            place.stage,
            group=place.pipeline,
            data_parallel=place.replicas,
            reduce=None,
        )
        items, targets = batches([2] * 2)
        mine[place.stage].factor = float("inf") if rank == 3 else 1.0
        runner.step(torch.cat(items), target=torch.cat(targets), scaler=scaler)
        result = runner.optimizer_step(optimizer, scaler=scaler)
        runner.close()
    return [result.applied, scaler.get_scale()]


def no_norm(rank: int, ranks: int) -> list[Any]:
    """Meet a norm that is NaN, without a scaler."""
    mine = [Poisons(module) for module in chain(ranks)]
    optimizer = torch.optim.SGD(mine[rank].parameters(), lr=0.1)
    runner = runner_of(mine, plan("1f1b", ranks, 2), rank)
    items, targets = batches([2] * 2)
    mine[rank].factor = float("nan") if rank == 1 else 1.0
    before = [p.detach().clone() for p in mine[rank].parameters()]
    runner.step(torch.cat(items), target=torch.cat(targets))
    result = runner.optimizer_step(optimizer, max_norm=1.0)
    runner.close()
    pairs = zip(before, mine[rank].parameters(), strict=True)
    return [result.applied, all(torch.equal(a, b) for a, b in pairs)]


def failing_optimizer(
    rank: int, ranks: int, clip: bool, scaled: bool, later: bool
) -> tuple[str, bool, float]:
    """Let the optimizer of rank 1 raise; the next steps work."""
    mine = chain(ranks)
    optimizer = torch.optim.SGD(mine[rank].parameters(), lr=0.1)
    runner = runner_of(mine, plan("1f1b", ranks, 2), rank)
    scaler = torch.amp.GradScaler("cpu", 64.0, growth_interval=2) if scaled else None
    items, targets = batches([2] * 2)
    norm = 1.0 if clip else None

    def train() -> Any:
        runner.zero_grad()
        runner.step(torch.cat(items), target=torch.cat(targets), scaler=scaler)
        result = runner.optimizer_step(
            optimizer, max_norm=norm, scaler=scaler, post_validate=later
        )
        return runner.flush() if later else result

    handle = None
    if rank == 1:

        def fail(*args: Any) -> None:
            raise LookupError("no step")

        handle = optimizer.register_step_pre_hook(fail)
    try:
        train()
        text = "nothing"
    except PipelineError as error:
        text = str(error)
        assert isinstance(error.__cause__, LookupError) == (rank == 1)
    if handle is not None:
        handle.remove()
    applied = all(train().applied for _ in range(3))
    runner.close()
    return text, applied, 0.0 if scaler is None else scaler.get_scale()
