# SPDX-License-Identifier: Apache-2.0
"""Measure what the policy of Gloo's threads is worth where ranks share cores.

Two Gloo processes, one thread each, run a small 1F1B, whose time is that of its
messages: with a group whose threads preempt nobody, as runners make it, and with one of
ordinary threads. The two take turns, so that both see the same machine.

    python benchmarks/pipeline_threads.py --json pipeline_threads.json
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from unittest import mock

import torch
import torch.distributed as dist
from _ranks import Times, alternate, ratio, run, spread
from _report import Figure, arguments, finish
from torch import nn

from torch_sm3.pipeline import PipelineRunner, Stage, plan

RANKS, MICROBATCHES, ROWS, HIDDEN, LAYERS = 2, 32, 32, 64, 4
ORDINARY, BATCH = "ordinary", "batch"


def make_runner(policy: str) -> PipelineRunner:
    """Return a runner whose group has threads of a policy; collective."""
    stage = nn.Sequential(
        *itertools.chain.from_iterable(
            (nn.Linear(HIDDEN, HIDDEN), nn.Tanh()) for _ in range(LAYERS)
        )
    )
    schedule = plan("1f1b", RANKS, MICROBATCHES)
    stages = [Stage(stage, dist.get_rank())]
    if policy == BATCH:
        return PipelineRunner(stages, schedule, loss_fn=nn.functional.mse_loss)
    # What happens where policies may not be set.
    with mock.patch("os.sched_setscheduler", side_effect=PermissionError):
        return PipelineRunner(stages, schedule, loss_fn=nn.functional.mse_loss)


def step_of(runner: PipelineRunner) -> Callable[[], None]:
    """Return one step of a runner."""
    rows = torch.rand(MICROBATCHES * ROWS, HIDDEN)

    def step() -> None:
        runner.step(rows, target=rows)

    return step


def everything(repeats: int) -> Times:
    """Return the times of both on this rank; those of rank 0 count."""
    runners = {policy: make_runner(policy) for policy in (ORDINARY, BATCH)}
    steps = {policy: step_of(runner) for policy, runner in runners.items()}
    times = alternate(steps, repeats)
    for runner in runners.values():
        runner.close()
    return times


def main() -> None:
    """Parse the command line, measure, print the figures and write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments(parser)
    parser.add_argument("--repeats", type=int, default=60)
    options = parser.parse_args()
    times = run(RANKS, everything, 5 if options.quick else options.repeats)
    figures = [
        Figure(
            "step with threads that preempt nobody / with ordinary ones",
            ratio(times, BATCH, ORDINARY),
            1.0,
        )
    ]
    finish(figures, options, {"quartiles_ms": spread(times)})


if __name__ == "__main__":
    main()
