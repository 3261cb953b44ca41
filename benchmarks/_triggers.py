# SPDX-License-Identifier: Apache-2.0
"""Where in a step a fault comes, and stages that say when they are there."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from typing import Any, NamedTuple

import torch
from _crew import Place
from torch import nn

RANKS = 4
MICROBATCHES = 6
ROWS, WIDTH = 256, 128  # 128 KiB: a message that does not travel with its header
NAP = 1.5


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


class Trigger:
    """Cause the fault when its place comes.

    Args:
        drill: what is to go wrong.
        place: of this rank.

    Attributes:
        drill: what is to go wrong.
        armed: whether it is due in this step, on this rank.
    """

    def __init__(self, drill: Drill, place: Place) -> None:
        self.drill = drill
        self._place = place
        self._nap = ""
        self.armed = False

    def arm(self) -> None:
        """Let the next step be the one that goes wrong."""
        drill, rank = self.drill, self._place.rank
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
        due = self.drill.phase, self.drill.microbatch
        if self.armed and due == (phase, microbatch):
            self._strike()

    def back(self, microbatch: int, gradient: torch.Tensor) -> None:
        """Be at the backward of a microbatch, or at its way to the inputs."""
        self.at("I" if self.drill.phase == "I" else "B", microbatch)

    def _strike(self) -> None:
        self.armed = False
        self._place.tell(time.monotonic())
        if self.drill.fault == "exit":
            os._exit(3)
        elif self.drill.fault in ("kill", "stop"):
            stop = self.drill.fault == "stop"
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
        self.trigger.at("optim", self.trigger.drill.microbatch)
        super().step()
