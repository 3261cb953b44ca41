# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of failures: every kind of action, on every stage."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from helpers.pipeline_chain import (
    accumulate,
    batches,
    chain,
    differing,
    own_stages,
    runner_of,
    squared,
)
from helpers.pipeline_ranks_gradients import grid
from torch import Tensor, nn

from torch_sm3.pipeline import PipelineError, PipelineRunner, Schedule, plan


class Breaks(nn.Module):
    """Raise in a forward, on the way to the inputs, or at the weight's gradient."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.at: tuple[str, int] | None = None
        self.calls = {"F": 0, "W": 0}
        weight = next(iter(module.parameters()))
        weight.register_post_accumulate_grad_hook(lambda _: self._count("W"))

    def arm(self, at: tuple[str, int] | None) -> None:
        """Raise at an operation of a microbatch, counted from now on."""
        self.at, self.calls = at, {"F": 0, "W": 0}

    def forward(self, x: Tensor) -> Tensor:
        now = self.calls["F"]
        self._count("F")
        y = self.module(x)
        if self.at == ("B", now):
            y.register_hook(self._raise)
        return y

    def _count(self, op: str) -> None:
        now = self.calls[op]
        self.calls[op] += 1
        if self.at == (op, now):
            self._raise(None)

    def _raise(self, gradient: Any) -> None:
        raise ArithmeticError("boom")


def _caught(call: Callable[..., Any], *args: Any, **kwargs: Any) -> PipelineError:
    try:
        call(*args, **kwargs)
    except PipelineError as error:
        return error
    raise AssertionError("the call must fail")


class _Bench:
    """A runner, and the run of one process that its steps must equal."""

    def __init__(
        self, rank: int, schedule: Schedule, twice: bool = False, **options: Any
    ) -> None:
        self.modules = [Breaks(module) for module in chain(schedule.stages)]
        self.own = own_stages(schedule, rank)
        self.items, self.targets = batches([2] * schedule.microbatches)
        self.runner: PipelineRunner = runner_of(self.modules, schedule, rank, **options)
        self.whole = chain(schedule.stages)
        m = schedule.microbatches
        accumulate(self.whole, self.items, self.targets, [1 / m] * m)

    def step(self) -> Any:
        """Step on all microbatches."""
        return self.runner.step(torch.cat(self.items), target=torch.cat(self.targets))

    def is_sound(self) -> bool:
        """Whether a step has the bits of one process that never failed."""
        self.runner.zero_grad()
        self.step()
        plain = [module.module for module in self.modules]
        same = not differing(plain, self.whole, self.own)
        self.runner.zero_grad()
        return same


def everywhere(rank: int, ranks: int, kind: str) -> list[str]:
    """Raise at the first and the last microbatch of each operation of each stage."""
    m, wrong = 4, []
    schedule = plan(kind, ranks, m)
    bench = _Bench(rank, schedule)
    for stage, origin in enumerate(schedule.placement):
        for op in "FBW":
            for microbatch in (0, m - 1):
                for s in bench.own:
                    bench.modules[s].arm((op, microbatch) if s == stage else None)
                error = _caught(bench.step)
                case = f"{stage}{op}{microbatch}: "
                cause = isinstance(error.__cause__, ArithmeticError)
                if cause != (rank == origin):
                    wrong.append(case + f"cause {error.__cause__!r}")
                place = error.rank, error.stage, error.microbatch, error.error_type
                if place != (origin, stage, microbatch, "ArithmeticError"):
                    wrong.append(case + str(place))
                if op == "F" and error.action != f"{stage}F{microbatch}":
                    wrong.append(case + error.action)
                left = [p for s in bench.own for p in bench.modules[s].parameters()]
                if any(p.grad is not None for p in left):
                    wrong.append(case + "gradients are left")
                for s in bench.own:
                    bench.modules[s].arm(None)
                if not bench.is_sound():
                    wrong.append(case + "the next step")
    bench.runner.close()
    return wrong


def in_user_code(rank: int, ranks: int) -> list[Any]:
    """Raise in data, in the loss, and in an iterator."""
    seen: list[Any] = []
    broken = [""]

    def pick(item: Any) -> Any:
        if broken[0] == "data":
            raise LookupError("no data")
        return item

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if broken[0] == "loss":
            raise LookupError("no loss")
        return squared(output, target)

    bench = _Bench(
        rank,
        plan("zb_h1", ranks, 4),
        stage_options={0: {"data": pick}},
        loss_fn=loss,
    )
    for place, origin in (("data", 0), ("loss", ranks - 1)):
        broken[0] = place if rank == origin else ""
        error = _caught(bench.step)
        seen.append((error.rank, error.action, error.error_type, error.message))
        broken[0] = ""
        seen.append(bench.is_sound())

    def pairs(good: int) -> Any:
        for i, pair in enumerate(zip(bench.items, bench.targets, strict=True)):
            if i == good:
                raise LookupError("no item")
            yield pair

    error = _caught(bench.runner.step, iterator=pairs(2 if rank == 0 else 9))
    seen.append((error.rank, error.action, error.error_type, error.message))
    seen.append(bench.is_sound())
    bench.runner.close()
    return seen


def in_hook(rank: int, ranks: int, late: bool) -> list[Any]:
    """Let the hook of one replica raise, at once or in its future."""
    seen: list[Any] = []
    with grid(rank) as place:
        broken = [False]

        def hook(state: Any, bucket: Any) -> torch.futures.Future[Any]:
            future: torch.futures.Future[Any] = torch.futures.Future()
            if broken[0] and not late:
                raise LookupError("no hook")
            if broken[0]:
                future.set_exception(LookupError("no hook"))
            else:
                future.set_result(bucket.buffer())
            return future

        bench = _Bench(
            place.stage,
            plan("1f1b", 2, 3),
            group=place.pipeline,
            data_parallel=place.replicas,
            hook=(None, hook),
        )
        broken[0] = rank == 3
        error = _caught(bench.step)
        seen.append((error.rank, error.action, error.error_type, error.replica))
        broken[0] = False
        seen.append(bench.is_sound())
        bench.runner.close()
    return seen


def many_ranks(rank: int, ranks: int) -> bool:
    """Run an interleaved schedule of fewer microbatches than ranks."""
    bench = _Bench(rank, plan("interleaved", ranks, 3, chunks=2))
    sound = bench.is_sound()
    bench.runner.close()
    return sound


def replica_ends(rank: int, ranks: int, victim: int, where: str) -> Any:
    """End a process in a backward, a hook or the optimizer; return what others raise.

    Args:
        rank: this rank.
        ranks: their number.
        victim: the one that ends.
        where: in what.
    """
    due = [False]

    def end(*_: Any) -> None:
        if due[0] and rank == victim:
            os._exit(1)

    def hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> Any:
        end()
        work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
        assert work is not None
        return work.get_future()

    with grid(rank) as place:
        options: dict[str, Any] = {}
        if where == "hook":
            options["hook"] = place.replicas, hook
        bench = _Bench(
            place.stage,
            plan("1f1b", 2, 4),
            group=place.pipeline,
            data_parallel=place.replicas,
            **options,
        )
        optimizer = torch.optim.SGD(bench.modules[place.stage].parameters(), lr=0.1)
        bench.step()
        due[0] = True
        if where == "W":
            module = bench.modules[place.stage]
            module.arm(("W", 2))
            module._raise = end  # type: ignore[method-assign]
        if where == "OPTIM":
            optimizer.register_step_pre_hook(end)

        def go_on() -> None:
            # A rank that was done with a step hears of the loss in the next call.
            for _ in range(2):
                bench.step()
                bench.runner.optimizer_step(optimizer, max_norm=1.0)

        start = time.monotonic()
        errors = [_caught(go_on) for _ in range(2)]
        bench.runner.close()
    known = [(*fields_of(error), str(error)) for error in errors]
    # At once means: long before the limit of a message.
    return fields_of(errors[0]), known[0] == known[1], time.monotonic() - start < 15


def fields_of(error: PipelineError) -> tuple[Any, ...]:
    """Return what must be equal on all ranks of all replicas."""
    place = error.rank, error.stage, error.microbatch, error.action
    return (*place, error.error_type, error.message, error.replica)


def replica_silent(rank: int, ranks: int) -> Any:
    """Let rank 3 be silent in its hook; return what each raises, and how it closes."""
    due = [False]

    def hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> Any:
        if due[0] and rank == 3:
            time.sleep(8.0)
        work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
        assert work is not None
        return work.get_future()

    with grid(rank) as place:
        bench = _Bench(
            place.stage,
            plan("1f1b", 2, 4),
            group=place.pipeline,
            data_parallel=place.replicas,
            hook=(place.replicas, hook),
            timeout=2.0,
        )
        bench.step()
        due[0] = True
        error = _caught(bench.step)
        start = time.monotonic()
        bench.runner.close()
        soon = time.monotonic() - start < 3
        dist.barrier()
    return fields_of(error), soon
