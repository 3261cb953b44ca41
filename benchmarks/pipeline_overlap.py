# SPDX-License-Identifier: Apache-2.0
"""Measure how 1F1B hides slow links behind compute.

The classic warm-up of 1F1B leaves no forward to run while an activation travels; the
planner's makes it longer by what the links take. Stages sleep, every message between
neighbours is held back by a sixth of a microbatch's time, and both plans take turns.
In theory the classic one takes 1.139 times as long with 4 ranks and 8 microbatches.

    python benchmarks/pipeline_overlap.py --json pipeline_overlap.json
"""

from __future__ import annotations

import argparse
import statistics

import torch
import torch.distributed as dist
from _pipeline_sleep import Sleeper
from _ranks import alternate, run
from _report import Figure, arguments, finish
from torch import nn

from torch_sm3.pipeline import Costs, PipelineRunner, Schedule, Stage, plan, simulate

RANKS, MICROBATCHES = 4, 8
FASTER = 1.10
#: The figure of both plans on paper.
FORMULA = 1.139


def plans(seconds: float) -> dict[str, Schedule]:
    """Return both plans.

    Args:
        seconds: F, I and W of a rank each.
    """
    costs = Costs(F=seconds, I=seconds, W=seconds)
    link = 3 * seconds / 6
    return {
        "classic": plan("1f1b", RANKS, MICROBATCHES, warmup=1),
        "auto": plan("1f1b", RANKS, MICROBATCHES, costs=costs, link_cost=link),
    }


def runner_of(schedule: Schedule, seconds: float) -> PipelineRunner:
    """Return a runner of sleeping stages whose links are slow."""
    stage = Stage(Sleeper(seconds, seconds, seconds), index=dist.get_rank())
    held = 3 * seconds / 6
    pairs = [(r, r + 1) for r in range(RANKS - 1)]
    delay = {pair: held for a, b in pairs for pair in ((a, b), (b, a))}
    return PipelineRunner(
        [stage], schedule, loss_fn=nn.functional.mse_loss, link_delay=delay
    )


def measure(seconds: float, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of the steps of each plan, of the slowest rank."""
    runners = {name: runner_of(s, seconds) for name, s in plans(seconds).items()}
    zeros = torch.zeros(MICROBATCHES, 4)

    def step(name: str) -> None:
        runners[name].step(zeros, target=zeros)

    calls = {name: (lambda name=name: step(name)) for name in runners}
    times = alternate(calls, rounds, warm_up=2)
    for runner in runners.values():
        runner.close()
    return times


def on_paper(seconds: float) -> float:
    """Return the ratio of the simulated makespans."""
    costs = Costs(F=seconds, I=seconds, W=seconds, latency=3 * seconds / 6)
    spans = {n: simulate(s, costs).makespan for n, s in plans(seconds).items()}
    return spans["classic"] / spans["auto"]


def main() -> None:
    """Parse the command line, measure, print the figures and write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments(parser)
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.02,
        help="of F, I and W each; longer on a machine that others use as well",
    )
    options = parser.parse_args()
    seconds, rounds = options.seconds, 3 if options.quick else 10
    times = run(RANKS, measure, seconds, rounds)
    medians = {name: statistics.median(values) for name, values in times.items()}
    figures = [
        Figure(
            "classic 1f1b over auto warm-up, slow links, measured",
            medians["classic"] / medians["auto"],
            least=FASTER,
        ),
        Figure(
            "classic 1f1b over auto warm-up, slow links, simulated",
            on_paper(seconds),
            limit=FORMULA + 1e-3,
            least=FORMULA - 1e-3,
        ),
    ]
    finish(figures, options, {"seconds": times})


if __name__ == "__main__":
    main()
