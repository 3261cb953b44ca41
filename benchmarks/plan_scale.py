# SPDX-License-Identifier: Apache-2.0
"""Time and memory of planning, verifying and simulating very large schedules.

Each size of 1f1b runs in a process of its own, on one thread, by the time that it
computed. The schedule with its messages has some 50 million actions at p = 1024 and
m = 8192. Time per action is compared with that at p = 64 and m = 512, where everything
fits the caches.

Planning without messages writes 8 bytes for each action and does little else: of its
time at the large size the kernel takes four fifths to give its pages, one after the
other. So the time that the first touch of as much memory takes is measured beside it,
and taken off; at the small size the pages are those of the plan before.
"""

from __future__ import annotations

import argparse
import mmap
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.multiprocessing as mp
from _report import Figure, arguments, finish

from torch_sm3.pipeline import Costs, plan, simulate, verify

SMALL = (64, 512)
LARGE = (1024, 8192)
# Seconds on one current core, for the large size.
SECONDS = {"plan and lower": 3.0, "verify": 10.0, "simulate": 10.0}
GIB = 3.0
PER_ACTION = 4.0


@dataclass
class Measured:
    """What one process found.

    Attributes:
        actions: of the schedule with its messages.
        seconds: of each part.
        gib: most memory resident, above that at the start.
        planned: number of actions without messages.
        plan: seconds to plan them.
        touch: seconds to touch as much memory for the first time.
    """

    actions: int
    seconds: dict[str, float]
    gib: float
    planned: int
    plan: float
    touch: float


def timed(call: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    """Return the median time that a call computed, and its last result."""
    times: list[float] = []
    result: Any = None
    for _ in range(repeats):
        result = None  # two schedules at once would count twice
        start = time.process_time()
        result = call()
        times.append(time.process_time() - start)
    return statistics.median(times), result


def resident() -> int:
    """Return the most memory resident so far, in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def touched(count: int) -> None:
    """Take memory from the system and write a byte to each of its pages."""
    with mmap.mmap(-1, count) as memory:
        memory[:: mmap.PAGESIZE] = b"1" * (count // mmap.PAGESIZE)


def measure(p: int, m: int, repeats: int) -> Measured:
    """Plan, verify and simulate one schedule."""
    torch.set_num_threads(1)
    before = resident()
    seconds = {}
    alone = timed(lambda: plan("1f1b", p, m), max(repeats, 3))[0]
    touch = timed(lambda: touched(16 * p * m), max(repeats, 3))[0]
    both = timed(lambda: plan("1f1b", p, m).lower(), repeats)[0]
    seconds["plan and lower"] = both
    schedule = plan("1f1b", p, m)
    seconds["verify"], report = timed(lambda: verify(schedule), repeats)
    assert report.valid, report.message
    costs = Costs(latency=0.1, bandwidth=100, activation_bytes=100, boundary_bytes=10)
    seconds["simulate"], found = timed(lambda: simulate(schedule, costs), repeats)
    assert found.makespan >= found.lower_bound
    # F and B everywhere, four messages over each border, REDUCE_GRAD and OPTIM.
    actions = m * (2 * p + 4 * (p - 1)) + 2 * p
    gib = (resident() - before) / 2**30
    return Measured(actions, seconds, gib, 2 * p * m, alone, touch)


def _child(answers: Any, arguments: tuple[Any, ...]) -> None:
    answers.put(asdict(measure(*arguments)))


def measure_apart(*size: Any) -> Measured:
    """Measure in a process of its own."""
    context = mp.get_context("spawn")
    answers = context.SimpleQueue()
    process = context.Process(target=_child, args=(answers, size))
    process.start()
    answer = Measured(**answers.get())
    process.join()
    return answer


def main() -> None:
    """Parse the command line, measure, print the figures and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    arguments(parser)
    options = parser.parse_args()
    large = (256, 2048) if options.quick else LARGE
    small = measure_apart(*SMALL, 21)
    big = measure_apart(*large, 1)
    figures = []
    size = f"p = {large[0]}, m = {large[1]}"
    for part, seconds in big.seconds.items():
        limit = None if options.quick else SECONDS[part]
        figures.append(Figure(f"seconds to {part}, {size}", seconds, limit=limit))
        ratio = seconds / big.actions / (small.seconds[part] / small.actions)
        figures.append(
            Figure(
                f"time per action to {part}, {size} over p = 64, m = 512",
                ratio,
                limit=PER_ACTION,
            )
        )
    figures.append(Figure(f"seconds to plan alone, {size}", big.plan))
    figures.append(Figure(f"of these, first touch of its memory, {size}", big.touch))
    rest = max(big.plan - big.touch, 0.0) / big.planned
    figures.append(
        Figure(
            f"time per action to plan alone but for that, {size} over small",
            rest / (small.plan / small.planned),
            limit=PER_ACTION,
        )
    )
    figures.append(Figure(f"GiB of memory, {size}", big.gib, limit=GIB))
    figures.append(Figure(f"million actions, {size}", big.actions / 1e6))
    finish(figures, options, {"small": asdict(small), "large": asdict(big)})


if __name__ == "__main__":
    main()
