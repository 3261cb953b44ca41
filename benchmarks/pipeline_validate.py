# SPDX-License-Identifier: Apache-2.0
"""Measure what post-validation makes of the bubble at the end of every step.

Without it a step ends on all ranks at once, and the next one fills the pipeline anew.
With it a rank steps its optimizer and begins the next step, so that only the time
between its first and last action of a step counts, which zb_h2 leaves no bubble in.
Stages sleep; both ways run in one process group and take turns.

    python benchmarks/pipeline_validate.py --json pipeline_validate.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from _pipeline_sleep import Sleeper
from _ranks import run
from _report import Figure, arguments, finish
from torch import nn

from torch_sm3.pipeline import PipelineRunner, Stage, plan

RANKS, MICROBATCHES, STEPS = 4, 8, 10
KINDS = ("zb_h2", "zbv", "1f1b")
#: Idle time of a step above the formula, as a part of a step.
ABOVE = 0.05
#: A step may be no slower with post-validation; what timers are worth is allowed for.
SLOWER = 1.01


class Train:
    """A pipeline of sleeping stages and its optimizer.

    Args:
        kind: of the schedule.
        seconds: F, I and W of a rank and microbatch.
        later: whether optimizer steps are validated later.
    """

    def __init__(self, kind: str, seconds: tuple[float, ...], later: bool) -> None:
        schedule = plan(kind, dist.get_world_size(), MICROBATCHES)
        rank, placement = dist.get_rank(), schedule.placement
        own = [s for s, place in enumerate(placement) if place == rank]
        parts = [second / len(own) for second in seconds]
        stages = [Stage(Sleeper(*parts), index=s) for s in own]
        self.runner = PipelineRunner(stages, schedule, loss_fn=nn.functional.mse_loss)
        weights = [p for stage in stages for p in stage.module.parameters()]
        self.optimizer = torch.optim.SGD(weights, lr=0.1)
        self.later = later

    def step(self) -> None:
        """Take one step of the pipeline and of the optimizer."""
        zeros = torch.zeros(MICROBATCHES, 4)
        self.runner.step(zeros, target=zeros)
        self.runner.optimizer_step(
            self.optimizer, max_norm=1.0, post_validate=self.later
        )
        self.runner.zero_grad()


def span(train: Train, steps: int) -> list[float]:
    """Return each rank's seconds from its first to its last step, by its own clock.

    Two steps before shift the ranks against each other as they will stay: the first
    still ends on all ranks at once.
    """
    dist.barrier()
    train.step()
    train.step()
    start = time.perf_counter()
    for _ in range(steps):
        train.step()
    taken = torch.tensor([time.perf_counter() - start])
    train.runner.flush()
    found = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(found, taken)
    return [float(value) for value in found]


def measure(
    kind: str, seconds: tuple[float, ...], rounds: int, steps: int
) -> dict[str, list[list[float]]]:
    """Return the spans of each way in each round, one after the other."""
    ways = {
        "later": Train(kind, seconds, later=True),
        "at once": Train(kind, seconds, later=False),
    }
    found: dict[str, list[list[float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, train in ways.items():
            found[name].append(span(train, steps))
    for train in ways.values():
        train.runner.close()
    return found


def figures_of(
    kind: str, spans: dict[str, list[list[float]]], work: float, steps: int
) -> list[Figure]:
    """Compare the spans with the formula and with each other.

    Args:
        kind: of the schedule; its own span has no bubble at equal costs.
        spans: of each way, round and rank.
        work: seconds of a rank in a step.
        steps: of a span.
    """
    step = {
        name: statistics.median(max(ranks) for ranks in rounds) / steps
        for name, rounds in spans.items()
    }
    return [
        Figure(
            f"{kind}: idle per step with post-validation, parts of a step",
            step["later"] / work - 1,
            limit=ABOVE,
        ),
        Figure(
            f"{kind}: idle per step without, parts of a step",
            step["at once"] / work - 1,
        ),
        Figure(
            f"{kind}: step with post-validation over step without",
            step["later"] / step["at once"],
            limit=SLOWER,
        ),
    ]


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
    parser.add_argument(
        "--kind", choices=KINDS, action="append", help="may be given more than once"
    )
    options = parser.parse_args()
    seconds = (options.seconds,) * 3
    kinds = options.kind or (["zb_h2"] if options.quick else list(KINDS))
    rounds, steps = (1, 4) if options.quick else (3, STEPS)
    figures: list[Figure] = []
    measured: dict[str, Any] = {}
    for kind in kinds:
        spans = run(RANKS, measure, kind, seconds, rounds, steps)
        work = MICROBATCHES * sum(seconds)
        found = figures_of(kind, spans, work, steps)
        # 1F1B keeps its bubble; it must not lose by stepping first.
        figures += found if kind.startswith("zb") else found[1:]
        measured[kind] = spans
    finish(figures, options, {"seconds": measured})


if __name__ == "__main__":
    main()
