# SPDX-License-Identifier: Apache-2.0
"""The probes: what the kernel says, and what is counted."""

import mmap
import time

import memory
import torch

MIB = 2**20


def _fresh_block() -> mmap.mmap:
    """Return 64 MiB that the kernel has just given, every page of it touched.

    A tensor of this size may lie in memory that an earlier test used and the
    allocator kept, and then neither making nor dropping it changes what is resident.
    """
    block = mmap.mmap(-1, 64 * MIB)
    torch.frombuffer(block, dtype=torch.uint8).fill_(1)
    return block


def _await_two_more(sampler: memory.Sampler) -> None:
    # Two: the first may have been read before the call.
    known = len(sampler.trace)
    while len(sampler.trace) < known + 2:
        time.sleep(0.005)


def test_live_tensors_counts_storages_once_and_forgets_the_dead():
    kept = torch.ones(1000)
    with memory.LiveTensors([kept]) as live:
        a = kept * 2
        views = a[:10], a.view(10, 100), kept[1:]
        live.mark()
        assert live.marked == 4000
        b = a + 1
        assert live.live_bytes() == 8000
        del b
        c = a.double()
        assert live.live_bytes() == 12000
        del a, c
        assert live.live_bytes() == 4000, "a view keeps the storage"
        del views
        assert live.live_bytes() == 0
    assert live.peak == 12000 and live.marked == 4000


def test_live_tensors_sees_what_autograd_saves():
    x = torch.ones(250, requires_grad=True)
    with memory.LiveTensors([x]) as live:
        y = x.exp().exp().sum()
        assert live.live_bytes() == 2004, "both results of exp, and the sum"
        y.backward()
        del y
        assert live.live_bytes() == 1000, "the gradient"


def test_peak_can_begin_again():
    block = _fresh_block()
    peak = memory.peak_bytes()
    assert peak >= len(block)
    block.close()
    memory.reset_peak()
    assert memory.peak_bytes() < peak - 32 * MIB


def test_sampler_sees_a_large_tensor_and_continues_a_trace():
    with memory.Sampler(interval=0.005, trace=[(3.0, 1)]) as sampler:
        _await_two_more(sampler)
        block = _fresh_block()
        _await_two_more(sampler)
        block.close()
    seconds, sizes = zip(*sampler.trace, strict=True)
    assert seconds[0] == 3.0 and sorted(seconds) == list(seconds)
    assert max(sizes[1:]) - min(sizes[1:]) > 32 * MIB


def test_optimizer_bytes_counts_all_state():
    weight = torch.nn.Parameter(torch.ones(10, 10))
    optimizer = torch.optim.AdamW([weight])
    assert memory.optimizer_bytes(optimizer) == 0
    weight.grad = torch.ones(10, 10)
    optimizer.step()
    assert memory.optimizer_bytes(optimizer) == 2 * 400 + 4
