# SPDX-License-Identifier: Apache-2.0
"""Adasum beside what else runs in a training process, as each rank runs it."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from helpers.adasum_ranks import (
    Grads,
    batch,
    caught,
    grads,
    hooked,
    local_grads,
    loss_of,
    make_net,
    wrap,
)
from helpers.adasum_ranks_ddp import iteration
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import torch_sm3


def scaled(rank: int, size: int) -> dict[str, Any]:
    """Steps with a GradScaler and clipping, and the same without a scale."""
    ends: dict[str, Any] = {}
    for scale in (1.0, 2.0**12):
        net = make_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler(
            "cpu", init_scale=scale, growth_interval=10**6, enabled=scale != 1.0
        )
        norms = []
        with hooked(net, bucket_cap_mb=0.05) as model:
            for step in range(3):
                optimizer.zero_grad()
                scaler.scale(loss_of(model, batch(rank, step))).backward()
                scaler.unscale_(optimizer)
                norms.append(torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0))
                scaler.step(optimizer)
                scaler.update()
        ends[f"scale {scale}"] = [*norms, *(p.detach() for p in net.parameters())]
    return ends


def overflow(rank: int, size: int) -> list[tuple[float, bool, bool]]:
    """Autocast with a gradient that overflows on the last rank in one step only."""
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    found = []
    with hooked(net, bucket_cap_mb=0.05) as model:
        for step in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model, batch(rank, step))
            if step == 1 and rank == size - 1:
                loss = loss * torch.inf
            before = [p.detach().clone() for p in net.parameters()]
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            after = [p.detach() for p in net.parameters()]
            moved = not all(map(torch.equal, before, after))
            finite = all(bool(p.isfinite().all()) for p in after)
            found.append((scaler.get_scale(), moved, finite))
    return found


def nan_on_one_rank(rank: int, size: int) -> tuple[Grads, Grads]:
    """A NaN in one layer of the last rank, and an infinity in another one."""
    tensors = [torch.randn(n) + rank for n in (20_000, 3, 40, 5)]
    if rank == size - 1:
        tensors[0][17_000] = torch.nan
        tensors[2][0] = -torch.inf
    before: Grads = [t.clone() for t in tensors]
    torch_sm3.adasum_all_reduce(tensors)
    return before, list(tensors)


def compressed(rank: int, size: int) -> dict[str, tuple[Grads, Grads]]:
    """Inside the compression hooks of DDP: Adasum of 16-bit gradients."""
    found = {}
    for name, wrapper, dtype in (
        ("float16", default_hooks.fp16_compress_wrapper, torch.float16),
        ("bfloat16", default_hooks.bf16_compress_wrapper, torch.bfloat16),
    ):
        model, state = wrap(make_net(), hook=wrapper(torch_sm3.adasum_hook))
        after = [g.to(dtype) for g in iteration(model, batch(rank)) if g is not None]
        state.close()
        local = local_grads(make_net(), batch(rank))
        found[name] = ([g.to(dtype) for g in local if g is not None], after)
    return found


def no_futures(rank: int, size: int) -> tuple[list[str], float]:
    """What torch says of the future of a message, and Adasum over such messages."""
    out, into = torch.ones(3), torch.empty(3)
    works = [dist.irecv(into, 1 - rank), dist.isend(out, 1 - rank)]
    refusals = [caught(work.get_future)[0] for work in works]
    for work in works:
        work.wait()
    value = torch.tensor([1.0 + rank])
    torch_sm3.adasum_all_reduce(value)
    return refusals, float(value)


def held_lock(rank: int, size: int) -> bool:
    """Many small calls progress while this thread never lets go of the interpreter.

    Not even the end of a call before them, which drops the last reference to an
    object, may need the interpreter; whether it does is a matter of luck, so this
    happens several times.
    """
    return all(_progress_without_python() for _ in range(8))


def _progress_without_python() -> bool:
    state = torch_sm3.AdasumState()
    torch_sm3.adasum_all_reduce(torch.ones(3), state=state)
    dist.barrier()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    futures = [
        torch_sm3.adasum_all_reduce(torch.ones(10), state=state, async_op=True)
        for _ in range(50)
    ]
    done = False
    end = time.monotonic() + 60
    while not done and time.monotonic() < end:
        done = all(future.done() for future in futures)
    sys.setswitchinterval(before)
    state.close()
    return done


def busy_interpreter(rank: int, size: int) -> tuple[Grads, Grads]:
    """Another thread computes in Python during backwards of many buckets."""
    stop = threading.Event()

    def compute() -> None:
        while not stop.is_set():
            sum(range(10_000))

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        with hooked(make_net(), bucket_cap_mb=0.001) as model:
            for _ in range(3):
                after = iteration(model, batch(rank))
    finally:
        stop.set()
        thread.join()
    return local_grads(make_net(), batch(rank)), after


def others_in_flight(rank: int, size: int) -> tuple[Grads, Grads, bool]:
    """All-reduces and messages of the user, on two other groups, during backward."""
    reducing, messages = dist.new_group(), dist.new_group()
    right = True
    with hooked(make_net(), bucket_cap_mb=0.05) as model:
        for step in range(5):
            model.zero_grad()
            loss = loss_of(model, batch(rank))
            sums = [torch.full((50_000,), float(rank + k)) for k in range(3)]
            works = [dist.all_reduce(x, group=reducing, async_op=True) for x in sums]
            out = torch.full((50_000,), float(rank))
            into = torch.zeros(50_000)
            if size > 1:
                works.append(
                    dist.irecv(into, (rank - 1) % size, group=messages, tag=step)
                )
                works.append(
                    dist.isend(out, (rank + 1) % size, group=messages, tag=step)
                )
            loss.backward()
            for work in works:
                work.wait()
            total = size * (size - 1) / 2
            right = right and all(
                bool((x == total + size * k).all()) for k, x in enumerate(sums)
            )
            right = right and (size == 1 or bool((into == (rank - 1) % size).all()))
            after = grads(model)
    for group in (reducing, messages):
        dist.destroy_process_group(group)
    return local_grads(make_net(), batch(rank)), after, right


def compiled(rank: int, size: int, optimize: str) -> list[tuple[Grads, Grads]]:
    """DDP under torch.compile: the hook breaks the graph and nothing else changes."""
    torch._dynamo.reset()
    found = []
    with (
        torch._dynamo.config.patch(optimize_ddp=optimize),
        hooked(make_net()) as model,
    ):
        call = torch.compile(model, backend="eager")
        for step in range(3):
            model.zero_grad()
            call(batch(rank, step)).square().sum().backward()
            found.append((local_grads(make_net(), batch(rank, step)), grads(model)))
    torch._dynamo.reset()
    return found


def another_thread_count(rank: int, size: int) -> tuple[Grads, Grads]:
    """Ranks that compute with different numbers of threads."""
    torch.set_num_threads(1 + rank % 2)
    try:
        with hooked(make_net()) as model:
            after = iteration(model, batch(rank))
        return local_grads(make_net(), batch(rank)), after
    finally:
        torch.set_num_threads(1)
