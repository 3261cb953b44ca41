# SPDX-License-Identifier: Apache-2.0
"""Adasum when ranks die, sleep, skip or leave in disorder, as each rank runs it."""

# No `from __future__ import annotations`: DDP compares a hook's annotations as objects.
import os
import signal
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from helpers.adasum_ranks import (
    SHORT,
    batch,
    caught,
    hooked,
    local_grads,
    loss_of,
    make_net,
    wrap,
)
from helpers.adasum_ranks_ddp import iteration

import torch_sm3

Failure = tuple[str, str, float]


def loses(how: str) -> None:
    """End this process, or stop it."""
    os.kill(os.getpid(), {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}[how])


def lose_a_peer(
    rank: int, size: int, how: str, who: int, algorithm: str = "auto"
) -> list[Failure] | None:
    """One rank fails before a backward; the others get an error."""
    net = make_net()
    state = torch_sm3.AdasumState(
        timeout=SHORT, named_parameters=net.named_parameters(), algorithm=algorithm
    )
    model, _ = wrap(net, state, bucket_cap_mb=0.05)
    # DDP rebuilds its buckets, over its own group, after the first iteration.
    for step in range(3):
        iteration(model, batch(rank, step))
    dist.barrier()
    if rank == who:
        if how != "silent":
            loses(how)
        # Alive, but it never calls. Its own group must stay until the others know.
        time.sleep(SHORT.total_seconds() + 2)
        state.close()
        return None
    failures = [
        caught(lambda: iteration(model, batch(rank))),
        caught(lambda: torch_sm3.adasum_all_reduce(torch.ones(3), state=state)),
        caught(lambda: torch_sm3.adasum_all_reduce(torch.ones(3), state=state)),
        caught(state.close),
    ]
    return failures


def lose_a_peer_within_a_backward(rank: int, size: int) -> Failure | None:
    """The last rank dies between two of its buckets."""
    state = torch_sm3.AdasumState(timeout=SHORT)
    calls = 0

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        nonlocal calls
        calls += 1
        if rank == size - 1 and bucket.index() == 1 and calls > 12:
            loses("killed")
        return torch_sm3.adasum_hook(state, bucket)

    model, _ = wrap(make_net(), state, hook=hook, bucket_cap_mb=0.05)
    for _ in range(20):
        failure = caught(lambda: iteration(model, batch(rank)))
        if failure[0] != "nothing":
            state.close()
            return failure
    return failure


def skip_a_bucket(rank: int, size: int, step: int) -> tuple[list[Failure], Any, Any]:
    """The last rank skips a bucket in one step; then all rebind and go on."""
    state = torch_sm3.AdasumState(timeout=SHORT)
    now = 0

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if rank == size - 1 and now == step and bucket.index() == 0:
            skipped: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            skipped.set_result(bucket.buffer())
            return skipped
        return torch_sm3.adasum_hook(state, bucket)

    model, _ = wrap(make_net(), state, hook=hook, bucket_cap_mb=0.05)
    failures = []
    while now <= step:
        failures.append(caught(lambda: iteration(model, batch(rank))))
        now += 1
    # Backward broke off, so a fresh wrapper goes on, with the same state.
    dist.barrier()
    state.rebind()
    with hooked(make_net(), state, bucket_cap_mb=0.05) as again:
        after = iteration(again, batch(rank))
    return failures, local_grads(make_net(), batch(rank)), after


def close_while_waiting(rank: int, size: int) -> tuple[Failure, ...] | None:
    """Rank 0 closes its state while it waits for ranks that never call."""
    state = torch_sm3.AdasumState()
    outcome = None
    if rank == 0:
        first = torch_sm3.adasum_all_reduce(torch.ones(3), state=state, async_op=True)
        second = torch_sm3.adasum_all_reduce(torch.ones(3), state=state, async_op=True)
        time.sleep(0.5)
        outcome = (
            caught(state.close),
            caught(first.wait),
            caught(second.wait),
            caught(lambda: torch_sm3.adasum_all_reduce(torch.ones(3), state=state)),
        )
    dist.barrier()
    state.close()
    return outcome


def close_from_two_threads(rank: int, size: int) -> list[Failure]:
    """close() from two threads at once while a third waits for a future."""
    state = torch_sm3.AdasumState()
    torch_sm3.adasum_all_reduce(torch.ones(3), state=state)
    dist.barrier()
    future = None
    if rank == 0:
        future = torch_sm3.adasum_all_reduce(torch.ones(3), state=state, async_op=True)
    found: list[Failure] = []
    threads = [
        threading.Thread(target=lambda: found.append(caught(state.close)))
        for _ in range(2)
    ]
    if future is not None:
        threads.append(
            threading.Thread(target=lambda: found.append(caught(future.wait)))
        )
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    dist.barrier()
    return found


kept: list[Any] = []


def leave_in_disorder(rank: int, size: int, in_flight: bool) -> bool:
    """Each rank ends in another order of close, destroy and exit.

    What is kept here dies with the interpreter.
    """
    model, state = wrap(make_net())
    loss_of(model, batch(rank)).backward()
    torch_sm3.adasum_all_reduce(torch.ones(3))
    dist.barrier()
    kept.extend([model, state])
    if in_flight and rank != 1:
        # Rank 1 never takes part, so these never end.
        kept.append(torch_sm3.adasum_all_reduce(torch.ones(3), async_op=True))
        for _ in range(3):
            kept.append(
                torch_sm3.adasum_all_reduce(torch.ones(9), state=state, async_op=True)
            )
    if rank == 0:
        dist.destroy_process_group()
        state.close()
    elif rank == 1:
        state.close()
        dist.destroy_process_group()
    elif rank == 2:
        dist.destroy_process_group()
    # Rank 3 does nothing.
    return True


def default_group_comes_back(rank: int, size: int, port: int) -> list[float]:
    """adasum_all_reduce after the default group was destroyed and made again."""
    values = []
    for again in (False, True):
        if again:
            dist.barrier()
            dist.destroy_process_group()
            dist.init_process_group(
                "gloo",
                init_method=f"tcp://127.0.0.1:{port}",
                rank=rank,
                world_size=size,
            )
        value = torch.tensor([1.0 + rank])
        torch_sm3.adasum_all_reduce(value)
        values.append(float(value))
    return values
