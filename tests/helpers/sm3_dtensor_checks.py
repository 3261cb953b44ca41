# SPDX-License-Identifier: Apache-2.0
"""Checks of SM3 on DTensors in meshes of one dimension."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.sm3_ranks import Check
from helpers.sm3_twins import Twin, spread
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from torch_sm3 import SM3, Cover
from torch_sm3.optim import _reduce

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "momentum": {"momentum": 0.9, "weight_decay": 0.1, "maximize": True},
    "ema": {"beta2": 0.9, "momentum": 0.5},
    "first": {"variant": "I"},
    "first_ema": {"variant": "I", "beta2": 0.9, "momentum": 0.9},
    "google": {"compat": "google"},
    "optax": {"compat": "optax", "variant": "I"},
    "trax": {"compat": "trax", "weight_decay": 0.1},
    "enealor": {"compat": "enealor", "beta2": 0.9},
    "enealor_first": {"compat": "enealor", "beta2": 0.9, "variant": "I"},
    "diagonal": {"cover": "diagonal"},
    "loop": {"fused": False},
    "loop_first": {"fused": False, "variant": "I"},
    "foreach": {"foreach": True, "momentum": 0.5},
    "fused": {"fused": True},
}


def mesh_of_all() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def weights(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Any:
    return [torch.randn(shape).to(dtype) for shape in shapes]


def _check_options(dim: int, *shapes: tuple[int, ...]) -> None:
    """Compare all options on shards along one dimension."""
    where = (mesh_of_all(), [Shard(dim)])
    start = weights(*shapes)
    for name, options in OPTIONS.items():
        Twin(start, [where] * len(start), **options).run(3).check(name)


def sharded_on_dim_0(rank: int, folder: str) -> None:
    _check_options(0, (6, 5), (5, 4), (12,), (4, 3, 2))


def sharded_on_dim_1(rank: int, folder: str) -> None:
    _check_options(1, (6, 5), (3, 4), (4, 6, 2), (2, 3, 2, 3))


def uneven_and_empty_shards(rank: int, folder: str) -> None:
    _check_options(0, (2, 3), (4, 5), (1, 8), (1,), (2, 6, 8), (7, 2))
    _check_options(1, (3, 2), (8, 1), (3, 4), (2, 1, 4))


def shapes_without_elements(rank: int, folder: str) -> None:
    mesh = mesh_of_all()
    start = weights((0, 3), (3, 0))
    twin = Twin(start, [(mesh, [Shard(0)]), (mesh, [Shard(1)])], momentum=0.5)
    twin.run(2).check()


def replicated(rank: int, folder: str) -> None:
    where = (mesh_of_all(), [Replicate()])
    Twin(weights((6, 5), (3,), ()), [where] * 3, momentum=0.9).run(3).check()


def float64_is_reduced_in_float64(rank: int, folder: str) -> None:
    where = (mesh_of_all(), [Shard(0)])
    for variant in ("I", "II"):
        start = weights((6, 5), (3, 4), dtype=torch.float64)
        Twin(start, [where] * 2, variant=variant).run(3).check(variant)


def gradients_of_another_dtype(rank: int, folder: str) -> None:
    where = (mesh_of_all(), [Shard(0)])
    for variant, dtype in [("I", torch.float64), ("I", torch.bfloat16)]:
        twin = Twin(weights((6, 5), dtype=dtype), [where], variant=variant)
        for step in range(3):
            grad = torch.randn(6, 5, generator=torch.Generator().manual_seed(step))
            for param, at in [(twin.plain[0], None), (twin.shards[0], where)]:
                param.grad_dtype = torch.float32
                param.grad = spread(grad, at)
            twin.one.step()
            twin.other.step()
        twin.check(f"{variant} {dtype}")


def covers_on_a_sharded_dim(rank: int, folder: str) -> None:
    mesh, n = mesh_of_all(), dist.get_world_size()
    cases = [
        (Cover.heads(0, n=2 * n), (8 * n, 5), 0),
        (Cover.blocks(0, size=3), (6 * n, 5), 0),
        (Cover.heads(0, n=4), (8, 6 * n), 1),
        (Cover.merge((0,), (1, 2)), (4 * n, 3, 2), 0),
        (Cover.merge((0, 1), (2,)), (2 * n, 3, 4), 0),
        (Cover.merge((0,), (1, 2)), (3, 2 * n, 2), 1),
        (Cover([2 * n, 2, 15], [(0, 2), (1,)]), (4 * n, 5, 3), 0),
        (Cover([n, -1], [(1, 0), ()]), (n, 4), 0),
    ]
    for variant in ("II", "I"):
        for cover, shape, dim in cases:
            twin = Twin(
                weights(shape), [(mesh, [Shard(dim)])], cover=cover, variant=variant
            )
            twin.run(3).check(f"{cover} {variant}")


def covers_across_boundaries(rank: int, folder: str) -> None:
    mesh, n = mesh_of_all(), dist.get_world_size()
    for cover, shape, dim in [
        (Cover.heads(0, n=3), (24, 5), 0),
        (Cover.blocks(0, size=4), (4 * n + 4, 5), 0),
        (Cover.merge((0,), (1, 2)), (3, 2, 2 * n), 2),
    ]:
        param = torch.nn.Parameter(spread(torch.zeros(shape), (mesh, [Shard(dim)])))
        with pytest.raises(ValueError, match="boundaries of the cover's view"):
            SM3([param], cover=cover)


def low_precision(rank: int, folder: str) -> None:
    mesh, n = mesh_of_all(), dist.get_world_size()
    rows, columns = (mesh, [Shard(0)]), (mesh, [Shard(1)])
    shapes, wheres = [(5, 7), (4, 256 * n + 9)], [rows, rows]
    for options in [
        {"stochastic_rounding": True, "seed": 3},
        {"kahan": True},
        {"momentum": 0.9, "momentum_dtype": torch.float32},
        {"momentum": 0.9, "momentum_dtype": torch.int8, "variant": "I"},
        {"momentum": 0.9, "momentum_dtype": torch.int8, "stochastic_rounding": True},
    ]:
        start = weights(*shapes, dtype=torch.bfloat16)
        Twin(start, wheres, **options).run(4).check(f"{options}")
    for options in [
        {"momentum_dtype": torch.bfloat16},
        {"momentum_dtype": torch.int8},
        {"momentum_dtype": torch.int8, "stochastic_rounding": True},
    ]:
        start = weights((8 * n, 256 * n), (16, 512 * n - 1))
        wheres = [columns, columns]
        Twin(start, wheres, momentum=0.9, **options).run(4).check(f"{options}")


def int8_blocks_on_two_ranks(rank: int, folder: str) -> None:
    where, n = (mesh_of_all(), [Shard(1)]), dist.get_world_size()
    param = torch.nn.Parameter(spread(torch.zeros(64, 100 * n), where))
    with pytest.raises(ValueError, match="multiples of 256"):
        SM3([param], momentum=0.9, momentum_dtype=torch.int8)


def other_placements_of_gradients(rank: int, folder: str) -> None:
    mesh, n = mesh_of_all(), dist.get_world_size()
    param = torch.nn.Parameter(spread(torch.zeros(4, 4), (mesh, [Shard(0)])))
    optimizer = SM3([param])
    for placement, shape in [
        (Partial(), (4, 4)),
        (Replicate(), (4, 4)),
        (Shard(1), (4, 4 // n)),
    ]:
        param.grad = DTensor.from_local(
            torch.ones(shape), mesh, [placement], run_check=False
        )
        with pytest.raises(ValueError, match="placed as its parameter"):
            optimizer.step()
    assert not param.to_local().any()
    with pytest.raises(NotImplementedError, match="dense gradients"):
        optimizer._local_grad(param, torch.eye(4).to_sparse())


def versions_rise(rank: int, folder: str) -> None:
    twin = Twin(weights((4, 4)), [(mesh_of_all(), [Shard(0)])])
    before = twin.shards[0]._version, twin.shards[0].to_local()._version
    twin.run(1)
    after = twin.shards[0]._version, twin.shards[0].to_local()._version
    assert all(x < y for x, y in zip(before, after, strict=True))


def grad_scaler(rank: int, folder: str) -> None:
    """An infinity in the shard of one rank makes all ranks skip."""
    where = (mesh_of_all(), [Shard(0)])
    for fused in (True, None):
        twin = Twin(weights((6, 5), (7,)), [where] * 2, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        for seed in range(4):
            twin.set_grads(seed, scale=4.0)
            if seed == 2 and rank == 1:
                twin.shards[0].grad.to_local()[0, 1] = torch.inf
            scaler.step(twin.other)
            scaler.update(4.0)
            twin.set_grads(seed)
            if seed != 2:
                twin.one.step()
        twin.check(f"fused={fused}")


def row_15(rank: int, folder: str) -> None:
    start = torch.randn(33, 17)
    Twin([start], [(mesh_of_all(), [Shard(0)])], momentum=0.9).run(20).check()


def row_19(rank: int, folder: str) -> None:
    mesh = mesh_of_all()
    n = dist.get_world_size()
    param = torch.nn.Parameter(
        spread(torch.zeros(16 * n, 512, dtype=torch.bfloat16), (mesh, [Shard(0)]))
    )
    optimizer = SM3(
        [param], momentum=0.9, momentum_dtype=torch.int8, cover=Cover.heads(0, n=2 * n)
    )
    predicted = optimizer.state_bytes(detail=True)
    optimizer.init_state()
    state = optimizer.state[param]
    assert optimizer.state_bytes(detail=True) == predicted
    expected = {
        "accumulator_0": ((2 * n, 8), [Shard(0)]),
        "accumulator_1": ((2 * n, 512), [Shard(0)]),
        "momentum_buffer": ((16 * n, 512), [Shard(0)]),
        "momentum_scale": ((16 * n, 2), [Shard(0)]),
    }
    for key, (shape, placements) in expected.items():
        assert isinstance(state[key], DTensor)
        assert tuple(state[key].shape) == shape
        assert list(state[key].placements) == placements
    assert not isinstance(state["step"], DTensor)
    plain = SM3([torch.nn.Parameter(spread(torch.zeros(6, 4), (mesh, [Shard(0)])))])
    plain.init_state()
    vectors = next(iter(plain.state.values()))
    assert list(vectors["accumulator_0"].placements) == [Shard(0)]
    assert list(vectors["accumulator_1"].placements) == [Replicate()]


def row_32(rank: int, folder: str) -> None:
    rows = (mesh_of_all(), [Shard(0)])
    for options in ({"foreach": True}, {"fused": True}, {"fused": False}, {}):
        start = weights((6, 5), (6, 5), (7,), (7,))
        Twin(start, [None, rows, rows, None], **options).run(3).check(f"{options}")


def missing_gradient_on_one_rank(rank: int, folder: str) -> None:
    where = (mesh_of_all(), [Shard(0)])
    for options in ({}, {"variant": "I"}, {"beta2": 0.9}):
        twin = Twin(weights((6, 5), (4, 3)), [where] * 2, **options).run(2)
        before = [p.to_local().clone() for p in twin.shards]
        present = twin.other.state_dict()["state"][0]["accumulator_1"].to_local()
        present = present.clone()
        twin.set_grads(9)
        if rank == 1:
            twin.shards[0].grad = None
        twin.one.step()
        twin.other.step()
        state = twin.other.state_dict()["state"]
        moved = not torch.equal(twin.shards[0].to_local(), before[0])
        assert moved == (rank != 1)
        assert state[0]["step"] == (2 if rank == 1 else 3)
        # What all ranks hold is the same on all.
        mine = state[0]["accumulator_1"].to_local()
        _assert_equal_everywhere(mine)
        assert (mine >= present).all()
        # The other parameter goes on as ever.
        assert torch.equal(state[1]["accumulator_1"].to_local(),
                           twin.one.state[twin.plain[1]]["accumulator_1"])  # fmt: skip


def _assert_equal_everywhere(tensor: Tensor) -> None:
    all_of_them = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(all_of_them, tensor.contiguous())
    assert all(torch.equal(tensor, one) for one in all_of_them)


def _snapshot(optimizer: SM3) -> list[Tensor]:
    tensors = [p for group in optimizer.param_groups for p in group["params"]]
    tensors += [t for one in optimizer.state_dict()["state"].values() for t in
                one.values()]  # fmt: skip
    return [
        t.to_local().clone() if isinstance(t, DTensor) else t.detach().clone()
        for t in tensors
    ]


def skip_on_one_rank_only(rank: int, folder: str) -> None:
    where = (mesh_of_all(), [Shard(0)])
    for variant in ("II", "I"):
        twin = Twin(
            weights((6, 5), (7,)), [where] * 2, skip_nonfinite=True, variant=variant
        ).run(2)
        before = _snapshot(twin.other)
        twin.set_grads(7)
        if rank == 1:
            twin.shards[0].grad.to_local()[0, 0] = torch.nan
        twin.other.step()
        after = _snapshot(twin.other)
        assert all(map(torch.equal, before, after))
        assert twin.other.skipped_steps == 1
        # A flag from outside, as GradScaler's.
        twin.set_grads(8)
        twin.other.found_inf = torch.tensor(float(rank == 1) * 2)
        twin.other.step()
        assert all(map(torch.equal, before, _snapshot(twin.other)))
        assert twin.other.skipped_steps == 2
        del twin.other.found_inf
        twin.run(2, start=2).check(variant)


def found_inf_without_skip_nonfinite(rank: int, folder: str) -> None:
    twin = Twin(weights((6, 5)), [(mesh_of_all(), [Shard(0)])]).run(1)
    before = _snapshot(twin.other)
    twin.set_grads(7)
    twin.other.found_inf = torch.full((1,), float(rank == 0), dtype=torch.float64)
    twin.other.step()
    assert all(map(torch.equal, before, _snapshot(twin.other)))
    twin.other.found_inf.zero_()
    twin.run(2, start=1).check()


class _Messages:
    """Counts the elements of every all-reduce."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __enter__(self) -> _Messages:
        self._real = dist.all_reduce

        def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.sizes.append(tensor.numel())
            return self._real(tensor, *args, **kwargs)

        _reduce.dist.all_reduce = counted
        return self

    def __exit__(self, *_: object) -> None:
        _reduce.dist.all_reduce = self._real


def one_message_in_every_step(rank: int, folder: str) -> None:
    mesh = mesh_of_all()
    rows, columns = (mesh, [Shard(0)]), (mesh, [Shard(1)])
    for variant in ("II", "I"):
        twin = Twin(
            weights((6, 5), (4, 30), (9,), (2, 7)), [rows, columns, rows, rows],
            variant=variant,
        )  # fmt: skip
        twin.other.init_state()
        size = 5 + 4 + 7
        with _Messages() as messages:
            twin.run(1)
            assert messages.sizes == [size]
            for param in twin.shards[rank:]:  # other ones on each rank
                param.grad = None
            twin.other.step()
            twin.other.zero_grad()
            twin.other.step()
            assert messages.sizes == [size] * 3
            twin.other.found_inf = torch.ones(())
            twin.set_grads(3)
            twin.other.step()
            # The flag of the skipped step goes first.
            assert messages.sizes == [size] * 3 + [1, size]
            twin.other.state_dict()
        assert len(messages.sizes) == 5
    bias = torch.nn.Parameter(spread(torch.zeros(9), rows))
    bias.grad = torch.zeros_like(bias)
    with _Messages() as messages:
        SM3([bias]).step()
    assert not messages.sizes


def copies_and_state_of_whole_tensors(rank: int, folder: str) -> None:
    import copy

    where = (mesh_of_all(), [Shard(0)])
    twin = Twin(weights((6, 5), (4, 3)), [where] * 2, momentum=0.9).run(2)
    twin.other = copy.deepcopy(twin.other)
    twin.shards = twin.other.param_groups[0]["params"]
    twin.run(1, start=2).check("copy")
    # The state dict of the run on whole tensors is cut where it is loaded.
    twin.other.load_state_dict(twin.one.state_dict())
    twin.run(1, start=3).check("loaded")
    saved = twin.other.state_dict()
    with pytest.raises(ValueError, match="checkpoint moves state"):
        twin.one.load_state_dict(saved)
    twin.other.load_state_dict(saved)
    twin.run(1, start=4).check("loaded again")


def differentiable(rank: int, folder: str) -> None:
    param = torch.nn.Parameter(spread(torch.zeros(4, 2), (mesh_of_all(), [Shard(0)])))
    with pytest.raises(RuntimeError, match="differentiable"):
        SM3([param], differentiable=True)


def parameters_that_are_sums(rank: int, folder: str) -> None:
    param = torch.nn.Parameter(
        DTensor.from_local(torch.zeros(4, 2), mesh_of_all(), [Partial()])
    )
    with pytest.raises(ValueError, match="sharded or replicated"):
        SM3([param])


_ANY: list[Check] = [
    sharded_on_dim_0,
    sharded_on_dim_1,
    covers_on_a_sharded_dim,
    low_precision,
]

CHECKS: dict[int, list[Check]] = {
    2: [
        *_ANY,
        replicated,
        float64_is_reduced_in_float64,
        gradients_of_another_dtype,
        covers_across_boundaries,
        int8_blocks_on_two_ranks,
        other_placements_of_gradients,
        versions_rise,
        grad_scaler,
        row_15,
        row_19,
        row_32,
        missing_gradient_on_one_rank,
        skip_on_one_rank_only,
        found_inf_without_skip_nonfinite,
        one_message_in_every_step,
        copies_and_state_of_whole_tensors,
        differentiable,
        parameters_that_are_sums,
    ],
    3: [*_ANY, uneven_and_empty_shards, shapes_without_elements],
    4: [],
}
