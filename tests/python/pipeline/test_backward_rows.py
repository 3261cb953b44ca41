# SPDX-License-Identifier: Apache-2.0
"""Rows of section 14 that concern the backward of one stage, at its own level.

A test is named after the number of its row in the table.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
from helpers.memory_meter import memory_meter
from helpers.pipeline_backward import backward, by_torch, by_us, twin
from helpers.pipeline_layers import Apply, Checkpointed
from torch import Tensor, nn

RANKS, MICROBATCHES = 4, 6


def zb_h1(rank: int) -> list[tuple[str, int]]:
    """Return what a rank computes under zb_h1, in the words of section 3."""
    m = MICROBATCHES
    first = min(m, RANKS - rank)
    actions = [("F", i) for i in range(first)]
    done, started = 0, first
    for i in range(m):
        actions.append(("I", i))
        if i + 1 - done > rank or started - done == RANKS:
            actions.append(("W", done))
            done += 1
        if started < m:
            actions.append(("F", started))
            started += 1
    return actions + [("W", i) for i in range(done, m)]


def one_f_one_b(rank: int) -> list[tuple[str, int]]:
    warm = min(MICROBATCHES, RANKS - 1 - rank)
    actions = [("F", i) for i in range(warm)]
    for i in range(MICROBATCHES):
        actions += [("F", i + warm)] if i + warm < MICROBATCHES else []
        actions.append(("B", i))
    return actions


def run(module: Any, actions: list[tuple[str, int]], batches: list[Tensor]) -> int:
    """Run a rank's actions and return the most bytes alive at once."""
    opened: dict[int, Any] = {}
    gradient = torch.ones_like(batches[0])
    gc.collect()
    with memory_meter() as read:
        for op, i in actions:
            if op == "F":
                opened[i] = backward("always" if isinstance(module, Apply) else "auto")
                (x,) = opened[i].enter([batches[i]], [True])
                opened[i].leave([module(x)])
                del x
            elif op == "I":
                opened[i].input([gradient])
            elif op == "B":
                opened.pop(i).full([gradient])
            else:
                opened.pop(i).weight()
    return read.peak


def test_pipeline_row_09_weight_twice_in_a_row_under_zb_h1() -> None:
    torch.manual_seed(0)
    module = Apply(lambda m, x: x @ m.w @ m.w, w=torch.randn(8, 8) / 3)
    batches = [torch.randn(5, 8) for _ in range(MICROBATCHES)]
    expected = twin(module)
    run(expected, one_f_one_b(0), batches)
    assert expected.w.grad is not None
    for rank in range(RANKS):
        split = twin(module)
        run(split, zb_h1(rank), batches)
        assert torch.equal(split.w.grad, expected.w.grad)
    # And 1f1b's is torch's own.
    whole = by_torch(twin(module), [[x] for x in batches])
    ours = by_us(twin(module), [[x] for x in batches], "always")
    assert torch.equal(ours.weights["w"], whole.weights["w"])  # type: ignore[arg-type]


def checkpointed(reentrant: bool) -> nn.Module:
    width = 16
    block = nn.Sequential(
        nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
    )
    return Checkpointed(block, reentrant)


def test_pipeline_row_10_checkpointed_block_under_zb_h1() -> None:
    batches = [torch.randn(64, 16) for _ in range(MICROBATCHES)]
    unit = batches[0].nbytes
    for reentrant in (False, True):
        torch.manual_seed(0)
        module = checkpointed(reentrant)
        for rank in range(RANKS):
            plain, split = twin(module), twin(module)
            run(plain, one_f_one_b(rank), batches)
            before = run(plain, one_f_one_b(rank), batches)
            run(split, zb_h1(rank), batches)
            split.runs = 0
            peak = run(split, zb_h1(rank), batches)
            assert split.runs == 2 * MICROBATCHES  # once forward, once recomputed
            # zb_h1 has `rank` microbatches more in flight than 1f1b has, of a block
            # that keeps nothing but its input, which is not counted here, and its
            # RNG state. No W is owed anything: the block ran whole in I.
            state = torch.get_rng_state().nbytes
            assert peak <= before + (rank + 1) * (state + 512) < before + 8 * unit
            for a, b in zip(plain.parameters(), split.parameters(), strict=True):
                assert torch.equal(a.grad, b.grad)  # type: ignore[arg-type]
