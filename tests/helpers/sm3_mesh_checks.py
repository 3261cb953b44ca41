# SPDX-License-Identifier: Apache-2.0
"""Checks of SM3 on meshes of two dimensions, and on models that torch shards."""

from __future__ import annotations

from typing import Any

import torch
from helpers.sm3_dtensor_checks import OPTIONS, _Messages, weights
from helpers.sm3_ranks import Check
from helpers.sm3_twins import Twin, assert_is_part, spread
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

from torch_sm3 import SM3, Cover


def mesh_of_two_dims() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


_PLACEMENTS: dict[str, tuple[list[Any], list[tuple[int, ...]]]] = {
    "rows and columns": ([Shard(0), Shard(1)], [(6, 5), (3, 3), (1, 7), (4, 3, 5)]),
    "columns and rows": ([Shard(1), Shard(0)], [(6, 5), (2, 3), (5, 1)]),
    "rows twice": ([Shard(0), Shard(0)], [(6, 5), (3, 4), (9,), (1, 3)]),
    "strided": ([_StridedShard(0, split_factor=2), Shard(0)], [(8, 5), (3, 4), (9,)]),
    "hybrid": ([Replicate(), Shard(0)], [(6, 5), (3, 4), (7,), (1, 5)]),
    "tensor": ([Shard(1), Replicate()], [(6, 5), (4, 3, 2)]),
}


def two_dims(rank: int, folder: str) -> None:
    mesh = mesh_of_two_dims()
    for title, (placements, shapes) in _PLACEMENTS.items():
        start = weights(*shapes)
        for name in ("default", "ema", "first", "first_ema", "enealor", "diagonal"):
            twin = Twin(start, [(mesh, placements)] * len(start), **OPTIONS[name])
            twin.run(3).check(f"{title}, {name}")


def two_dims_in_low_precision(rank: int, folder: str) -> None:
    mesh = mesh_of_two_dims()
    placements = [Shard(0), Shard(1)]
    start = weights((10, 7), (7, 1024), dtype=torch.bfloat16)
    for options in [
        {"stochastic_rounding": True},
        {"kahan": True, "momentum": 0.5},
        {"momentum": 0.9, "momentum_dtype": torch.int8, "stochastic_rounding": True},
    ]:
        Twin(start, [(mesh, placements)] * 2, **options).run(3).check(f"{options}")
    start = weights((8, 12))
    for variant in ("II", "I"):
        twin = Twin(
            start, [(mesh, placements)], cover=Cover.heads(0, n=2), variant=variant
        )
        twin.run(3).check("heads")


def one_message_for_each_dim(rank: int, folder: str) -> None:
    mesh = mesh_of_two_dims()
    cut = [(mesh, [Shard(0), Shard(1)])] * 2
    twin = Twin(weights((6, 10), (4, 2)), cut)
    with _Messages() as messages:
        twin.run(2)
    # Columns go over the first dimension, rows over the second; halves of both.
    assert messages.sizes == [5 + 1, 3 + 2] * 2
    rows_twice = [(mesh, [Shard(0), Shard(0)])]
    twin = Twin(weights((8, 10)), rows_twice)
    with _Messages() as messages:
        twin.run(1)
    assert messages.sizes == [10, 10]


def skip_on_one_of_four_ranks(rank: int, folder: str) -> None:
    where = (mesh_of_two_dims(), [Shard(0), Shard(1)])
    twin = Twin(weights((6, 4)), [where], skip_nonfinite=True).run(1)
    twin.set_grads(5)
    if rank == 3:
        twin.shards[0].grad.to_local()[0, 0] = torch.inf
    twin.other.step()
    assert twin.other.skipped_steps == 1
    twin.run(1, start=1).check()


def _model() -> nn.Module:
    torch.manual_seed(5)
    layers = [nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)]
    return nn.Sequential(*layers)


def _train(model: nn.Module, optimizer: SM3, steps: int, start: int = 0) -> None:
    """Step on batches that are the same on all ranks, so gradients are as well."""
    for seed in range(start, start + steps):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        # Whole numbers times powers of two: reduced in any order without rounding.
        model(x.round()).sum().backward()
        for param in model.parameters():
            local = param.grad.to_local() if isinstance(param.grad, DTensor) else None
            (param.grad if local is None else local).mul_(2**10).round_()
        optimizer.step()


def _check_model(model: nn.Module, other: nn.Module, one: SM3, two: SM3) -> None:
    two.state_dict()
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert isinstance(q, DTensor)
        assert_is_part(q.detach(), p.detach(), name)
        assert one.state[p].keys() == two.state[q].keys()
        for key, value in one.state[p].items():
            assert_is_part(two.state[q][key], value, f"{key} of {name}")


def models_that_torch_shards(rank: int, folder: str) -> None:
    mesh = mesh_of_two_dims()
    for title in ("fsdp", "hsdp", "fsdp and tp"):
        model, other = _model(), _model()
        if title == "fsdp and tp":
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(other, mesh["tp"], plan)
            fully_shard(other, mesh=mesh["dp"])
            assert any(
                isinstance(placement, _StridedShard)
                for param in other.parameters()
                for placement in param.placements
            )
        else:
            flat = init_device_mesh("cpu", (4,))
            fully_shard(other, mesh=flat if title == "fsdp" else mesh)
        one = SM3(model.parameters(), momentum=0.9)
        two = SM3(other.parameters(), momentum=0.9)
        _train(model, one, 3)
        _train(other, two, 3)
        _check_model(model, other, one, two)


def row_20(rank: int, folder: str) -> None:
    """The optimizer is older than the sharding, which swaps the parameters."""
    import gc
    import warnings
    import weakref

    model, other = _model(), _model()
    one, two = SM3(model.parameters()), SM3(other.parameters())
    _train(other, two, 1)
    old = [weakref.ref(t) for s in two.state.values() for t in s.values()]
    other.load_state_dict(model.state_dict())
    fully_shard(other, mesh=init_device_mesh("cpu", (4,)))
    two.param_groups[0]["params"] = list(other.parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _train(other, two, 3)
    assert sum("in no group any more" in str(w.message) for w in caught) == 1
    gc.collect()
    assert all(tensor() is None for tensor in old), "stale state is alive"
    _train(model, one, 3)
    _check_model(model, other, one, two)


def loaded_by_another_layout(rank: int, folder: str) -> None:
    """State of one mesh is refused on another, before anything changes."""
    mesh = mesh_of_two_dims()
    first = Twin(weights((8, 4)), [(mesh, [Shard(0), Replicate()])]).run(1)
    other = Twin(weights((8, 4)), [(mesh, [Shard(1), Replicate()])]).run(1)
    before = other.other.state_dict()["state"][0]["accumulator_0"].to_local().clone()
    try:
        other.other.load_state_dict(first.other.state_dict())
    except ValueError as error:
        assert "placed as" in str(error)
    else:
        raise AssertionError("another layout was loaded")
    other.run(1, start=1).check()
    after = other.other.state_dict()["state"][0]["accumulator_0"].to_local()
    assert (after >= before).all()


def spread_matches_torch(rank: int, folder: str) -> None:
    """The arithmetic of shards agrees with torch's own, for many sizes."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    from torch_sm3.optim._placements import spread_of

    mesh = mesh_of_two_dims()
    for n in range(12):
        for placements in (
            [Shard(0), Shard(0)],
            [_StridedShard(0, split_factor=2), Shard(0)],
            [Shard(0), Shard(1)],
            [Shard(1), _StridedShard(0, split_factor=3)],
        ):
            shape = (n, 5)
            param = spread(torch.zeros(4, 4), (mesh, [Shard(0), Replicate()]))
            ours = spread_of(param, shape, placements)
            theirs, start = compute_local_shape_and_global_offset(
                shape, mesh, placements
            )
            assert ours.local_shape == tuple(theirs), f"{n} {placements}"
            if 0 not in theirs:
                assert [ours.runs(d)[0][0] for d in (0, 1)] == list(start)


CHECKS: dict[int, list[Check]] = {
    2: [],
    3: [],
    4: [
        two_dims,
        two_dims_in_low_precision,
        one_message_for_each_dim,
        skip_on_one_of_four_ranks,
        models_that_torch_shards,
        row_20,
        loaded_by_another_layout,
        spread_matches_torch,
    ],
}
