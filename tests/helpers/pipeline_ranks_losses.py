# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of failures that several ranks or steps take part in."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import time
from pathlib import Path
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
)
from helpers.pipeline_ranks_gradients import grid
from torch import Tensor, nn

from torch_sm3.pipeline import PipelineError, PipelineRunner, Schedule, plan


class Failing(nn.Module):
    """Raise in a forward, and where a sharded stage would be gathered."""

    def __init__(self, module: nn.Module, stage: int) -> None:
        super().__init__()
        self.module = module
        self.stage = stage
        self.at = ""

    def unshard(self) -> None:
        if self.at == "unshard":
            raise ArithmeticError(f"no room for stage {self.stage}")

    def forward(self, x: Tensor) -> Tensor:
        if self.at == "forward":
            raise ArithmeticError("boom")
        return self.module(x)


def fields(error: PipelineError) -> tuple[Any, ...]:
    return (
        error.rank,
        error.stage,
        error.microbatch,
        error.action,
        error.error_type,
        error.message,
    )


def caught(call: Any, *args: Any, **kwargs: Any) -> PipelineError:
    try:
        call(*args, **kwargs)
    except PipelineError as error:
        return error
    raise AssertionError("the call must fail")


class Bench:
    """A runner of failing stages, and the run of one process."""

    def __init__(self, rank: int, schedule: Schedule, **options: Any) -> None:
        m = schedule.microbatches
        self.modules = [Failing(s, i) for i, s in enumerate(chain(schedule.stages))]
        self.items, self.targets = batches([2] * m)
        self.own = own_stages(schedule, rank)
        self.runner: PipelineRunner = runner_of(self.modules, schedule, rank, **options)
        self.whole = chain(schedule.stages)
        accumulate(self.whole, self.items, self.targets, [1 / m] * m)

    def arm(self, at: str) -> None:
        for stage in self.own:
            self.modules[stage].at = at

    def step(self) -> Any:
        return self.runner.step(microbatches=self.items, targets=self.targets)

    def is_sound(self) -> bool:
        self.arm("")
        self.runner.zero_grad()
        self.step()
        plain = [module.module for module in self.modules]
        same = not differing(plain, self.whole, self.own)
        self.runner.zero_grad()
        return same


def all_at_once(rank: int, ranks: int, who: list[int]) -> Any:
    """Let several ranks raise in their first action, whatever the others do."""
    lines = plan("1f1b", ranks, 4).text.splitlines()
    for r in range(ranks):
        lines[1 + r] = lines[1 + r].replace(": ", f": {r}UNSHARD ", 1)
    bench = Bench(rank, Schedule.parse("\n".join(lines)))
    bench.arm("unshard" if rank in who else "")
    error = caught(bench.step)
    own = isinstance(error.__cause__, ArithmeticError)
    sound = bench.is_sound()
    bench.runner.close()
    return fields(error), error.others, own, sound


def hook_of_one_replica(rank: int, ranks: int) -> list[Any]:
    """Let one replica's hook raise while those of the others wait for it."""
    seen: list[Any] = []
    waiting: list[tuple[Any, Any]] = []
    with grid(rank) as place:
        broken = [rank == 3]

        def hook(state: Any, bucket: Any) -> torch.futures.Future[Any]:
            future: torch.futures.Future[Any] = torch.futures.Future()
            if broken[0]:
                raise LookupError("no hook")
            if rank == 1 and steps[0] == 0:
                # As a collective that rank 3, the same stage, never enters.
                waiting.append((future, bucket.buffer()))
            elif steps[0] == 0:
                future.set_result(bucket.buffer())
            else:
                mean = bucket.buffer().div_(2)
                work = dist.all_reduce(mean, group=place.replicas, async_op=True)
                assert work is not None
                return work.get_future()
            return future

        steps = [0]
        bench = Bench(
            place.stage,
            plan("1f1b", 2, 3),
            group=place.pipeline,
            data_parallel=place.replicas,
            hook=(None, hook),
        )
        error = caught(bench.step)
        seen.append((*fields(error)[:5], error.replica))
        assert len(waiting) == (rank == 1)
        # Nobody starts another collective behind one that waits.
        broken[0] = False
        again = caught(bench.step)
        seen.append((again.error_type, "make a new runner" in again.message))
        for future, buffer in waiting:
            future.set_result(buffer)
        steps[0] = 1
        seen.append(bench.is_sound())
        bench.runner.close()
    return seen


def pickled(rank: int, ranks: int) -> bool:
    """Return whether an error survives the way to another process."""
    bench = Bench(rank, plan("1f1b", ranks, 2))
    bench.arm("forward" if rank == 0 else "")
    error = caught(bench.step)
    bench.runner.close()
    copy = pickle.loads(pickle.dumps(error))
    same = type(copy) is type(error) and fields(copy) == fields(error)
    return same and str(copy) == str(error) and copy.others == error.others


def leak(rank: int, ranks: int, state: str) -> None:
    """Leave a runner to the end of the interpreter, in one state or another."""
    bench = Bench(rank, plan("zb_h1", ranks, 4), max_pending=1)
    globals().setdefault("leaked", []).append(bench)
    if state == "new":
        return
    bench.step()
    if state == "failed":
        bench.arm("forward" if rank == 1 else "")
        caught(bench.step)
    elif state == "cycle":
        bench.cycle = bench  # type: ignore[attr-defined]
        globals()["leaked"].clear()
    elif state == "sending":
        # More than the peer will ever take, and asked for what never comes.
        links = bench.runner._session._parts.links
        assert links is not None
        native = links.native
        native.send(
            1 - rank, 0, rank, 1 - rank, 0, "t", [torch.ones(1 << 20)], False, 0
        )
        native.receive(1 - rank, 1, 1 - rank, rank, 0)


def silent(rank: int, ranks: int, victim: int, folder: str) -> Any:
    """Let one process be stopped in a step until all others have raised."""
    bench = Bench(rank, plan("1f1b", ranks, 6), timeout=3.0)
    sound = bench.is_sound()
    if rank == victim:
        bench.modules[rank].forward = lambda x: _stop(folder)  # type: ignore[method-assign]
    error = caught(bench.step)
    again = caught(bench.step)
    bench.runner.close()
    if rank != victim:
        (Path(folder) / str(rank)).touch()
    return fields(error), fields(again) == fields(error), sound


def _stop(folder: str) -> None:
    """Stop this process; another one lets it go on when all others are through."""
    victim, others = os.getpid(), dist.get_world_size() - 1
    if os.fork() == 0:
        # The child of a fork may only call the system.
        while len(os.listdir(folder)) < others:
            time.sleep(0.05)
        os.kill(victim, signal.SIGCONT)
        os._exit(0)
    os.kill(victim, signal.SIGSTOP)
    raise ArithmeticError("late")


def fifty_failures(rank: int, ranks: int) -> list[str]:
    """Run fifty steps that fail and fifty that do not; return what grew."""
    bench = Bench(rank, plan("zb_h1", ranks, 4))

    def state() -> dict[str, int]:
        gc.collect()
        status = Path("/proc/self/status").read_text()
        return {
            "tensors": sum(issubclass(type(x), Tensor) for x in gc.get_objects()),
            "threads": len(os.listdir("/proc/self/task")),
            "files": len(os.listdir("/proc/self/fd")),
            "MiB": int(status.split("VmRSS:")[1].split()[0]) >> 10,
        }

    before: dict[str, int] = {}
    for number in range(50):
        bench.arm("forward" if rank == number % ranks else "")
        caught(bench.step)
        assert bench.is_sound()
        if number == 9:
            before = state()
    after = state()
    bench.runner.close()
    slack = {"MiB": 4}
    return [
        f"{name}: {before[name]} to {n}"
        for name, n in after.items()
        if n > before[name] + slack.get(name, 0)
    ]
