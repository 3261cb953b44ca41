# SPDX-License-Identifier: Apache-2.0
"""Measure torch_sm3.pipeline against torch.distributed.pipelining.

Two Gloo processes, one thread each, run the same model on the same batch; the two
runners take turns, step by step, so that both see the same machine. A step ends when
the slower rank has ended. The gradients of both are compared first. Kinds that only
torch plans are run from the CSV that torch writes; what torch cannot run over Gloo is
reported and not counted. The overhead is what a step takes beyond the makespan of its
schedule without any, simulated with the times of forwards and backwards alone, per
forward or backward of one rank.

    python benchmarks/pipeline_vs_torch.py --json pipeline_vs_torch.json
"""

from __future__ import annotations

import argparse
import inspect
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from _ranks import run
from _report import Figure, arguments, finish
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

from torch_sm3.pipeline import Costs, PipelineRunner, Schedule, Stage, plan, simulate

RANKS = 2
# Over Gloo a schedule that cannot run waits for ever.
PATIENCE = timedelta(seconds=60)


class Case(NamedTuple):
    """One kind as both call it.

    Attributes:
        name: of the kind.
        theirs: torch's class.
        chunks: stages per rank.
        ours: our kind, None where torch's CSV is run.
    """

    name: str
    theirs: str
    chunks: int
    ours: str | None


CASES = [
    Case("gpipe", "ScheduleGPipe", 1, "gpipe"),
    Case("1f1b", "Schedule1F1B", 1, "1f1b"),
    Case("interleaved", "ScheduleInterleaved1F1B", 2, "interleaved"),
    Case("looped_bfs", "ScheduleLoopedBFS", 2, "looped_bfs"),
    Case("zero bubble", "ScheduleInterleavedZeroBubble", 2, None),
    Case("zbv", "ScheduleZBVZeroBubble", 2, "zbv"),
    Case("dualpipe_v", "ScheduleDualPipeV", 2, "dualpipe_v"),
]


class Problem(NamedTuple):
    """Sizes of one measurement."""

    hidden: int
    layers: int
    microbatches: int
    rows: int
    steps: int
    warmup: int


def make_stage(stage: int, stages: int, problem: Problem) -> nn.Module:
    """Return a part of a stack of Linear and Tanh, equal bits each time."""
    torch.manual_seed(stage)
    parts: list[nn.Module] = []
    for _ in range(problem.layers // stages):
        parts += [nn.Linear(problem.hidden, problem.hidden), nn.Tanh()]
    return nn.Sequential(*parts)


def placement(case: Case) -> list[int]:
    """Return the rank of each stage, as torch's schedule wants it."""
    if case.name in ("zbv", "dualpipe_v"):
        return [*range(RANKS), *reversed(range(RANKS))]
    return [stage % RANKS for stage in range(case.chunks * RANKS)]


def make_stages(case: Case, problem: Problem) -> dict[int, nn.Module]:
    """Return the stages of this rank by their numbers."""
    places, rank = placement(case), dist.get_rank()
    return {
        stage: make_stage(stage, len(places), problem)
        for stage, place in enumerate(places)
        if place == rank
    }


def batch(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets."""
    torch.manual_seed(9)
    x, y = torch.randn(2, problem.microbatches * problem.rows, problem.hidden)
    return x, y


def torch_schedule(case: Case, modules: dict[int, nn.Module], m: int) -> Any:
    """Return torch's schedule of this rank."""
    total = case.chunks * RANKS
    cpu = torch.device("cpu")
    stages = [PipelineStage(x, i, total, cpu) for i, x in modules.items()]
    kind = getattr(schedules, case.theirs)
    own = stages[0] if case.chunks == 1 else stages
    return kind(own, m, loss_fn=nn.functional.mse_loss)


def torch_step(
    schedule: Any, case: Case, x: torch.Tensor, y: torch.Tensor
) -> Callable[[], None]:
    """Return a step of torch's runner, which keeps no outputs where it can."""
    places, rank = placement(case), dist.get_rank()
    inputs = (x,) if places[0] == rank else ()
    last = {"target": y, "losses": []} if places[-1] == rank else {}
    known = inspect.signature(schedule.step).parameters
    keep = {"return_outputs": False} if "return_outputs" in known else {}

    def step() -> None:
        if last:
            last["losses"] = []
        schedule.step(*inputs, **last, **keep)

    return step


def our_schedule(case: Case, theirs: Any, m: int) -> Schedule:
    """Return the same kind as planned by us, or what torch writes of its own."""
    if case.ours is not None:
        return plan(case.ours, RANKS, m, chunks=case.chunks)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "torch.csv"
        theirs._dump_csv(path)
        return Schedule.from_csv(path.read_text())


def try_torch(case: Case, problem: Problem) -> bool:
    """Run one step of torch's alone; whatever goes wrong there is torch's own."""
    modules = make_stages(case, problem)
    schedule = torch_schedule(case, modules, problem.microbatches)
    torch_step(schedule, case, *batch(problem))()
    dist.barrier()
    return True


def alone(module: nn.Module, problem: Problem) -> tuple[float, float]:
    """Return the seconds of a forward and of a backward of one stage."""
    forwards, backwards = [], []
    x = torch.randn(problem.rows, problem.hidden, requires_grad=True)
    dist.barrier()
    for _ in range(problem.microbatches):
        start = time.perf_counter()
        output = module(x)
        between = time.perf_counter()
        output.backward(torch.ones_like(output))
        forwards.append(between - start)
        backwards.append(time.perf_counter() - between)
    module.zero_grad()
    return statistics.median(forwards), statistics.median(backwards)


def overhead(
    schedule: Schedule, F: float, B: float, seconds: Mapping[str, float]
) -> dict[str, float]:
    """Return the microseconds of each runner per forward or backward of one rank.

    Args:
        schedule: what both run.
        F: seconds of a forward.
        B: seconds of a backward; each half of one that is split takes half of it.
        seconds: of a step of each.
    """
    ideal = simulate(schedule, Costs(F=F, I=B / 2, W=B / 2, B=B)).makespan
    most = max(
        sum(action.op in ("F", "B", "I", "W") for action in schedule.actions(rank))
        for rank in range(schedule.ranks)
    )
    return {name: 1e6 * (took - ideal) / most for name, took in seconds.items()}


def compare(case: Case, problem: Problem) -> dict[str, dict[str, float]]:
    """Compare the gradients of both, then measure.

    Returns:
        Of each runner the milliseconds of a step and the microseconds of overhead.
    """
    m = problem.microbatches
    x, y = batch(problem)
    mine, theirs = make_stages(case, problem), make_stages(case, problem)
    schedule = torch_schedule(case, theirs, m)
    ours = our_schedule(case, schedule, m)
    runner = PipelineRunner(
        [Stage(module, index) for index, module in mine.items()],
        ours,
        loss_fn=nn.functional.mse_loss,
    )
    steps: dict[str, Callable[[], object]] = {
        "torch_sm3": lambda: runner.step(x, target=y),
        "torch": torch_step(schedule, case, x, y),
    }
    modules = [*mine.values(), *theirs.values()]
    for step in steps.values():
        step()
    for index, module in mine.items():
        pairs = zip(module.parameters(), theirs[index].parameters(), strict=True)
        for a, b in pairs:
            torch.testing.assert_close(a.grad, b.grad)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for count in range(problem.warmup + problem.steps):
        for name, step in steps.items():
            for module in modules:
                module.zero_grad()
            dist.barrier()
            start = time.perf_counter()
            step()
            took = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            if count >= problem.warmup:
                seconds[name].append(took.item())
    runner.close()
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    F, B = alone(mine[min(mine)], problem)
    return {
        "milliseconds": {name: 1e3 * median for name, median in medians.items()},
        "overhead_us": overhead(ours, F, B, medians),
    }


def reason(error: Exception) -> str:
    """Return the last line that says anything, of a rank's traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:200] if lines else type(error).__name__


def main() -> None:
    """Measure all cases at all widths."""
    parser = argparse.ArgumentParser(description=__doc__)
    arguments(parser)
    names = [case.name for case in CASES]
    parser.add_argument("--kinds", nargs="+", choices=names, default=names)
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--rows", type=int, default=32, help="rows per microbatch")
    options = parser.parse_args()
    figures, found = [], []
    for case in (case for case in CASES if case.name in options.kinds):
        for hidden in options.hidden:
            problem = Problem(
                hidden,
                options.layers,
                options.microbatches,
                options.rows,
                steps=5 if options.quick else 20,
                warmup=3,
            )
            name = f"{case.name}, hidden {hidden}"
            row: dict[str, Any] = {"kind": case.name, "hidden": hidden}
            found.append(row)
            try:
                run(RANKS, try_torch, case, problem, patience=PATIENCE)
            except Exception as error:
                row["torch_cannot"] = reason(error)
                print(f"{name}: torch cannot run it: {reason(error)}", flush=True)
                continue
            # Where messages are what a step consists of, ours must be cheaper.
            least = 1.15 if hidden <= 64 and options.microbatches == 32 else 1.0
            ratio = 0.0
            try:
                row |= run(RANKS, compare, case, problem, patience=PATIENCE)
                ms, extra = row["milliseconds"], row["overhead_us"]
                ratio = ms["torch"] / ms["torch_sm3"]
                both = ", ".join(
                    f"{who} {ms[who]:.1f} ms a step, {extra[who]:.0f} us per action"
                    for who in ms
                )
                print(f"{name}: {both}", flush=True)
            except Exception as error:
                row["torch_sm3_cannot"] = reason(error)
                print(f"{name}: torch_sm3 cannot: {reason(error)}", flush=True)
            figures.append(Figure(f"throughput over torch, {name}", ratio, least=least))
    finish(figures, options, {"ranks": RANKS, "results": found})


if __name__ == "__main__":
    main()
