# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of data-parallel replicas and their hooks."""

from __future__ import annotations

from typing import Any

import torch
from helpers.pipeline_chain import (
    WIDTH,
    accumulate,
    batches,
    chain,
    differing,
    runner_of,
)
from helpers.pipeline_ranks_gradients import grid
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torch_sm3 import AdasumState, adasum_hook
from torch_sm3.pipeline import PipelineError, plan


class Sometimes(nn.Module):
    """Use a second weight in the first microbatch only, and a third never."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.second = nn.Parameter(torch.ones(WIDTH))
        self.third = nn.Parameter(torch.ones(3))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.module(x)
        return y * self.second if self.calls == 1 else y


def _sometimes() -> list[nn.Module]:
    return [Sometimes(module) for module in chain(2)]


def replicated(rank: int, ranks: int, reduce: str | None, kind: str) -> list[str]:
    """Reduce over two replicas by what is built in; return what differs."""
    m = 3
    mine, twins = _sometimes(), [_sometimes(), _sometimes()]
    data = [batches([2] * m, seed=replica) for replica in range(2)]
    with grid(rank) as place:
        runner = runner_of(
            mine,
            plan(kind, 2, m),
            place.stage,
            group=place.pipeline,
            data_parallel=place.replicas,
            reduce=reduce,
        )
        items, targets = data[place.replica]
        runner.step(torch.cat(items), target=torch.cat(targets))
        runner.close()
    for twin, (items, targets) in zip(twins, data, strict=True):
        accumulate(twin, items, targets, [1 / m] * m)
    pairs = zip(*(twin[place.stage].parameters() for twin in twins), strict=True)
    wrong = []
    for (name, mine_p), (a, b) in zip(
        mine[place.stage].named_parameters(), pairs, strict=True
    ):
        if a.grad is None:
            if mine_p.grad is not None:
                wrong.append(f"{name} has a gradient")
            continue
        assert b.grad is not None and mine_p.grad is not None
        wanted = (a, b)[place.replica].grad
        if reduce in ("mean", "sum"):
            wanted = (a.grad + b.grad) / (2 if reduce == "mean" else 1)
        if reduce == "adasum":
            wanted = adasum_of(a.grad, b.grad)
        if not torch.allclose(mine_p.grad, wanted, rtol=1e-5, atol=1e-7):
            wrong.append(name)
        if reduce != "adasum" and not torch.equal(mine_p.grad, wanted):
            wrong.append(f"{name} bits")
    return wrong


def adasum_of(a: Tensor, b: Tensor) -> Tensor:
    dot = (a.double() * b.double()).sum()
    first = 1 - dot / (2 * a.double().square().sum())
    second = 1 - dot / (2 * b.double().square().sum())
    return (first * a.double() + second * b.double()).float()


def hooked(rank: int, ranks: int, kind: str, adasum: bool, wrap: bool) -> Any:
    """Reduce by a hook; return what it was called with, and what differs."""
    m, seen, wrong = 4, [], []
    mine, twins = _sometimes(), [_sometimes(), _sometimes()]
    data = [batches([2] * m, seed=replica) for replica in range(2)]
    with grid(rank) as place:
        state = AdasumState(place.replicas) if adasum else None

        # DDP refuses a bucket of another annotated type than its own.
        def hook(own, bucket):  # type: ignore[no-untyped-def]
            names = [tuple(g.shape) for g in bucket.gradients()]
            same = [p.shape for p in bucket.parameters()] == names
            seen.append((bucket.index(), bucket.is_last(), same))
            if own is not None:
                return adasum_hook(own, bucket)
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            bucket.set_buffer(bucket.buffer() * 2)
            future.set_result(bucket.buffer())
            return future

        modules: list[Any] = list(mine)
        if wrap:
            modules[place.stage] = DistributedDataParallel(
                mine[place.stage], process_group=place.replicas
            )
            modules[place.stage].register_comm_hook(state, hook)
        options: dict[str, Any] = {"group": place.pipeline}
        if wrap:
            try:
                runner_of(modules, plan(kind, 2, m), place.stage, **options)
                wrong.append("a DDP hook that nobody calls")
            except ValueError as error:
                if "hook=(state, function)" not in str(error):
                    wrong.append(str(error))
        else:
            options["data_parallel"] = place.replicas
        runner = runner_of(
            modules, plan(kind, 2, m), place.stage, hook=(state, hook), **options
        )
        items, targets = data[place.replica]
        for _ in range(2):
            runner.zero_grad()
            for module in mine:
                module.calls = 0
            runner.step(torch.cat(items), target=torch.cat(targets))
        runner.close()
        if state is not None:
            if state.step != 2:
                wrong.append(f"{state.step} steps of the state")
            state.close()
    for twin, (items, targets) in zip(twins, data, strict=True):
        accumulate(twin, items, targets, [1 / m] * m)
    a, b = (twin[place.stage] for twin in twins)
    for (name, p), one, two in zip(
        mine[place.stage].named_parameters(),
        a.parameters(),
        b.parameters(),
        strict=True,
    ):
        if one.grad is None or two.grad is None:
            continue
        own = (one, two)[place.replica].grad
        wanted = adasum_of(one.grad, two.grad) if adasum else own * 2
        if p.grad is None or not torch.allclose(p.grad, wanted, rtol=1e-5, atol=1e-7):
            wrong.append(name)
    return seen, wrong


def unreduced_stage(rank: int, ranks: int) -> list[str]:
    """Leave one stage out of the reduction."""
    mine, whole = chain(2), chain(2)
    with grid(rank) as place:
        items, targets = batches([2] * 2, seed=place.replica)
        runner = runner_of(
            mine,
            plan("1f1b", 2, 2),
            place.stage,
            {0: {"reduce": False}},
            group=place.pipeline,
            data_parallel=place.replicas,
        )
        runner.step(torch.cat(items), target=torch.cat(targets))
        runner.close()
    accumulate(whole, items, targets, [1 / 2] * 2)
    alone = not differing(mine, whole, [place.stage])
    return [] if alone == (place.stage == 0) else ["stage"]


def _sharing() -> list[nn.Module]:
    modules = chain(4)
    modules[2][0].weight = modules[0][0].weight
    return modules


def shared_and_thawed(rank: int, ranks: int) -> list[str]:
    """Share a parameter between two stages of a rank, and thaw others after a step."""
    wrong = []
    mine, twins = _sharing(), [_sharing(), _sharing()]
    data = [batches([2] * 3, seed=replica) for replica in range(2)]
    for twin, (items, targets) in zip(twins, data, strict=True):
        accumulate(twin, items, targets, [1 / 3] * 3)
    with grid(rank) as place:
        runner = runner_of(
            mine,
            plan("interleaved", 2, 3, chunks=2),
            place.stage,
            group=place.pipeline,
            data_parallel=place.replicas,
        )
        items, targets = data[place.replica]
        for thawed in (False, True):
            for module in mine:
                module[0].bias.requires_grad_(thawed)
            runner.zero_grad()
            runner.step(torch.cat(items), target=torch.cat(targets))
        runner.close()
    for s in (place.stage, place.stage + 2):
        pairs = zip(*(twin[s].parameters() for twin in twins), strict=True)
        for (name, p), (a, b) in zip(mine[s].named_parameters(), pairs, strict=True):
            wanted = (a.grad + b.grad) / 2
            if p.grad is None or not torch.allclose(p.grad, wanted, atol=1e-7):
                wrong.append(f"stage {s} {name}")
    return wrong


class SparseStage(nn.Module):
    """Look up rows of an embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x[:, 0].abs().long() % 5)


def sparse(rank: int, ranks: int) -> tuple[str, int]:
    """Reduce sparse gradients over replicas, which is refused on all ranks."""
    modules = [SparseStage(), *chain(1)]
    items, targets = batches([2] * 2)
    with grid(rank) as place:
        runner = runner_of(
            modules,
            plan("1f1b", 2, 2),
            place.stage,
            group=place.pipeline,
            data_parallel=place.replicas,
        )
        try:
            runner.step(torch.cat(items), target=torch.cat(targets))
            return "nothing", 0
        except PipelineError as error:
            return f"{error.action} {error.error_type} {error.message}", len(
                error.others
            )
        finally:
            runner.close()


class Fails(nn.Module):
    """Raise in one call, or in its backward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.at: tuple[str, int] | None = None
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        now, self.calls = self.calls, self.calls + 1
        if self.at == ("F", now):
            raise ArithmeticError("boom")
        y = self.module(x)
        if self.at == ("B", now):
            y.register_hook(self._raise)
        return y

    def _raise(self, gradient: Tensor) -> None:
        raise ArithmeticError("boom")


def failing_replica(rank: int, ranks: int) -> Any:
    """Fail in one replica; return what all ranks report, and what differs later."""
    m, reports, wrong = 4, [], []
    with grid(rank) as place:
        mine = [Fails(module) for module in chain(2)]
        runner = runner_of(
            mine,
            plan("1f1b", 2, m),
            place.stage,
            group=place.pipeline,
            data_parallel=place.replicas,
        )
        data = [batches([2] * m, seed=replica) for replica in range(2)]
        items, targets = data[place.replica]
        for origin in range(4):
            for at in (("F", 1), ("B", m - 1)):
                module = mine[place.stage]
                module.calls, module.at = 0, at if rank == origin else None
                try:
                    runner.step(torch.cat(items), target=torch.cat(targets))
                    wrong.append("no error")
                except PipelineError as error:
                    assert isinstance(error.__cause__, ArithmeticError) == (
                        rank == origin
                    ), error.__cause__
                    where = error.rank, error.stage, error.microbatch, error.action
                    reports.append((*where, error.error_type, error.replica))
                if any(p.grad is not None for p in module.parameters()):
                    wrong.append("gradients are left")
                module.at = None
                runner.step(torch.cat(items), target=torch.cat(targets))
                twins = [[Fails(x) for x in chain(2)] for _ in range(2)]
                for twin, (xs, ys) in zip(twins, data, strict=True):
                    accumulate(twin, xs, ys, [1 / m] * m)
                a, b = (twin[place.stage].parameters() for twin in twins)
                for p, one, two in zip(module.parameters(), a, b, strict=True):
                    if not torch.equal(p.grad, (one.grad + two.grad) / 2):
                        wrong.append("the next step")
                runner.zero_grad()
        runner.close()
    return reports, wrong
