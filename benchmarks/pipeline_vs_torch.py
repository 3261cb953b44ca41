# SPDX-License-Identifier: Apache-2.0
"""Measure 1F1B of torch_sm3.pipeline against torch.distributed.pipelining.

Two Gloo processes, one thread each, run the same model on the same batch; the two
runners take turns, step by step, so that both see the same machine. A step ends when
the slower rank has ended. The gradients of both are compared first.

    python benchmarks/pipeline_vs_torch.py --json pipeline_vs_torch.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from torch_sm3.pipeline import PipelineRunner, Stage, plan

RANKS = 2


def make_stage(rank: int, hidden: int, layers: int) -> nn.Module:
    """Return half of a stack of Linear and Tanh, equal bits each time."""
    torch.manual_seed(rank)
    parts: list[nn.Module] = []
    for _ in range(layers // RANKS):
        parts += [nn.Linear(hidden, hidden), nn.Tanh()]
    return nn.Sequential(*parts)


def torch_step(
    rank: int, module: nn.Module, m: int, x: torch.Tensor, y: torch.Tensor
) -> Callable[[], None]:
    """Return a step of torch's own 1F1B."""
    stage = PipelineStage(module, rank, RANKS, torch.device("cpu"))
    schedule = Schedule1F1B(stage, m, loss_fn=nn.functional.mse_loss)

    def step() -> None:
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=[])

    return step


def our_step(
    rank: int, module: nn.Module, m: int, x: torch.Tensor, y: torch.Tensor
) -> tuple[Callable[[], None], PipelineRunner]:
    """Return a step of our 1F1B, and its runner."""
    runner = PipelineRunner(
        [Stage(module, rank)], plan("1f1b", RANKS, m), loss_fn=nn.functional.mse_loss
    )

    def step() -> None:
        runner.step(x, target=y)

    return step, runner


def measure(rank: int, hidden: int, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one width; every rank returns the same numbers."""
    torch.manual_seed(9)
    m = args.microbatches
    x, y = torch.randn(2, m * args.rows, hidden)
    modules = [make_stage(rank, hidden, args.layers) for _ in range(2)]
    ours, runner = our_step(rank, modules[0], m, x, y)
    steps = {"torch_sm3": ours, "torch": torch_step(rank, modules[1], m, x, y)}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for count in range(args.warmup + args.steps):
        for name, step in steps.items():
            for module in modules:
                module.zero_grad()
            dist.barrier()
            start = time.perf_counter()
            step()
            took = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            if count >= args.warmup:
                seconds[name].append(took.item())
    for module in modules:
        module.zero_grad()
    for step in steps.values():
        step()
    for mine, theirs in zip(
        modules[0].parameters(), modules[1].parameters(), strict=True
    ):
        torch.testing.assert_close(mine.grad, theirs.grad)
    runner.close()
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    return {
        "hidden": hidden,
        "milliseconds": {name: 1e3 * value for name, value in medians.items()},
        "throughput_ratio": medians["torch"] / medians["torch_sm3"],
    }


def worker(rank: int, port: int, args: argparse.Namespace, out: Connection) -> None:
    """Run one rank."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS
    )
    results = [measure(rank, hidden, args) for hidden in args.hidden]
    dist.barrier()
    dist.destroy_process_group()
    out.send(results)


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--rows", type=int, default=32, help="rows per microbatch")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file to write the numbers to")
    args = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    processes, ends = [], []
    for rank in range(RANKS):
        end, out = context.Pipe(duplex=False)
        process = context.Process(target=worker, args=(rank, port, args, out))
        process.start()
        out.close()
        processes.append(process)
        ends.append(end)
    try:
        results = ends[0].recv()
    except EOFError:
        results = None
    for process in processes:
        process.join(timeout=60)
    if results is None:
        print("pipeline_vs_torch: a process failed", file=sys.stderr)
        return 1
    print(f"{'hidden':>8} {'torch_sm3 ms':>14} {'torch ms':>10} {'ratio':>7}")
    for row in results:
        ms = row["milliseconds"]
        print(
            f"{row['hidden']:>8} {ms['torch_sm3']:>14.2f} {ms['torch']:>10.2f} "
            f"{row['throughput_ratio']:>7.2f}"
        )
    if args.json:
        settings = {key: value for key, value in vars(args).items() if key != "json"}
        args.json.write_text(
            json.dumps(
                {
                    "claim": "throughput of 1F1B against torch.distributed.pipelining",
                    "torch": torch.__version__,
                    "ranks": RANKS,
                    "settings": settings,
                    "results": results,
                },
                indent=2,
            )
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
