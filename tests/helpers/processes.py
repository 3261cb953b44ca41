# SPDX-License-Identifier: Apache-2.0
"""Run a function on several Gloo ranks, each a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist


def free_port() -> int:
    """Return a TCP port that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _rank_main(
    rank: int,
    world_size: int,
    port: int,
    group_timeout: float,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    results: Connection,
) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=group_timeout),
        )
        answer = (True, fn(rank, world_size, *args))
    except BaseException:
        answer = (False, traceback.format_exc())
    # Plain pickle: a Connection would send tensors as handles that die with us.
    results.send_bytes(pickle.dumps(answer))
    results.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def run_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 120.0,
    group_timeout: float = 60.0,
    may_die: tuple[int, ...] = (),
) -> list[Any]:
    """Run ``fn(rank, world_size, *args)`` on ``world_size`` ranks over Gloo.

    Args:
        world_size: number of processes.
        fn: a module-level function; what it returns must pickle.
        *args: further arguments of ``fn``, pickled.
        timeout: seconds after which all processes are killed and the test fails.
        group_timeout: timeout of the default process group, in seconds.
        may_die: ranks that are allowed to end without an answer (their result is
            None), for tests that kill a process.

    Returns:
        What each rank returned, in rank order.
    """
    context = multiprocessing.get_context("spawn")
    port = free_port()
    receivers, processes = [], []
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank_main,
            args=(rank, world_size, port, group_timeout, fn, args, sender),
            daemon=True,
        )
        process.start()
        sender.close()
        receivers.append(receiver)
        processes.append(process)
    answers: dict[int, Any] = {}
    failures: list[str] = []
    deadline = time.monotonic() + timeout
    try:
        while len(answers) < world_size:
            open_ones = [r for i, r in enumerate(receivers) if i not in answers]
            ready = wait(open_ones, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                missing = sorted(set(range(world_size)) - set(answers))
                failures.append(f"ranks {missing} did not answer in {timeout} s")
                break
            for receiver in ready:
                rank = receivers.index(receiver)
                try:
                    good, value = pickle.loads(receiver.recv_bytes())
                except EOFError:
                    good, value = rank in may_die, None
                    if not good:
                        value = "the process ended without an answer"
                answers[rank] = value
                if not good:
                    failures.append(f"rank {rank}: {value}")
            if failures:
                # The others may wait for the failed rank; give them a moment only.
                deadline = min(deadline, time.monotonic() + 10)
    finally:
        for process in processes:
            process.join(timeout=5 if not failures else 0.5)
            if process.is_alive():
                process.kill()
                process.join()
    # What is broken in memory may show only when a process ends.
    for rank, process in enumerate(processes):
        if process.exitcode not in (0, -signal.SIGKILL) and answers.get(rank):
            failures.append(f"rank {rank} answered, but ended with {process.exitcode}")
    if failures:
        raise AssertionError("\n".join(failures))
    return [answers[rank] for rank in range(world_size)]
