# SPDX-License-Identifier: Apache-2.0
"""Checks of SM3InBackward on several ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.sm3_dtensor_checks import mesh_of_all
from helpers.sm3_models import small_model
from helpers.sm3_ranks import Check
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from torch_sm3 import SM3, SM3InBackward


def _batch(rank: int, seed: int) -> torch.Tensor:
    """Another one on each rank: both optimizers see the same reduced gradients."""
    generator = torch.Generator().manual_seed(100 * rank + seed)
    return torch.randn(4, 8, generator=generator)


def _sharded() -> nn.Module:
    model = small_model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh_of_all())
    return fully_shard(model, mesh=mesh_of_all())


def _assert_equal(model: nn.Module, one: SM3, other: nn.Module, two: SM3) -> None:
    one.state_dict()
    two.state_dict()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p.to_local(), q.to_local())
        assert one.state[p].keys() == two.state[q].keys()
        for key, value in one.state[p].items():
            ours = two.state[q][key]
            if isinstance(value, DTensor):
                value, ours = value.to_local(), ours.to_local()
            assert torch.equal(value, ours), key


def fsdp2_in_backward(rank: int, folder: str) -> None:
    for options in ({"momentum": 0.9}, {"variant": "I"}, {"beta2": 0.9}):
        model, other = _sharded(), _sharded()
        one = SM3(model.parameters(), **options)
        two = SM3InBackward(other.parameters(), **options)
        for seed in range(4):
            x = _batch(rank, seed)
            one.zero_grad()
            model(x).square().mean().backward()
            one.step()
            other(x).square().mean().backward()
            waits = options.get("variant") == "I"
            assert all((q.grad is not None) == waits for q in other.parameters())
            two.step()
            assert all(q.grad is None for q in other.parameters())
        _assert_equal(model, one, other, two)


def fsdp2_accumulates_in_backward(rank: int, folder: str) -> None:
    model, other = _sharded(), _sharded()
    one, two = SM3(model.parameters()), SM3InBackward(other.parameters())
    for step in range(2):
        one.zero_grad()
        for seed in range(3):
            model(_batch(rank, 10 * step + seed)).square().mean().backward()
        one.step()
        with two.no_step():
            for seed in range(2):
                other(_batch(rank, 10 * step + seed)).square().mean().backward()
        other(_batch(rank, 10 * step + 2)).square().mean().backward()
        two.step()
    _assert_equal(model, one, other, two)


def fsdp2_clips_in_backward(rank: int, folder: str) -> None:
    for options in ({}, {"variant": "I"}, {"skip_nonfinite": True}):
        model, other = _sharded(), _sharded()
        one = SM3(model.parameters(), **options)
        two = SM3InBackward(other.parameters(), max_norm=0.01, **options)
        for seed in range(3):
            x = _batch(rank, seed)
            if options.get("skip_nonfinite") and seed == 1 and rank == 0:
                x[0, 0] = torch.nan
            one.zero_grad()
            model(x).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            one.step()
            two.backward(lambda x=x, m=other: m(x).square().mean())
            two.step()
        _assert_equal(model, one, other, two)
        assert one.skipped_steps == two.skipped_steps


def ddp_in_backward_is_refused(rank: int, folder: str) -> None:
    model = small_model()
    optimizer = SM3InBackward(model.parameters())
    wrapped: Any = DistributedDataParallel(model)
    with pytest.raises(RuntimeError, match="DistributedDataParallel"):
        wrapped(torch.ones(2, 8)).sum().backward()
    del wrapped
    model = small_model()
    optimizer = SM3InBackward(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()


CHECKS: dict[int, list[Check]] = {
    2: [
        fsdp2_in_backward,
        fsdp2_accumulates_in_backward,
        fsdp2_clips_in_backward,
        ddp_in_backward_is_refused,
    ],
    3: [],
    4: [],
}
