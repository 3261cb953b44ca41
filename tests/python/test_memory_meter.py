# SPDX-License-Identifier: Apache-2.0
"""The memory meter: exact bytes, in every thread that works for its own."""

import gc
import os
import subprocess
import sys
import threading

import pytest
import torch
from helpers.memory_meter import memory_meter
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from torch_sm3 import _ops

MEGABYTE = 2**20


@pytest.fixture(autouse=True)
def _no_garbage() -> None:
    gc.collect()  # what is released during a test must be the test's own


def test_bytes_of_known_allocations_are_exact() -> None:
    with memory_meter() as read:
        kept = torch.empty(1000)
        dropped = torch.empty(7, 11, dtype=torch.float64)
        del dropped
        halves = torch.empty(3, dtype=torch.bfloat16)
    assert read.live == 4 * kept.numel() + 2 * halves.numel()
    assert read.peak == 4 * 1000 + 8 * 77


def test_peak_is_of_what_lives_at_once() -> None:
    with memory_meter() as read:
        for _ in range(3):
            torch.empty(1000)  # released before the next
        first, second = torch.empty(500), torch.empty(501)
        del first, second
    assert (read.live, read.peak) == (0, 4 * 1001)


def test_nothing_allocated_is_nothing_read() -> None:
    x = torch.ones(10)
    with memory_meter() as read:
        x.neg_().view(2, 5)  # a Python number would be a tensor too
    assert (read.live, read.peak) == (0, 0)


def test_release_of_older_memory_counts() -> None:
    with memory_meter():
        pass  # from here on the allocator knows sizes
    older = [torch.empty(1000)]
    with memory_meter() as read:
        older.clear()
        newer = torch.empty(400)
    assert (read.live, read.peak) == (4 * newer.numel() - 4 * 1000, 0)


def test_memory_released_between_two_meters_does_not_confuse() -> None:
    with memory_meter():
        kept = [torch.empty(5000) for _ in range(10)]
    del kept
    again = [torch.empty(1250) for _ in range(40)]  # where the others were, perhaps
    with memory_meter() as read:
        again.clear()
    assert (read.live, read.peak) == (-40 * 4 * 1250, 0)


def test_memory_of_another_thread_is_in_the_total() -> None:
    kept = []
    with memory_meter() as read:
        thread = threading.Thread(target=lambda: kept.append(torch.empty(300)))
        thread.start()
        thread.join()
    assert read.live == read.peak == 4 * 300


class Nest(torch.autograd.Function):
    """Calls backward inside backward, ``depth`` times, and allocates at the bottom."""

    @staticmethod
    def forward(ctx, x: Tensor, depth: int, seen: list[int]) -> Tensor:
        ctx.depth, ctx.seen = depth, seen
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.depth == 0:
            ctx.seen.append(threading.get_ident())
            torch.empty(MEGABYTE)
        else:
            with torch.enable_grad():
                x = torch.ones(1, requires_grad=True)
                Nest.apply(x, ctx.depth - 1, ctx.seen).backward()
        return grad, None, None


def test_threads_of_autograd_are_seen() -> None:
    # Beyond 60 nested calls autograd goes on in a thread of its pool.
    seen: list[int] = []
    x = torch.ones(1, requires_grad=True)
    with memory_meter() as read:
        Nest.apply(x, 70, seen).backward()
    assert seen != [threading.get_ident()]
    small = 71 * 5 * 4  # x, output, gradients of each level
    assert 4 * MEGABYTE <= read.peak <= 4 * MEGABYTE + small


def test_backward_of_a_chain_has_the_peak_of_its_saved_tensors() -> None:
    n, depth = 10_000, 8
    x = torch.ones(n, requires_grad=True)
    with memory_meter() as read:
        y = x
        for _ in range(depth):
            y = y.exp()  # saves its output
        y.backward(y.detach())
        del y
    # All outputs, and in the second step of the backward two gradients: the first
    # step released nothing, since y is held.
    assert read.peak == 4 * n * (depth + 2)
    assert read.live == 4 * n  # x.grad


def test_steps_of_training_leave_live_bytes_unchanged() -> None:
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 5))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.ones(4, 20)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    with memory_meter():
        step()
    for _ in range(3):
        with memory_meter() as read:
            step()
        assert read.live == 0 < read.peak


def test_second_start_and_missing_start_are_refused() -> None:
    with pytest.raises(RuntimeError, match="expected a running memory meter"):
        _ops.memory_meter_stop()
    with memory_meter() as read:
        with pytest.raises(RuntimeError, match="expected no running memory meter"):
            _ops.memory_meter_start()
        kept = torch.empty(10)
    assert read.live == 4 * kept.numel()  # the refused start changed nothing


def test_meter_and_profiler_exclude_each_other() -> None:
    with memory_meter() as read:
        with pytest.raises(RuntimeError, match="already enabled"):
            with profile(activities=[ProfilerActivity.CPU]):
                pass
        kept = torch.empty(10)
    assert read.live == 4 * kept.numel()
    with profile(activities=[ProfilerActivity.CPU]):
        with pytest.raises(RuntimeError, match="memory meter or profiler"):
            _ops.memory_meter_start()


def test_threads_have_meters_of_their_own() -> None:
    refused = []

    def stop() -> None:
        try:
            _ops.memory_meter_stop()
        except RuntimeError as error:
            refused.append(str(error))

    with memory_meter():
        thread = threading.Thread(target=stop)
        thread.start()
        thread.join()
    assert len(refused) == 1 and "in this thread" in refused[0]


CHILD = """
import re
from pathlib import Path
import torch
import torch_sm3

def status(name):
    text = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(name + r":\\s+(\\d+) kB", text).group(1))

def work():
    x = torch.ones(4 * 2**20, requires_grad=True)
    y = x
    for _ in range(12):
        y = y.exp().neg()
    y.sum().backward()

torch.set_num_threads(1)
torch.ones(8, requires_grad=True).exp().sum().backward()  # what torch loads late
Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts here
before = status("VmRSS")
torch.ops.torch_sm3._memory_meter_start()
work()
live, peak = torch.ops.torch_sm3._memory_meter_stop()
print(live, peak, status("VmHWM") - before)
"""


def test_high_water_mark_of_a_fresh_process_confirms_the_peak() -> None:
    # Each large block a mapping of its own: else the C library keeps freed blocks,
    # with holes between them, and the process is larger than what it holds.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", CHILD]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
    live, peak, resident = map(int, done.stdout.split())
    assert live == 0
    assert peak > 12 * 16 * MEGABYTE
    assert abs(resident - peak) <= 0.15 * peak
