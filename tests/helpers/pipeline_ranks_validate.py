# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of optimizer steps that are validated later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from helpers.pipeline_chain import (
    WIDTH,
    batches,
    chain,
    looped,
    own_stages,
    runner_of,
)
from helpers.pipeline_ranks_gradients import grid
from helpers.pipeline_ranks_kinds import KINDS as EVERY
from helpers.pipeline_ranks_precision import OPTIMIZERS
from torch import Tensor, nn

from torch_sm3.pipeline import PipelineError, plan

KINDS = {1: ["none"], 2: ["1f1b", "zb_h2", "zbv"], 3: ["1f1b", "zb_h1", "interleaved"]}


class Spoiled(nn.Module):
    """Multiply the gradient in some calls; normalise with running statistics."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.norm = nn.BatchNorm1d(WIDTH)
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.module(x))
        if self.factor != 1.0 and y.requires_grad:
            y.register_hook(lambda g: g * self.factor)
        return y


def _stages(count: int) -> list[nn.Module]:
    return [Spoiled(module) for module in chain(count, dropout=0.3)]


def _train(
    rank: int,
    schedule: Any,
    make: Callable[[Any], torch.optim.Optimizer],
    later: bool,
    scaled: bool,
    factors: list[float],
    group: dict[str, Any],
    stage_rank: int,
) -> dict[str, Any]:
    """Train with an infinity or a large norm in some steps; return all that is left."""
    m = schedule.microbatches
    mine = _stages(schedule.stages)
    own = own_stages(schedule, stage_rank)
    optimizer = make([p for s in own for p in mine[s].parameters()])
    decay = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", 1024.0, growth_interval=2) if scaled else None
    runner = runner_of(mine, schedule, stage_rank, **group)
    torch.manual_seed(11 + rank)
    kept: dict[str, Any] = {"losses": [], "results": [], "scales": []}
    for step, factor in enumerate(factors):
        items, targets = batches([3] * m, seed=step)
        for s in own:
            mine[s].factor = factor if s == 1 % schedule.stages else 1.0
        pairs = zip(items, targets, strict=True)
        given: dict[str, Any] = {"iterator": iter(list(pairs))}
        if step % 2:
            given = {"microbatches": items, "targets": targets}
        result = runner.step(**given, scaler=scaler)
        kept["losses"].append(result.losses.tolist())
        outcome = runner.optimizer_step(
            optimizer, max_norm=2.0, scaler=scaler, post_validate=later
        )
        if not later:
            kept["results"].append(outcome)
        # Schedulers step before the optimizer step is known to be right.
        decay.step()
        runner.zero_grad()
        if step == 1:
            evaluated = runner.eval(torch.cat(items), target=torch.cat(targets))
            kept["eval"] = evaluated.loss.item()
    if later:
        kept["last"] = runner.flush()
        assert runner.flush() is None
    else:
        kept["last"] = kept["results"][-1]
    kept["scales"] = runner.state_dict()["loss_scale"]
    runner.close()
    kept["modules"] = {s: mine[s].state_dict() for s in own}
    kept["state"] = optimizer.state_dict()
    return kept


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
    if isinstance(a, dict):
        return list(a) == list(b) and all(_alike(a[key], b[key]) for key in a)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(_alike, a, b))
    return a == b or (a != a and b != b)


FACTORS = {
    "fine": [1.0] * 3,
    "clipped": [1.0, 1e3, 1.0, 1e3, 1e3, 1.0],
    "infinite": [1.0, float("inf"), 1.0, float("nan"), 1e3, float("inf")],
}


def as_without(rank: int, ranks: int, case: str, scaled: bool) -> list[str]:
    """Compare with steps that wait for all ranks; return what differs."""
    wrong = []
    for kind in KINDS[ranks]:
        schedule = plan(kind, ranks, 4)
        for name, make in OPTIMIZERS.items():
            if kind != KINDS[ranks][0] and name not in ("Adam", "SM3"):
                continue
            runs = [
                _train(rank, schedule, make, later, scaled, FACTORS[case], {}, rank)
                for later in (False, True)
            ]
            for key in ("losses", "eval", "last", "scales", "modules", "state"):
                if not _alike(runs[0].get(key), runs[1].get(key)):
                    wrong.append(f"{kind} {name}: {key}")
            applied = [result.applied for result in runs[0]["results"]]
            finite = [factor < 1e9 for factor in FACTORS[case]]
            if applied != finite:
                wrong.append(f"{kind} {name}: applied {applied}")
    return wrong


def every_kind(rank: int, ranks: int) -> list[str]:
    """Do so under every kind; return what differs."""
    wrong = []
    for kind, chunks in EVERY:
        schedule = plan(kind, ranks, 4, chunks=chunks)
        runs = [
            _train(
                rank,
                schedule,
                OPTIMIZERS["SM3"],
                later,
                False,
                FACTORS["infinite"][:4],
                {},
                rank,
            )
            for later in (False, True)
        ]
        for key in ("losses", "eval", "last", "modules", "state"):
            if not _alike(runs[0].get(key), runs[1].get(key)):
                wrong.append(f"{kind}: {key}")
    return wrong


def replicas(rank: int, ranks: int) -> list[str]:
    """Do so with two replicas, one of which meets an infinity."""
    with grid(rank) as place:
        factors = [1.0, float("inf") if place.replica == 0 else 1.0, 1e3, 1.0]
        group = {
            "group": place.pipeline,
            "data_parallel": place.replicas,
            "reduce": "mean",
        }
        runs = [
            _train(
                place.stage,
                plan("1f1b", 2, 4),
                OPTIMIZERS["SM3"],
                later,
                True,
                factors,
                group,
                place.stage,
            )
            for later in (False, True)
        ]
    keys = ("losses", "eval", "last", "scales", "modules", "state")
    return [key for key in keys if not _alike(runs[0].get(key), runs[1].get(key))]


def failing(rank: int, ranks: int, where: str) -> list[str]:
    """Let an optimizer or a stage fail while a step is pending."""
    mine = _stages(ranks)
    optimizer = torch.optim.SGD(mine[rank].parameters(), lr=0.1)
    runner = runner_of(mine, plan("1f1b", ranks, 3), rank)
    items, targets = batches([3] * 3)
    whole = torch.cat(items), torch.cat(targets)
    texts = []

    def fail(*args: Any) -> None:
        raise LookupError(f"no {where}")

    runner.step(whole[0], target=whole[1])
    before = [p.detach().clone() for p in mine[rank].parameters()]
    handle = None
    if rank == 1 and where in ("optimizer", "both"):
        handle = optimizer.register_step_pre_hook(fail)
    if rank == 1:
        mine[1].factor = 1e6 if where == "stage" else 1.0
    runner.optimizer_step(optimizer, max_norm=0.1, post_validate=True)
    if handle is not None:
        handle.remove()
    if rank == 0 and where in ("stage", "both"):
        handle = mine[0].register_forward_pre_hook(fail)
    try:
        runner.step(whole[0], target=whole[1])
        texts.append("nothing")
    except PipelineError as error:
        texts.append(f"{error.rank} {error.error_type} {error.message}")
    if where == "stage":
        # The step before it ended all the same.
        assert runner.flush() is None
    same = [torch.equal(a, b) for a, b in zip(before, mine[rank].parameters())]  # noqa: B905
    texts.append("kept" if all(same) else "stepped")
    if rank == 0 and handle is not None:
        handle.remove()
    runner.step(whole[0], target=whole[1])
    runner.optimizer_step(optimizer, max_norm=0.1, post_validate=True)
    result = runner.flush()
    runner.close()
    return [*texts, str(result is not None and result.applied)]


def placements(rank: int, ranks: int) -> list[str]:
    """Do so with several stages per rank in any order."""
    wrong = []
    for placement in ([0, 1, 2, 0, 1, 2], [2, 0, 1, 1, 0, 2]):
        schedule = looped(placement, 3)
        runs = [
            _train(
                rank,
                schedule,
                OPTIMIZERS["SGD"],
                later,
                False,
                FACTORS["infinite"],
                {},
                rank,
            )
            for later in (False, True)
        ]
        for key in ("losses", "eval", "last", "modules", "state"):
            if not _alike(runs[0].get(key), runs[1].get(key)):
                wrong.append(f"{placement}: {key}")
    return wrong


def reported(rank: int, ranks: int) -> tuple[list[tuple[int, int]], str]:
    """Report what the snapshots of a runner take."""
    mine = chain(ranks)
    optimizer = OPTIMIZERS["SM3"](mine[rank].parameters())
    runner = runner_of(mine, plan("1f1b", ranks, 2), rank, trace=True)
    items, targets = batches([2] * 2)
    for _ in range(3):
        runner.step(microbatches=items, targets=targets)
        runner.optimizer_step(optimizer, max_norm=1.0, post_validate=True)
    said = runner.report()
    runner.close()
    return said.snapshots, str(said)
