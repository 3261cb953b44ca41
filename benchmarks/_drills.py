# SPDX-License-Identifier: Apache-2.0
"""One fault on one rank at one place of a step, and what must follow."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from _crew import Place
from _triggers import (
    MICROBATCHES,
    RANKS,
    ROWS,
    WIDTH,
    Drill,
    Trigger,
    Watched,
    Watching,
)

from torch_sm3.pipeline import PipelineError, PipelineRunner, Stage, plan

TIMEOUT = 2.0

FAULTS = ("raise", "exit", "kill", "stop")
PHASES = (
    "data", "F", "loss", "B", "I", "W", "send", "recv", "hook", "optim", "between",
)  # fmt: skip
KINDS = {"B": ("1f1b", "gpipe"), "I": ("zb_h1", "zb_h2"), "send": ("gpipe",)}


class Outcome(NamedTuple):
    """What a rank saw.

    Attributes:
        error: rank, stage, microbatch, action, type, message and replica.
        when: time at which it was raised.
        clean: whether no gradient of a step that failed was left.
        again: whether the next step raised, where the runner is of no use any more,
            and where a process or a message was lost, the same.
        sound: whether the next step had the bits of an undisturbed run.
    """

    error: tuple[Any, ...]
    when: float
    clean: bool
    again: bool
    sound: bool


def drills(every: bool) -> Iterator[Drill]:
    """Give the drills.

    Args:
        every: all combinations; otherwise each way to lose a process on half the ranks
            of each phase, in turn.
    """
    for f, fault in enumerate(FAULTS):
        places = [
            (phase, rank)
            for phase, rank in itertools.product(PHASES, range(RANKS))
            if (phase != "loss" or rank == RANKS - 1)
            # User code between steps that raises is no matter of the pipeline.
            and (phase, fault) != ("between", "raise")
        ]
        for number, (phase, rank) in enumerate(places):
            if fault != "raise" and not every and (number + f) % 2:
                continue
            turn = number + number // RANKS + f
            kinds = KINDS.get(phase, ("1f1b", "zb_h1", "gpipe"))
            microbatch = (0, MICROBATCHES // 2, MICROBATCHES - 1)[turn % 3]
            yield Drill(fault, phase, rank, kinds[turn % len(kinds)], microbatch)


def squared(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean squared error."""
    return (output - target).square().mean()


class Bench:
    """A runner of this rank and what is needed to disturb it.

    Args:
        drill: what is to go wrong.
        place: of this rank.
        ranks: of the default group.
    """

    def __init__(self, drill: Drill, place: Place, ranks: int) -> None:
        self.drill = drill
        self.trigger = Trigger(drill, place)
        rank = dist.get_rank()
        options: dict[str, Any] = {}
        self.stages = ranks
        self.groups: list[Any] = []
        if drill.phase == "hook" and ranks == RANKS:
            self.stages = RANKS // 2
            rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
            columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
            options["group"] = rows[rank // 2]
            options["data_parallel"] = columns[rank % 2]
            options["hook"] = (columns[rank % 2], self._reduce)
        self.index = rank % self.stages
        self.module = Watched(self.index, self.trigger)
        self.optimizer = Watching(self.module.parameters(), lr=0.1)
        self.optimizer.trigger = self.trigger
        self.runner = PipelineRunner(
            [Stage(self.module, self.index, data=self.module.pick)],
            plan(drill.kind, self.stages, MICROBATCHES),
            loss_fn=self._loss,
            timeout=TIMEOUT,
            max_pending=1,
            **options,
        )
        self._losses = 0
        self.kept = {k: v.clone() for k, v in self.module.state_dict().items()}

    def _loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        now, self._losses = self._losses, self._losses + 1
        self.trigger.at("loss", now)
        return squared(output, target)

    def _reduce(self, group: Any, bucket: Any) -> Any:
        self.trigger.at("hook", self.drill.microbatch)
        buffer = bucket.buffer().div_(2)
        work = dist.all_reduce(buffer, group=group, async_op=True)
        assert work is not None
        return work.get_future()

    def step(self) -> Any:
        """Step on the same batch each time."""
        self.module.begin()
        self._losses = 0
        items, targets = batch()
        return self.runner.step(microbatches=items, targets=targets)

    def disturbed(self) -> PipelineError:
        """Step while the fault comes; return what it raises."""
        dist.barrier()
        self.trigger.arm()
        try:
            self.trigger.at("between", self.drill.microbatch)
            self.step()
            if self.drill.phase == "optim":
                self.runner.optimizer_step(self.optimizer)
            self.step()  # what a rank meets that still runs when another is gone
        except PipelineError as error:
            return error
        raise AssertionError(f"{self.drill}: expected a PipelineError, but got none")

    def sound(self) -> bool:
        """Whether a step has the bits of an undisturbed run."""
        self.trigger.disarm()
        self.module.load_state_dict(self.kept)
        self.runner.zero_grad()
        result = self.step()
        loss, gradients = undisturbed(self.stages)
        same = torch.equal(result.losses, loss) and all(
            mine.grad is not None and torch.equal(mine.grad, wanted)
            for mine, wanted in zip(
                self.module.parameters(), gradients[self.index], strict=True
            )
        )
        self.runner.zero_grad()
        return same


def batch() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the items and the targets of all microbatches."""
    generator = torch.Generator().manual_seed(7)
    items = torch.randn(2, MICROBATCHES, ROWS, WIDTH, generator=generator)
    return list(items[0]), list(items[1])


def undisturbed(stages: int) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
    """Return the losses and the gradients of each stage by plain autograd."""
    modules = [Watched(index) for index in range(stages)]
    losses = []
    for item, target in zip(*batch(), strict=True):
        value = modules[0](item)
        for module in modules[1:]:
            value = module(value, item)
        loss = squared(value, target)
        (loss * (1 / MICROBATCHES)).backward()
        losses.append(loss.detach())
    gradients = [
        [p.grad for p in module.parameters() if p.grad is not None]
        for module in modules
    ]
    return torch.stack(losses), gradients


def fields(error: PipelineError) -> tuple[Any, ...]:
    """Return what must be equal on all ranks."""
    return (
        error.rank,
        error.stage,
        error.microbatch,
        error.action,
        error.error_type,
        error.message,
        error.replica,
    )


def raises(bench: Bench) -> PipelineError | None:
    """Step; return what that raises."""
    try:
        bench.step()
    except PipelineError as error:
        return error
    return None


def perform(place: Place, drill: Drill) -> Outcome:
    """Do a drill on one rank; see :class:`Outcome`."""
    bench = Bench(drill, place, place.size)
    before = bench.sound()
    error = bench.disturbed()
    when = time.monotonic()
    # The gradients of an optimizer that failed are those of a good step.
    stepped = drill.phase == "optim"
    clean = stepped or all(p.grad is None for p in bench.module.parameters())
    if drill.fault == "raise":
        again = True
        if drill.phase == "hook":
            # A replica waits in a collective that another one never entered, and
            # nothing may be started behind it.
            bench.trigger.disarm()
            again = raises(bench) is not None
            bench.runner.close()
            bench = Bench(drill, place, place.size)
        sound = bench.sound()
        bench.runner.close()
        return Outcome(fields(error), when, clean, again, before and sound)
    second = raises(bench)
    again = second is not None and fields(second) == fields(error)
    bench.runner.close()
    sound = before
    if drill.rank != place.rank:
        # Those that are left go on with a shorter pipeline.
        place.gather("rest", place.rank - (place.rank > drill.rank), RANKS - 1)
        rest = Bench(drill, place, RANKS - 1)
        sound = rest.sound() and sound
        rest.runner.close()
    return Outcome(fields(error), when, clean, again, sound)
