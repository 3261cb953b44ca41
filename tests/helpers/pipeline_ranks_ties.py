# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of tied weights."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any
from unittest import mock

import torch
from helpers.pipeline_chain import (
    WIDTH,
    accumulate,
    batches,
    chain,
    differing,
    looped,
    own_stages,
    runner_of,
)
from helpers.pipeline_ranks_gradients import grid
from helpers.pipeline_ranks_replicas import Fails, adasum_of
from torch import nn

from torch_sm3.pipeline import PipelineError, plan
from torch_sm3.pipeline._ties import Tie


def tied(rank: int, ranks: int, placement: list[int], kind: str | None) -> Any:
    """Tie weights of stages 0, 1 and 3; return what differs."""
    m, wrong = 3, []
    schedule = looped(placement, m) if kind is None else plan(kind, ranks, m)
    mine, whole = chain(4), chain(4)
    options: dict[int, dict[str, Any]] = {
        0: {"tied": {"0.weight": "shared", "0.bias": "other"}},
        1: {"tied": {"0.bias": "other"}},
        3: {"tied": {"0.weight": "shared"}},
    }
    runner = runner_of(mine, schedule, rank, options)
    with torch.no_grad():
        whole[3][0].weight.copy_(whole[0][0].weight)
        whole[1][0].bias.copy_(whole[0][0].bias)
    own = own_stages(schedule, rank)
    for s in own:
        for name, p in mine[s].named_parameters():
            if not torch.equal(p, whole[s].get_parameter(name)):
                wrong.append(f"stage {s} {name} at the start")
    items, targets = batches([2] * m)
    for _ in range(2):
        # Twice, so that gradients of the first step must not be summed again.
        runner.step(torch.cat(items), target=torch.cat(targets))
    squares = runner.optimizer_step(
        torch.optim.SGD([p for s in own for p in mine[s].parameters()], lr=0.0),
        max_norm=1e9,
    ).grad_norm
    runner.close()
    accumulate(whole, items, targets, [1 / m] * m)
    for name, members in (("0.weight", (0, 3)), ("0.bias", (0, 1))):
        first, second = (whole[s].get_parameter(name) for s in members)
        total = first.grad + second.grad
        first.grad, second.grad = total, total.clone()
    seen, norm = set(), 0.0
    for s, module in enumerate(whole):
        for name, p in module.named_parameters():
            p.grad = p.grad + p.grad
            repeated = (s, name) in ((3, "0.weight"), (1, "0.bias"))
            norm += 0.0 if repeated else float(p.grad.double().square().sum())
            seen.add(name)
    wrong += differing(mine, whole, own)
    if squares is None or abs(squares - norm**0.5) > 1e-6:
        wrong.append(f"norm {squares} for {norm**0.5}")
    return wrong, squares


def tied_adasum(rank: int, ranks: int, later: bool) -> list[str]:
    """Tie a weight and reduce by Adasum, which is to meet the sum over the stages."""
    m, wrong = 3, []
    twins = [chain(2), chain(2)]
    mine = chain(2)
    data = [batches([2] * m, seed=replica) for replica in range(2)]
    options: dict[int, dict[str, Any]] = {
        s: {"tied": {"0.weight": "w"}} for s in (0, 1)
    }
    with grid(rank) as place:
        runner = runner_of(
            mine,
            plan("zb_h1", 2, m),
            place.stage,
            options,
            group=place.pipeline,
            data_parallel=place.replicas,
            reduce="adasum",
        )
        items, targets = data[place.replica]
        optimizer = torch.optim.SGD(mine[place.stage].parameters(), lr=0.0)
        for _ in range(2 if later else 1):
            # The second step finds that the first was to be clipped, and begins anew.
            runner.zero_grad()
            runner.step(torch.cat(items), target=torch.cat(targets))
            kept = {n: p.grad.clone() for n, p in mine[place.stage].named_parameters()}
            if later:
                runner.optimizer_step(optimizer, max_norm=1e-3, post_validate=True)
        runner.flush()
        runner.close()
    for twin, (xs, ys) in zip(twins, data, strict=True):
        with torch.no_grad():
            twin[1][0].weight.copy_(twin[0][0].weight)
        accumulate(twin, xs, ys, [1 / m] * m)
        first, second = twin[0][0].weight, twin[1][0].weight
        first.grad = second.grad = first.grad + second.grad
    for name, got in kept.items():
        a, b = (twin[place.stage].get_parameter(name).grad for twin in twins)
        if not torch.allclose(got, adasum_of(a, b), rtol=1e-5, atol=1e-7):
            wrong.append(name)
    return wrong


def tied_badly(rank: int, ranks: int) -> str:
    """Tie weights of unlike shapes."""
    modules = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)]
    options = {0: {"tied": {"bias": "x"}}, 1: {"tied": {"weight": "x"}}}
    try:
        runner_of(modules, plan("1f1b", 2, 2), rank, options)
    except ValueError as error:
        return str(error)
    return "nothing"


def tied_failure(rank: int, ranks: int) -> list[str]:
    """Fail on one member's rank; nobody may wait for its gradient."""
    wrong = []
    options = {
        0: {"tied": {"module.0.weight": "x"}},
        1: {"tied": {"module.0.weight": "x"}},
    }
    mine = [Fails(module) for module in chain(2)]
    runner = runner_of(mine, plan("1f1b", 2, 2), rank, options)
    items, targets = batches([2] * 2)
    for origin in range(2):
        for at in (("F", 1), ("B", 1)):
            module = mine[rank]
            module.calls, module.at = 0, at if rank == origin else None
            try:
                runner.step(torch.cat(items), target=torch.cat(targets))
                wrong.append("no error")
            except PipelineError as error:
                if error.error_type != "ArithmeticError" or error.rank != origin:
                    wrong.append(str(error))
            module.at = None
            runner.step(torch.cat(items), target=torch.cat(targets))
            runner.zero_grad()
    runner.close()
    return wrong


def interrupted(rank: int, ranks: int, victim: int) -> list[Any]:
    """Press Ctrl-C on a rank that waits for the other members of a tied weight.

    Args:
        rank: this rank.
        ranks: their number.
        victim: where it is pressed.
    """
    m, due = 3, [False]
    mine, whole = chain(ranks), chain(ranks)
    name = {"0.weight": "shared"}
    options: dict[int, dict[str, Any]] = {0: {"tied": name}, ranks - 1: {"tied": name}}
    runner = runner_of(mine, plan("1f1b", ranks, m), rank, options)
    items, targets = batches([2] * m)
    accumulate(_alike(whole), items, targets, [1 / m] * m)
    first, last = whole[0][0].weight, whole[-1][0].weight
    total = first.grad + last.grad
    first.grad, last.grad = total, total.clone()
    plain = Tie.reduce

    def reduce(tie: Tie, failed: bool) -> None:
        if due[0] and rank != victim:
            time.sleep(1.2)
        elif due[0]:
            threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT)).start()
        plain(tie, failed)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    found: list[Any] = []
    with mock.patch.object(Tie, "reduce", reduce):
        for number in range(3):
            due[0] = number == 1
            runner.zero_grad()
            try:
                runner.step(torch.cat(items), target=torch.cat(targets))
                found.append(differing(mine, whole, [rank]))
            except PipelineError as error:
                found.append((type(error) is PipelineError, error.rank))
                found.append((error.action[1:], error.error_type))
    runner.close()
    signal.signal(signal.SIGINT, before)
    return found


def _alike(whole: list[nn.Module]) -> list[nn.Module]:
    """Give the last stage the first one's weight."""
    with torch.no_grad():
        whole[-1][0].weight.copy_(whole[0][0].weight)
    return whole
