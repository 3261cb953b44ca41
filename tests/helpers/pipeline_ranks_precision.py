# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of the optimizer's step and of wrong uses."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from helpers.pipeline_chain import (
    WIDTH,
    accumulate,
    batches,
    chain,
    looped,
    own_stages,
    runner_of,
    squared,
)
from helpers.pipeline_ranks_gradients import grid
from torch import Tensor, nn

import torch_sm3
from torch_sm3.pipeline import PipelineError, PipelineRunner, Schedule, Stage, plan

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


def _parameters(modules: list[nn.Module], own: list[int]) -> list[nn.Parameter]:
    return [p for s in own for p in modules[s].parameters()]


def clipped(rank: int, ranks: int, placement: list[int], scaled: bool) -> Any:
    """Train a few steps with a clipped norm; return norms and what differs."""
    m, wrong, norms = 4, [], []
    schedule = looped(placement, m)
    own = own_stages(schedule, rank)
    for name, make in OPTIMIZERS.items():
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
            other.zero_grad()
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


def failing_optimizer(rank: int, ranks: int, clip: bool) -> tuple[str, bool]:
    """Let the optimizer of rank 1 raise; the next step works."""
    mine = chain(ranks)
    optimizer = torch.optim.SGD(mine[rank].parameters(), lr=0.1)
    runner = runner_of(mine, plan("1f1b", ranks, 2), rank)
    items, targets = batches([2] * 2)
    runner.step(torch.cat(items), target=torch.cat(targets))
    handle = None
    if rank == 1:

        def fail(*args: Any) -> None:
            raise LookupError("no step")

        handle = optimizer.register_step_pre_hook(fail)
    norm = 1.0 if clip else None
    try:
        runner.optimizer_step(optimizer, max_norm=norm)
        text = "nothing"
    except PipelineError as error:
        text = str(error)
        assert isinstance(error.__cause__, LookupError) == (rank == 1)
    if handle is not None:
        handle.remove()
    again = runner.optimizer_step(optimizer, max_norm=norm)
    runner.step(torch.cat(items), target=torch.cat(targets))
    runner.close()
    return text, again.applied


def nested(rank: int, ranks: int) -> list[str]:
    """Call a second runner of the group while the first is at work."""
    texts: list[str] = []
    runners: list[PipelineRunner] = []
    items, targets = batches([2] * 2)
    whole = torch.cat(items), torch.cat(targets)
    entered = threading.Event()
    leave = threading.Event()
    mode = ["plain"]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if mode[0] == "nested":
            try:
                runners[1].step(whole[0], target=whole[1])
            except RuntimeError as error:
                texts.append(str(error))
        return squared(output, target)

    class Waits(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: Tensor) -> Tensor:
            if mode[0] == "thread":
                entered.set()
                leave.wait()
            return self.module(x)

    mine: list[nn.Module] = [Waits(module) for module in chain(ranks)]
    schedule = plan("1f1b", ranks, 2)
    runners.append(runner_of(mine, schedule, rank, loss_fn=loss))
    runners.append(runner_of(chain(ranks), schedule, rank))
    mode[0] = "nested"
    runners[0].step(whole[0], target=whole[1])
    mode[0] = "thread"
    thread = threading.Thread(
        target=runners[0].step, args=(whole[0],), kwargs={"target": whole[1]}
    )
    thread.start()
    if rank == 0:
        entered.wait()
    else:
        # It waits for rank 0 all the while.
        while not any(isinstance(key, str) for key in _busy_keys()):
            threading.Event().wait(0.01)
    try:
        runners[1].step(whole[0], target=whole[1])
    except RuntimeError as error:
        texts.append(str(error))
    leave.set()
    thread.join()
    mode[0] = "plain"
    for runner in runners:
        runner.step(whole[0], target=whole[1])
        runner.close()
    return texts


def _busy_keys() -> list[Any]:
    from torch_sm3.pipeline import _calls

    return list(_calls._busy)


def sharded(rank: int, ranks: int) -> list[str]:
    """Give a stage that FSDP shards to schedules without and with UNSHARD."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    module = fully_shard(nn.Linear(WIDTH, WIDTH), mesh=mesh)
    texts = []
    schedule = plan("none", 1, 2)
    for given in (
        schedule,
        Schedule.parse(
            schedule.text.strip().replace("0F0", "0UNSHARD 0F0") + " 0RESHARD"
        ),
    ):
        try:
            runner = PipelineRunner([Stage(module, 0)], given, loss_fn=squared)
            items, targets = batches([2] * 2)
            runner.step(torch.cat(items), target=torch.cat(targets))
            runner.close()
            texts.append("fine")
        except RuntimeError as error:
            texts.append(str(error))
    return texts


def wrong_steps(rank: int, ranks: int) -> list[str]:
    """Call optimizer_step with what does not fit; return the errors."""
    mine = chain(ranks)
    optimizer = torch.optim.SGD(mine[rank].parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", 2.0)
    runner = runner_of(mine, plan("1f1b", ranks, 2), rank)
    items, targets = batches([2] * 2)
    texts = []
    cases: list[tuple[Any, dict[str, Any]]] = [
        (optimizer, {"max_norm": -1.0}),
        (optimizer, {"max_norm": "big"}),
        (None if rank == 1 else optimizer, {}),
        (optimizer, {"max_norm": 1.0 if rank == 1 else None}),
        (optimizer, {"scaler": scaler if rank == 0 else None}),
        (optimizer, {"max_norm": 1.0 + rank, "scaler": scaler}),
    ]
    for given, options in cases:
        try:
            runner.step(torch.cat(items), target=torch.cat(targets), scaler=scaler)
            runner.optimizer_step(given, **options)
            texts.append("nothing")
        except (ValueError, TypeError) as error:
            texts.append(f"{type(error).__name__} {error}")
        runner.zero_grad()
    # Told later, where the norms are compared.
    runner.step(torch.cat(items), target=torch.cat(targets))
    runner.optimizer_step(optimizer, max_norm=1.0 + rank, post_validate=True)
    try:
        runner.step(torch.cat(items), target=torch.cat(targets))
        texts.append("nothing")
    except PipelineError as error:
        texts.append(f"{error.error_type} {error.message}")
    runner.step(torch.cat(items), target=torch.cat(targets), scaler=scaler)
    applied = runner.optimizer_step(optimizer, max_norm=1.0, scaler=scaler).applied
    runner.close()
    return [*texts, str(applied)]


class Gathers(nn.Module):
    """Hold its weight only between unshard and reshard, as a sharded module does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.there = False
        self.calls: list[str] = []

    def unshard(self) -> None:
        self.there = True
        self.calls.append("UNSHARD")

    def reshard(self) -> None:
        self.there = False
        self.calls.append("RESHARD")

    def forward(self, x: Tensor) -> Tensor:
        assert self.there, "used while it is sharded"
        return self.linear(x)


def gathered(rank: int, ranks: int) -> list[list[str]]:
    """Run a stage whose inner modules are gathered and freed by the schedule."""
    inner = [Gathers(), Gathers()]
    text = plan("none", 1, 2).text.strip()
    schedule = Schedule.parse(text.replace("0F0", "0UNSHARD 0F0") + " 0RESHARD")
    runner = PipelineRunner(
        [Stage(nn.Sequential(*inner), 0)], schedule, loss_fn=squared
    )
    items, targets = batches([2] * 2)
    runner.step(torch.cat(items), target=torch.cat(targets))
    runner.close()
    return [module.calls for module in inner]


def fully_sharded(rank: int, ranks: int) -> list[str]:
    """Shard each stage over its replicas by FSDP; compare with the mean gradient."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    m, wrong = 3, []
    twins = [chain(2), chain(2)]
    data = [batches([2] * m, seed=replica) for replica in range(2)]
    with grid(rank) as place:
        module = chain(2)[place.stage]
        mesh = DeviceMesh.from_group(place.replicas, "cpu")
        fully_shard(module[0], mesh=mesh)
        fully_shard(module, mesh=mesh)
        rows = plan("1f1b", 2, m).text.strip().split("\n")
        head, bodies = rows[0], [row.split(": ") for row in rows[1:]]
        text = [f"{a}: {s}UNSHARD {b} {s}RESHARD" for s, (a, b) in enumerate(bodies)]
        runner = PipelineRunner(
            [Stage(module, place.stage)],
            Schedule.parse("\n".join([head, *text])),
            group=place.pipeline,
            loss_fn=squared,
            timeout=30,
        )
        items, targets = data[place.replica]
        runner.step(torch.cat(items), target=torch.cat(targets))
        runner.close()
        for twin, (xs, ys) in zip(twins, data, strict=True):
            accumulate(twin, xs, ys, [1 / m] * m)
        a, b = (twin[place.stage] for twin in twins)
        pairs = zip(a.parameters(), b.parameters(), strict=True)
        for (name, p), (one, two) in zip(module.named_parameters(), pairs, strict=True):
            if not isinstance(p.grad, DTensor):
                wrong.append(f"{name}: {type(p.grad).__name__}")
            elif not torch.allclose(p.grad.full_tensor(), (one.grad + two.grad) / 2):
                wrong.append(name)
    return wrong


def wrong_options(rank: int, ranks: int) -> list[str]:
    """Make runners with options that do not fit; return the errors."""
    schedule = plan("1f1b", ranks, 2)
    texts = []
    cases: list[tuple[dict[int, Any], dict[str, Any]]] = [
        ({0: {"routes": {"skip": 5}}}, {}),
        ({}, {"reduce": "median"}),
        ({}, {"hook": (None, print)}),
        ({}, {"seed": rank}),
        ({}, {"deterministic": rank == 1}),
    ]
    for stages, options in cases:
        try:
            runner_of(chain(ranks), schedule, rank, stages, **options)
            texts.append("nothing")
        except ValueError as error:
            texts.append(str(error))
    dist.barrier()
    return texts
