# SPDX-License-Identifier: Apache-2.0
"""Several Gloo ranks on this machine, one compute thread each."""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import spawn

Times = dict[str, list[float]]


def _main(
    rank: int,
    world: int,
    port: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    answers: Any,
    patience: timedelta | None,
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=patience)
    answer = function(*arguments)
    if rank == 0:
        answers.put(answer)
    dist.barrier()
    dist.destroy_process_group()


def run(
    world: int,
    function: Callable[..., Any],
    *arguments: Any,
    patience: timedelta | None = None,
) -> Any:
    """Call a module-level function on every rank and return what rank 0 returns.

    Args:
        world: number of ranks.
        function: what to call.
        *arguments: what to pass.
        patience: longest wait for another rank, that of Gloo if None.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = int(listener.getsockname()[1])
    answers = mp.get_context("spawn").SimpleQueue()
    context = spawn(
        _main,
        (world, port, function, arguments, answers, patience),
        nprocs=world,
        join=False,
    )
    found = []
    while not context.join(timeout=0.1):
        if not answers.empty():
            found.append(answers.get())
    return found[0] if found else answers.get()


def alternate(
    calls: Mapping[str, Callable[[], object]],
    repeats: int,
    warm_up: int = 5,
    between: Callable[[], object] | None = None,
) -> Times:
    """Return the seconds of every call of every round; all ranks start it together.

    Args:
        calls: what is compared, by name; done one after the other in each round.
        repeats: rounds that count.
        warm_up: rounds before them.
        between: called after each round, untimed.
    """
    times: Times = {name: [] for name in calls}
    for repeat in range(warm_up + repeats):
        for name, call in calls.items():
            dist.barrier()
            start = time.perf_counter()
            call()
            if repeat >= warm_up:
                times[name].append(time.perf_counter() - start)
        if between is not None:
            between()
    return times


def ratio(times: Times, a: str, b: str) -> float:
    """Return the ratio of two medians."""
    return statistics.median(times[a]) / statistics.median(times[b])


def spread(times: Times) -> dict[str, list[float]]:
    """Return the quartiles of each, in milliseconds."""
    return {
        name: [1e3 * cut for cut in statistics.quantiles(values, n=4)]
        for name, values in times.items()
    }
