# SPDX-License-Identifier: Apache-2.0
"""Time of ``adasum_all_reduce`` against ``dist.all_reduce`` over Gloo, in one run.

Starts its own processes, one compute thread each. Prints the ratio of medians per
size and number of ranks; repetitions of the two alternate.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import spawn

import torch_sm3

SIZES_KIB = [64, 256, 1024, 4096, 8192, 32768]


def times_of(function: Callable[[], object]) -> float:
    """Return the milliseconds of one call that all ranks start together."""
    dist.barrier()
    begin = time.perf_counter()
    function()
    return 1e3 * (time.perf_counter() - begin)


def measure(kib: int, repeats: int) -> dict[str, list[float]]:
    """Return the milliseconds of every repetition, after five warm-ups."""
    tensor = torch.randn(kib * 256)
    state = torch_sm3.AdasumState()
    times: dict[str, list[float]] = {"all_reduce": [], "adasum": []}
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(tensor),
        "adasum": lambda: torch_sm3.adasum_all_reduce(tensor, state=state),
    }
    for repeat in range(repeats + 5):
        for name, call in calls.items():
            elapsed = times_of(call)
            if repeat >= 5:
                times[name].append(elapsed)
        tensor.normal_()  # else the sums grow without end
    state.close()
    return times


def rank_main(rank: int, world: int, port: int, repeats: int, answers: Any) -> None:
    """Measure all sizes; rank 0 puts the results into ``answers``."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    for kib in SIZES_KIB:
        times = measure(kib, repeats)
        if rank == 0:
            answers.put((kib, times))
    dist.destroy_process_group()


def run(world: int, repeats: int) -> list[dict[str, Any]]:
    """Return one row per size for a number of ranks."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = int(listener.getsockname()[1])
    answers = mp.get_context("spawn").SimpleQueue()
    spawn(rank_main, (world, port, repeats, answers), nprocs=world)
    rows = []
    for _ in SIZES_KIB:
        kib, times = answers.get()
        medians = {name: statistics.median(values) for name, values in times.items()}
        row = {
            "ranks": world,
            "kib": kib,
            "ratio": medians["adasum"] / medians["all_reduce"],
            "median_ms": medians,
            "quartiles_ms": {
                name: statistics.quantiles(values, n=4)
                for name, values in times.items()
            },
        }
        rows.append(row)
        print(
            f"p = {world}  {kib:6d} KiB  all_reduce {medians['all_reduce']:8.2f} ms  "
            f"adasum {medians['adasum']:8.2f} ms  ratio {row['ratio']:.2f}"
        )
    return rows


def main() -> None:
    """Parse the command line, measure, print ratios and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", type=Path, help="write all medians to this file")
    options = parser.parse_args()
    rows = [row for world in options.ranks for row in run(world, options.repeats)]
    if options.json:
        record = {"torch": torch.__version__, "cores": os.cpu_count(), "rows": rows}
        options.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
