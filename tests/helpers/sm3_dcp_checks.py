# SPDX-License-Identifier: Apache-2.0
"""Checks of SM3 under torch.distributed.checkpoint: saved by two ranks, read by three.

Every rank also runs the whole model; what is loaded goes on with its bits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from helpers.sm3_dtensor_checks import mesh_of_all
from helpers.sm3_ranks import Check
from helpers.sm3_twins import assert_is_part, spread
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from torch_sm3 import SM3, Cover

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "first": {"variant": "I", "momentum": 0.9},
    "int8": {"momentum": 0.9, "momentum_dtype": torch.int8},
    "rounded": {"stochastic_rounding": True, "seed": 5},
    "kahan": {"kahan": True, "momentum": 0.5},
    "ema": {"beta2": 0.9, "weight_decay": 0.1},
    "heads": {"cover": "heads"},
    "skips": {"skip_nonfinite": True},
    "tensor lr": {"lr": "tensor"},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "loop": {"fused": False},
}
_SIXTEEN_BITS = ("int8", "rounded", "kahan")


def _model(name: str) -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(520, 12), nn.Linear(12, 7))
    return model.to(torch.bfloat16) if name in _SIXTEEN_BITS else model


def _optimizer(name: str, model: nn.Module) -> SM3:
    options = dict(OPTIONS[name])
    weights = [param for param in model.parameters() if param.dim() == 2]
    others = [param for param in model.parameters() if param.dim() != 2]
    if options.get("cover") == "heads":
        # Boundaries of 2 and of 3 shards of 12 rows.
        options["cover"] = Cover.heads(0, n=6)
        first = {"params": weights[:1], "cover": options.pop("cover")}
        return SM3([first, {"params": [*weights[1:], *others]}, {"params": []}])
    if options.get("lr") == "tensor":
        options["lr"] = torch.tensor(0.2)
    # Row 21: also a group without parameters.
    return SM3(
        [{"params": weights}, {"params": others, "lr": 0.05}, {"params": []}], **options
    )


def _run(model: nn.Module, optimizer: SM3, steps: range) -> None:
    for seed in steps:
        generator = torch.Generator().manual_seed(seed)
        for param in model.parameters():
            grad = torch.randn(param.shape, generator=generator).to(param.dtype)
            if isinstance(param, DTensor):
                grad = spread(grad, (param.device_mesh, param.placements))
            param.grad = grad
        optimizer.step()
        optimizer.zero_grad()


def _compare(name: str, model: nn.Module, one: SM3, other: nn.Module, two: SM3) -> None:
    two.state_dict()
    for (title, p), q in zip(
        model.named_parameters(), other.named_parameters(), strict=True
    ):
        q = q[1]
        assert_is_part(q.detach(), p.detach(), f"{name}: {title}")
        assert one.state[p].keys() == two.state[q].keys(), f"{name}: {title}"
        for key, value in one.state[p].items():
            ours = two.state[q][key]
            is_whole = not isinstance(q, DTensor) or key == "step"
            assert isinstance(ours, DTensor) != is_whole
            assert_is_part(ours, value, f"{name}: {key} of {title}")


def _sharded(name: str) -> tuple[nn.Module, SM3]:
    model = fully_shard(_model(name), mesh=mesh_of_all())
    return model, _optimizer(name, model)


def priming_changes_nothing(rank: int, folder: str) -> None:
    """Torch makes state by a step on zero gradients with lr 0."""
    for name in OPTIONS:
        for make in (_sharded, lambda n: (m := _model(n), _optimizer(n, m))):
            model, optimizer = make(name)
            before = [p.detach().clone() for p in model.parameters()]
            lrs = [float(group["lr"]) for group in optimizer.param_groups]
            get_optimizer_state_dict(model, optimizer)
            for p, old in zip(model.parameters(), before, strict=True):
                assert_is_part(p.detach(), _whole(old), name)
                assert p.grad is None
            for param in model.parameters():
                state = optimizer.state[param]
                expected = set(optimizer._layout(param, _group_of(optimizer, param)))
                assert state.keys() == expected, name
                for key, value in state.items():
                    if key != "step":
                        local = (
                            value.to_local() if isinstance(value, DTensor) else value
                        )
                        assert not local.float().any(), f"{name}: {key}"
            assert [float(g["lr"]) for g in optimizer.param_groups] == lrs


def _whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _group_of(optimizer: SM3, param: torch.Tensor) -> dict[str, Any]:
    for group in optimizer.param_groups:
        if any(param is one for one in group["params"]):
            return group
    raise AssertionError("a parameter of the optimizer")


def priming_with_grad_dtype(rank: int, folder: str) -> None:
    """Row 22: gradients of another dtype than their parameter's."""
    for dtype, grad_dtype in [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ]:
        param = nn.Parameter(torch.randn(6, 4).to(dtype))
        param.grad_dtype = grad_dtype
        model = nn.Module()
        model.weight = param
        optimizer = SM3([param])
        before = param.detach().clone()
        try:
            get_optimizer_state_dict(model, optimizer)
        except RuntimeError as error:
            # torch's own: it makes zeros in the parameter's dtype.
            assert "torch_sm3" not in str(error)
            optimizer.init_state()
        assert torch.equal(param, before)
        param.grad = torch.ones(6, 4, dtype=grad_dtype)
        optimizer.step()
        assert not torch.equal(param, before)
        state = get_optimizer_state_dict(model, optimizer)["state"]
        assert state["weight"]["accumulator_0"].dtype == torch.float32


def _path(folder: str, name: str) -> str:
    return f"{folder}/{name.replace(' ', '_')}"


def saved_by_two(rank: int, folder: str) -> None:
    for name in OPTIONS:
        model, optimizer = _sharded(name)
        _run(model, optimizer, range(3))
        state, optim = get_state_dict(model, optimizer)
        dcp.save(
            {"model": state, "optimizer": optim}, checkpoint_id=_path(folder, name)
        )


def loaded_by_three(rank: int, folder: str) -> None:
    for name in OPTIONS:
        plain = _model(name)
        one = _optimizer(name, plain)
        _run(plain, one, range(3))
        model, optimizer = _sharded(name)
        state, optim = get_state_dict(model, optimizer)
        full = {"model": state, "optimizer": optim}
        dcp.load(full, checkpoint_id=_path(folder, name))
        set_state_dict(
            model,
            optimizer,
            model_state_dict=full["model"],
            optim_state_dict=full["optimizer"],
        )
        _compare(f"{name}, loaded", plain, one, model, optimizer)
        assert [float(g["lr"]) for g in one.param_groups] == [
            float(g["lr"]) for g in optimizer.param_groups
        ]
        _run(plain, one, range(3, 6))
        _run(model, optimizer, range(3, 6))
        _compare(f"{name}, continued", plain, one, model, optimizer)


def row_18(rank: int, folder: str) -> None:
    """A load in place, after steps that might have kept views of state."""
    plain = _model("default")
    one = _optimizer("default", plain)
    _run(plain, one, range(2))
    model, optimizer = _sharded("default")
    _run(model, optimizer, range(2))
    path = f"{folder}/in_place"
    state, optim = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": optim}, checkpoint_id=path)
    _run(model, optimizer, range(20, 23))
    state, optim = get_state_dict(model, optimizer)
    full = {"model": state, "optimizer": optim}
    # Into the very tensors of parameters and state, nothing else is called.
    dcp.load(full, checkpoint_id=path)
    _compare("in place", plain, one, model, optimizer)
    placements = [q.placements for q in model.parameters()]
    _run(plain, one, range(2, 4))
    _run(model, optimizer, range(2, 4))
    _compare("after", plain, one, model, optimizer)
    assert [q.placements for q in model.parameters()] == placements


def whole_state_to_and_from_one_rank(rank: int, folder: str) -> None:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    plain = _model("kahan")
    one = _optimizer("kahan", plain)
    _run(plain, one, range(2))
    model, optimizer = _sharded("kahan")
    _run(model, optimizer, range(2))
    full = get_optimizer_state_dict(model, optimizer, options=options)
    if rank == 0:
        plain_full = get_optimizer_state_dict(plain, one, options=options)
        assert full["state"].keys() == plain_full["state"].keys()
        for key, state in plain_full["state"].items():
            assert state.keys() == full["state"][key].keys()
            assert all(torch.equal(full["state"][key][k], v) for k, v in state.items())
    weights = get_model_state_dict(model)
    fresh, again = _sharded("kahan")
    fresh.load_state_dict(weights)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(fresh, again, full, options=options)
    _run(plain, one, range(2, 4))
    _run(fresh, again, range(2, 4))
    _compare("broadcast", plain, one, fresh, again)


def flattened_by_name(rank: int, folder: str) -> None:
    """Without an empty group, which torch's flat form has no place for."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    plain = _model("int8")
    one = SM3(plain.parameters(), **OPTIONS["int8"])
    _run(plain, one, range(2))
    model, _ = _sharded("int8")
    optimizer = SM3(model.parameters(), **OPTIONS["int8"])
    _run(model, optimizer, range(2))
    flat = get_optimizer_state_dict(model, optimizer, options=options)
    assert "state.0.weight.accumulator_0" in flat
    weights = get_model_state_dict(model)
    fresh, _ = _sharded("int8")
    again = SM3(fresh.parameters(), **OPTIONS["int8"])
    fresh.load_state_dict(weights)
    set_optimizer_state_dict(fresh, again, flat, options=options)
    _run(plain, one, range(2, 4))
    _run(fresh, again, range(2, 4))
    _compare("flat", plain, one, fresh, again)


def row_33(rank: int, folder: str) -> None:
    """Full-state gathers of several optimizers: the same keys on all ranks."""
    options = StateDictOptions(full_state_dict=True)
    model = fully_shard(_model("int8"), mesh=mesh_of_all())
    params = list(model.parameters())
    several = [
        SM3(params[:2], momentum=0.9, momentum_dtype=torch.int8),
        SM3(params[2:], momentum=0.9, momentum_dtype=torch.int8, kahan=True),
    ]
    for optimizer in several:
        # Gradients are here on one rank, there on the other.
        for i, param in enumerate(optimizer.param_groups[0]["params"]):
            if i % 2 == rank % 2:
                param.grad = torch.zeros_like(param)
        optimizer.step()
    keys = []
    for optimizer in several:
        whole = {}
        for i, state in optimizer.state_dict()["state"].items():
            whole[i] = {k: _whole(v) for k, v in state.items()}
            keys.append((i, {k: (v.shape, v.dtype) for k, v in whole[i].items()}))
    everywhere: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everywhere, keys)
    assert all(one == keys for one in everywhere)
    full = get_optimizer_state_dict(model, several, options=options)
    assert len(full["state"]) == (4 if rank == 0 else 0) or len(full["state"]) == 4


CHECKS: dict[int, list[Check]] = {
    2: [
        priming_changes_nothing,
        priming_with_grad_dtype,
        saved_by_two,
        row_18,
        whole_state_to_and_from_one_rank,
        flattened_by_name,
        row_33,
    ],
    3: [loaded_by_three],
    4: [],
}
