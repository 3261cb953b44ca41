# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of steps that end without waiting for the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from helpers.pipeline_chain import batches, chain, own_stages, runner_of, squared
from helpers.pipeline_ranks_gradients import grid
from torch import Tensor, nn

import torch_sm3
from torch_sm3.pipeline import PipelineError, plan

M = 4
#: The step that goes wrong; the optimizer steps before it were validated later.
BAD = 2


class Trips(nn.Module):
    """Raise once, in a forward, in its backward or when a weight's gradient is added.

    Args:
        module: what to run.
        where: F, B or W; None for never.
    """

    def __init__(self, module: nn.Module, where: str | None = None) -> None:
        super().__init__()
        self.module = module
        self.where: str | None = None
        self.calls = 0
        weight = next(module.parameters())
        weight.register_post_accumulate_grad_hook(lambda _: self._at("W"))

    def forward(self, x: Tensor) -> Tensor:
        self._at("F")
        y = self.module(x)
        if y.requires_grad:
            y.register_hook(lambda _: self._at("B"))
        return y

    def arm(self, where: str) -> None:
        """Raise in the last microbatch of the step that follows."""
        self.where, self.calls = where, 0

    def _at(self, where: str) -> None:
        if where != self.where:
            return
        self.calls += 1
        if self.calls == M:
            self.where = None
            raise ArithmeticError(f"in {where}")


def _data(step: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    items, targets = batches([2] * M, seed=100 * seed + step)
    return torch.cat(items), torch.cat(targets)


def _fields(error: PipelineError) -> tuple[Any, ...]:
    where = error.rank, error.stage, error.microbatch, error.action
    return (*where, error.error_type, error.message, error.replica)


def failing(
    rank: int, ranks: int, kind: str, origin: int, where: str, scaled: bool
) -> Any:
    """Fail in a step that ends early; go on, and compare with a run without it.

    Returns:
        What was raised, in which call, whether it had this rank's own cause, and what
        differs afterwards.
    """
    schedule = plan(kind, ranks, M)
    own = own_stages(schedule, rank)
    raised: list[Any] = []
    # A forward that fails in a step that begins anew would be forgotten with it.
    norm = 10.0 if where == "F" else 0.1

    def train(steps: list[int], later: bool, trip: bool) -> list[Tensor]:
        mine = [Trips(module) for module in chain(schedule.stages, dropout=0.3)]
        optimizer = torch_sm3.SM3([p for s in own for p in mine[s].parameters()], 0.1)
        scaler = torch.amp.GradScaler("cpu", 64.0) if scaled else None
        runner = runner_of(mine, schedule, rank, deterministic=True)
        for step in steps:
            x, y = _data(step)
            if trip and step == BAD and rank == origin:
                mine[own[0]].arm(where)
            call = "step"
            try:
                runner.step(x, target=y, scaler=scaler)
                call = "optimizer_step"
                runner.optimizer_step(
                    optimizer, max_norm=norm, scaler=scaler, post_validate=later
                )
            except PipelineError as error:
                cause = isinstance(error.__cause__, ArithmeticError)
                raised.append((step, call, _fields(error), cause == (rank == origin)))
                assert all(p.grad is None for s in own for p in mine[s].parameters())
            runner.zero_grad()
        runner.flush()
        runner.close()
        state = optimizer.state_dict()["state"].values()
        left = [p.detach() for s in own for p in mine[s].parameters()]
        return left + [v for s in state for v in s.values() if isinstance(v, Tensor)]

    got = train(list(range(6)), later=True, trip=True)
    # A step that was found to be wrong in the next one does not count either.
    lost = raised[0][0] if raised else -1
    good = [step for step in range(6) if step not in (BAD, lost)]
    wanted = train(good, later=False, trip=False)
    differ = [
        i for i, (a, b) in enumerate(zip(got, wanted, strict=True)) if not a.equal(b)
    ]
    return raised, differ


def failing_replica(rank: int, ranks: int, where: str) -> Any:
    """Fail in one of two replicas; return in which call each rank heard of it."""
    raised: list[Any] = []
    with grid(rank) as place:
        mine = [Trips(module) for module in chain(2)]
        optimizer = torch.optim.SGD(mine[place.stage].parameters(), lr=0.1)
        runner = runner_of(
            mine,
            plan("1f1b", 2, M),
            place.stage,
            group=place.pipeline,
            data_parallel=place.replicas,
        )
        for step in range(5):
            x, y = _data(step, place.replica)
            if step == BAD and rank == 3:
                mine[place.stage].arm(where)
            try:
                runner.step(x, target=y)
                runner.optimizer_step(optimizer, max_norm=0.1, post_validate=True)
            except PipelineError as error:
                raised.append((step, _fields(error)))
            runner.zero_grad()
        runner.flush()
        weights = [p.detach().clone() for p in mine[place.stage].parameters()]
        same = [torch.empty_like(p) for p in weights]
        for mirror, weight in zip(same, weights, strict=True):
            mirror.copy_(weight)
            dist.broadcast(mirror, place.stage, group=place.replicas)
        runner.close()
    equal = all(a.equal(b) for a, b in zip(same, weights, strict=True))
    return raised, equal


def ended_by(rank: int, ranks: int, call: str) -> tuple[str, str, bool]:
    """Fail in a backward of a step that ends early; end it by another call."""
    mine = [Trips(module) for module in chain(ranks)]
    optimizer = torch.optim.SGD(mine[rank].parameters(), lr=0.1)
    runner = runner_of(mine, plan("1f1b", ranks, M), rank)
    x, y = _data(0)
    calls: dict[str, Callable[[], Any]] = {
        "step": lambda: runner.step(x, target=y),
        "optimizer_step": lambda: runner.optimizer_step(optimizer),
        "flush": runner.flush,
        "eval": lambda: runner.eval(x, target=y),
    }
    runner.step(x, target=y)
    runner.optimizer_step(optimizer, max_norm=0.1, post_validate=True)
    before = runner.state_dict()["steps"]
    if rank == ranks - 1:
        mine[rank].arm("W")
    text = "nothing"
    runner.step(x, target=y)
    try:
        calls[call]()
    except PipelineError as error:
        text = str(error)
    steps = runner.state_dict()["steps"] - before
    gone = all(p.grad is None for p in mine[rank].parameters())
    again = runner.step(x, target=y).loss
    runner.close()
    assert again.isfinite()
    return text, f"{steps} more steps", gone


def wrong_arguments(rank: int, ranks: int, kind: str, where: int) -> tuple[str, bool]:
    """Give one rank wrong data while an optimizer step is pending; then go on."""
    runs = []
    text = "nothing"
    for later in (False, True):
        mine = chain(ranks)
        optimizer = torch.optim.SGD(mine[rank].parameters(), lr=0.1)
        runner = runner_of(mine, plan(kind, ranks, M), rank)
        losses = []
        for step in range(4):
            x, y = _data(step)
            if later and step == 2:
                try:
                    wrong = x[:1] if rank == where else x, y[:1] if rank == where else y
                    runner.step(wrong[0], target=wrong[1])
                except ValueError as error:
                    text = str(error)
            losses.append(runner.step(x, target=y).loss.item())
            runner.optimizer_step(optimizer, max_norm=0.1, post_validate=later)
            runner.zero_grad()
        runner.flush()
        runner.close()
        runs.append((losses, [p.tolist() for p in mine[rank].parameters()]))
    return text, runs[0] == runs[1]


def does_not_wait(rank: int, ranks: int, kind: str) -> list[float]:
    """Let one rank's last backward of a step wait until another has left that step.

    Under 1F1B rank 0 ends last, under ZB-H2 the last rank.
    """
    store = dist.distributed_c10d._get_default_store()
    mine = chain(ranks)
    optimizer = torch.optim.SGD(mine[rank].parameters(), lr=0.1)
    losses: list[float] = []
    left = f"left {kind}"
    ends_last, begins_first = (0, ranks - 1) if kind == "1f1b" else (ranks - 1, 0)
    calls = [0]

    def wait(_: Tensor) -> None:
        calls[0] += 1
        if calls[0] == 3 * M:
            store.wait([left])

    if rank == ends_last:
        next(mine[rank].parameters()).register_post_accumulate_grad_hook(wait)
    runner = runner_of(mine, plan(kind, ranks, M), rank)
    for step in range(4):
        x, y = _data(step)
        losses.append(runner.step(x, target=y).loss.item())
        runner.optimizer_step(optimizer, max_norm=10.0, post_validate=True)
        if step == 2 and rank == begins_first:
            store.set(left, "")
    runner.flush()
    runner.close()
    return losses


def _counted(output: Tensor, target: Tensor) -> tuple[Tensor, int, dict[str, Any]]:
    return squared(output, target) * len(target), len(target), {"n": len(target)}


def _trained(stage: int, seed: int, later: bool, options: dict[str, Any]) -> Any:
    """Return all that is seen of a few steps on two ranks, and the weights."""
    mine = chain(2)
    optimizer = torch.optim.SGD(mine[stage].parameters(), lr=0.1)
    runner = runner_of(mine, plan("zb_h1", 2, M), stage, **options)
    seen: list[Any] = []
    for step in range(4):
        items, targets = batches([3, 1, 2 + seed, 2], seed=10 * seed + step)
        result = runner.step(iterator=iter(list(zip(items, targets, strict=True))))
        seen += [result.loss, result.losses, result.tokens, result.metrics]
        runner.optimizer_step(optimizer, max_norm=0.5, post_validate=later)
        runner.zero_grad()
    runner.flush()
    runner.close()
    return str(seen), [p.tolist() for p in mine[stage].parameters()]


def reductions(rank: int, ranks: int) -> list[str]:
    """Compare early ends with others where losses are divided at the end."""
    wrong = []
    for options in (
        {"loss_reduction": "tokens", "loss_fn": _counted},
        {"loss_reduction": "samples"},
        {"loss_reduction": "sum", "share_loss": False},
    ):
        first, later = (_trained(rank, 0, later, options) for later in (False, True))
        if first != later:
            wrong.append(str(options["loss_reduction"]))
    return wrong


def replicated_tokens(rank: int, ranks: int) -> list[str]:
    """Compare early ends with others where replicas have unlike numbers of tokens."""
    with grid(rank) as place:
        options = {
            "loss_reduction": "tokens",
            "loss_fn": _counted,
            "group": place.pipeline,
            "data_parallel": place.replicas,
        }
        first, later = (
            _trained(place.stage, place.replica, later, options)
            for later in (False, True)
        )
    return [] if first == later and "17" in first[0] else [str(first), str(later)]


def alternates(rank: int, ranks: int) -> list[str]:
    """Validate later in some steps and at once in others; compare with never."""
    kept: list[list[Tensor]] = []
    for later in ([False] * 6, [True, True, False, True, False, False]):
        modules = chain(ranks)
        optimizer = torch.optim.SGD(modules[rank].parameters(), lr=0.1, momentum=0.9)
        runner = runner_of(modules, plan("zb_h1", ranks, M), rank)
        losses = []
        for step, each in enumerate(later):
            x, y = _data(step)
            runner.zero_grad()
            losses.append(runner.step(x, target=y).losses)
            runner.optimizer_step(optimizer, max_norm=0.5, post_validate=each)
        runner.close()
        kept.append([*losses, *(p.detach() for p in modules[rank].parameters())])
    return [] if all(map(torch.equal, *kept)) else ["bits"]
