# SPDX-License-Identifier: Apache-2.0
"""One fault on one rank at one place of a step, and what must follow."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from _crew import Place
from torch import nn

from torch_sm3.pipeline import PipelineError, PipelineRunner, Stage, plan

RANKS = 4
MICROBATCHES = 6
ROWS, WIDTH = 256, 128  # 128 KiB: a message that does not travel with its header
TIMEOUT = 2.0
NAP = 1.5

FAULTS = ("raise", "exit", "kill", "stop")
PHASES = (
    "data", "F", "loss", "B", "I", "W", "send", "recv", "hook", "optim", "between",
)  # fmt: skip
KINDS = {"B": ("1f1b", "gpipe"), "I": ("zb_h1", "zb_h2"), "send": ("gpipe",)}


class Drill(NamedTuple):
    """What is to go wrong.

    Attributes:
        fault: one of ``FAULTS``.
        phase: one of ``PHASES``.
        rank: where.
        kind: of the schedule.
        microbatch: the first one is in the warm-up, the last one in the cool-down.
    """

    fault: str
    phase: str
    rank: int
    kind: str
    microbatch: int


class Outcome(NamedTuple):
    """What a rank saw.

    Attributes:
        error: rank, stage, microbatch, action, type and message.
        when: time at which it was raised.
        clean: whether no gradient was left.
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


class Trigger:
    """Cause the fault when its place comes.

    Args:
        drill: what is to go wrong.
        place: of this rank.
    """

    def __init__(self, drill: Drill, place: Place) -> None:
        self._drill = drill
        self._place = place
        self._nap = ""
        self.armed = False

    def arm(self) -> None:
        """Let the next step be the one that goes wrong."""
        drill, rank = self._drill, self._place.rank
        self.armed = rank == drill.rank
        self._nap = ""
        if drill.phase not in ("send", "recv"):
            return
        # A neighbour naps, so that this rank waits for it when the fault comes.
        last = drill.rank == RANKS - 1
        if drill.phase == "send":
            napper = drill.rank - 1 if last else drill.rank + 1
            self._nap = ("B" if last else "F") * (rank == napper)
        else:
            self._nap = "F" * (rank == (drill.rank - 1 if drill.rank else 1))
        if self.armed:
            threading.Timer(NAP / 2, self._strike).start()

    def disarm(self) -> None:
        """Let the next step be like any other."""
        self.armed, self._nap = False, ""

    def at(self, phase: str, microbatch: int) -> None:
        """Be at a place where the fault may be due."""
        if self._nap == phase and microbatch == 0:
            time.sleep(NAP)
        due = self._drill.phase, self._drill.microbatch
        if self.armed and due == (phase, microbatch):
            self._strike()

    def back(self, microbatch: int, gradient: torch.Tensor) -> None:
        """Be at the backward of a microbatch, or at its way to the inputs."""
        self.at("I" if self._drill.phase == "I" else "B", microbatch)

    def _strike(self) -> None:
        self.armed = False
        self._place.tell(time.monotonic())
        if self._drill.fault == "exit":
            os._exit(3)
        elif self._drill.fault in ("kill", "stop"):
            stop = self._drill.fault == "stop"
            os.kill(os.getpid(), signal.SIGSTOP if stop else signal.SIGKILL)
        elif threading.current_thread() is threading.main_thread():
            raise ArithmeticError("drill")
        else:
            os.kill(os.getpid(), signal.SIGINT)  # raises in a wait of the library


class Watched(nn.Module):
    """A stage that tells a trigger where it is.

    Args:
        index: of the stage; equal indices have equal weights.
        trigger: to be told, or None.
    """

    def __init__(self, index: int, trigger: Trigger | None = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(index)
        self.linear = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            for parameter in self.linear.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
        self.trigger = trigger
        self.counts = {"data": 0, "F": 0, "W": 0}
        self.linear.weight.register_post_accumulate_grad_hook(self._accumulated)

    def begin(self) -> None:
        """Count from zero."""
        self.counts = dict.fromkeys(self.counts, 0)

    def count(self, phase: str) -> int:
        """Be at the next microbatch of a phase."""
        now = self.counts[phase]
        self.counts[phase] += 1
        if self.trigger is not None:
            self.trigger.at(phase, now)
        return now

    def _accumulated(self, weight: torch.Tensor) -> None:
        self.count("W")

    def pick(self, item: Any) -> Any:
        """Take this stage's part of an item."""
        self.count("data")
        return item

    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        """Mix what came from the stage before with the item's part."""
        now = self.count("F")
        y = torch.tanh(self.linear(values[0])) + values[-1]
        if self.trigger is not None and y.requires_grad:
            y.register_hook(functools.partial(self.trigger.back, now))
        return y


class Watching(torch.optim.SGD):
    """An optimizer that tells a trigger when it steps."""

    trigger: Trigger

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Tell, then step."""
        self.trigger.at("optim", 0)
        super().step()


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
                # The first "optim" is due here, whatever the microbatch.
                self.trigger._drill = self.drill._replace(microbatch=0)
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
    clean = all(p.grad is None for p in bench.module.parameters())
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
