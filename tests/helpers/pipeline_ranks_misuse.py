# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of wrong uses and of sharded stages."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist
from helpers.pipeline_chain import (
    WIDTH,
    accumulate,
    batches,
    chain,
    runner_of,
    squared,
)
from helpers.pipeline_ranks_gradients import grid
from torch import Tensor, nn

from torch_sm3.pipeline import PipelineError, PipelineRunner, Schedule, Stage, plan


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
    # Told later, where the norms are compared: the ranks know that all validate later.
    runner.step(torch.cat(items), target=torch.cat(targets))
    runner.optimizer_step(optimizer, max_norm=1.0, post_validate=True)
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


def unlike_modes(rank: int, ranks: int, odd: int, norm: float | None) -> list[Any]:
    """Validate later on one rank only, or at once; return the errors and what follows.

    Args:
        rank: this rank.
        ranks: their number.
        odd: the rank that does otherwise.
        norm: to which all clip.
    """
    mine, m = chain(ranks), 3
    optimizer = torch.optim.SGD(mine[rank].parameters(), lr=0.1)
    runner = runner_of(mine, plan("1f1b", ranks, m), rank, timeout=10.0)
    items, targets = batches([2] * m)
    whole = torch.cat(items), torch.cat(targets)
    found: list[Any] = []
    for later in (rank == odd, rank != odd, True, False):
        runner.zero_grad()
        runner.step(whole[0], target=whole[1])
        try:
            runner.optimizer_step(optimizer, max_norm=norm, post_validate=later)
            runner.flush()
            found.append("fine")
        except ValueError as error:
            found.append(str(error))
    runner.close()
    return found


def leaves_alone(
    rank: int, ranks: int, odd: int, norm: float | None
) -> tuple[str, str]:
    """Step at once on one rank after all have validated later; return the error.

    Args:
        rank: this rank.
        ranks: their number.
        odd: the rank that does otherwise.
        norm: to which all clip.
    """
    mine, m = chain(ranks), 3
    optimizer = torch.optim.SGD(mine[rank].parameters(), lr=0.1)
    # Far longer than the test may take: nobody is to wait for it.
    runner = runner_of(mine, plan("1f1b", ranks, m), rank, timeout=600.0)
    items, targets = batches([2] * m)
    found = []
    try:
        for step in range(5):
            runner.step(torch.cat(items), target=torch.cat(targets))
            later = step != 3 or rank != odd
            runner.optimizer_step(optimizer, max_norm=norm, post_validate=later)
            runner.zero_grad()
    except PipelineError as error:
        found.append(f"{error.error_type} {error}")
    try:
        runner.step(torch.cat(items), target=torch.cat(targets))
    except PipelineError as error:
        found.append(f"{error.error_type} {error}")
    runner.close()
    return found[0], found[1]


def replica_leaves(rank: int, ranks: int, odd: int) -> list[str]:
    """Step at once in one replica after all have validated later; return the errors.

    Args:
        rank: this rank.
        ranks: four of them, in two replicas.
        odd: the replica that does otherwise, -1 for both.
    """
    m, found = 3, []
    with grid(rank) as place:
        mine = chain(2)
        optimizer = torch.optim.SGD(mine[place.stage].parameters(), lr=0.1)
        runner = runner_of(
            mine,
            plan("1f1b", 2, m),
            place.stage,
            group=place.pipeline,
            data_parallel=place.replicas,
            timeout=600.0,
        )
        items, targets = batches([2] * m)
        try:
            for step in range(5):
                runner.step(torch.cat(items), target=torch.cat(targets))
                later = step != 3 or (odd >= 0 and place.replica != odd)
                runner.optimizer_step(optimizer, max_norm=1.0, post_validate=later)
                runner.zero_grad()
            runner.flush()
        except PipelineError as error:
            found.append(f"{error.error_type} {error}")
        runner.close()
    return found


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
        optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
        norm = runner.optimizer_step(optimizer, max_norm=1e9).grad_norm
        runner.close()
        for twin, (xs, ys) in zip(twins, data, strict=True):
            accumulate(twin, xs, ys, [1 / m] * m)
        first, second = (nn.ModuleList(twin).parameters() for twin in twins)
        means = [
            (one.grad + two.grad) / 2 for one, two in zip(first, second, strict=True)
        ]
        wanted = torch.cat([mean.flatten() for mean in means]).norm()
        if norm is None or abs(norm - float(wanted)) > 1e-5:
            wrong.append(f"norm {norm} for {float(wanted)}")
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
        ({}, {"hook": print if rank == 1 else None}),
        ({}, {"hook": (None, 3)}),
        ({}, {"seed": rank}),
        ({}, {"deterministic": rank == 1}),
    ]
    for stages, options in cases:
        try:
            runner_of(chain(ranks), schedule, rank, stages, **options)
            texts.append("nothing")
        except (ValueError, TypeError) as error:
            texts.append(str(error))
    dist.barrier()
    return texts
