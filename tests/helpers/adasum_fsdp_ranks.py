# SPDX-License-Identifier: Apache-2.0
"""What each rank runs in the tests of Adasum with FSDP2: replicas of two shards."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from helpers.adasum_state_ranks import batch, error, make_net
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

import torch_sm3

Tensors = dict[str, torch.Tensor]


class Odd(torch.nn.Module):
    """Parameters that two shards do not divide evenly, one of them frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = torch.nn.Linear(8, 33)
        self.second = torch.nn.Linear(33, 5, bias=False)
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.frozen = torch.nn.Parameter(torch.ones(5), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh()) * self.scale + self.frozen


def gradients(model: torch.nn.Module, x: torch.Tensor) -> Tensors:
    model.zero_grad()
    model(x).square().sum().backward()
    return whole(model)


def whole(model: torch.nn.Module) -> Tensors:
    """Return the unsharded gradients by name."""
    return {
        name: getattr(p.grad, "full_tensor", p.grad.clone)()
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def meshes(size: int) -> Any:
    return init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("replica", "shard"))


def sharded(
    net: torch.nn.Module, mesh: Any, parts: Any = (), **options: Any
) -> torch.nn.Module:
    for part in parts:
        fully_shard(part, mesh=mesh["shard"], **options)
    return fully_shard(net, mesh=mesh["shard"], **options)


def state_of(mesh: Any, model: torch.nn.Module, **options: Any) -> Any:
    state = torch_sm3.AdasumState(
        mesh.get_group("replica"),
        shard_group=mesh.get_group("shard"),
        named_parameters=model.named_parameters(),
        **options,
    )
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_all_reduce_hook(torch_sm3.adasum_fsdp_hook(state, part))
    return state


def one_step(rank: int, size: int, model: str, options: dict[str, Any]) -> Any:
    """Local gradients of one rank, those of FSDP twice, and the metrics."""
    mesh = meshes(size)
    make = Odd if model == "odd" else make_net
    local = gradients(make(), batch(rank))
    net = make()
    parts = [net[0], net[2]] if model == "parts" else []
    placed = {"shard_placement_fn": lambda p: Shard(1)} if model == "columns" else {}
    if model == "columns":
        net[0].bias = net[2].bias = None
        local = gradients(net, batch(rank))
    net = sharded(net, mesh, parts, **placed)
    state = state_of(mesh, net, metrics=True, **options)
    found = []
    for _ in range(2):
        found.append(gradients(net, batch(rank)))
        state.advance()
    steps, metrics = state.step, state.metrics()
    state.close()
    return local, found, steps, {k: v.multiplier for k, v in metrics.layers.items()}


def micro_steps(rank: int, size: int) -> tuple[list[Tensors], Tensors]:
    """Two micro-batches of which only the last is synchronised, on an old gradient."""
    mesh = meshes(size)
    local = [gradients(make_net(), batch(rank, step)) for step in (0, 1, 2)]
    net = sharded(make_net(), mesh)
    state = state_of(mesh, net)
    net(batch(rank, 2)).square().sum().backward()
    net.set_requires_gradient_sync(False)
    net(batch(rank, 0)).square().sum().backward()
    net.set_requires_gradient_sync(True)
    net(batch(rank, 1)).square().sum().backward()
    state.close()
    return local, whole(net)


def half_precision(rank: int, size: int) -> tuple[Tensors, Tensors]:
    """Reduction in bfloat16, as a mixed precision policy asks for."""
    mesh = meshes(size)
    local = gradients(make_net(), batch(rank))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    net = sharded(make_net(), mesh, mp_policy=policy)
    state = state_of(mesh, net)
    found = gradients(net, batch(rank))
    state.close()
    return local, found


def unused_parameters(rank: int, size: int) -> list[tuple[str, str]]:
    """Errors where a parameter has no gradient, before and after torch is told so."""

    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.used, self.unused = torch.nn.Linear(8, 4), torch.nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    mesh = meshes(size)
    errors = []
    for told in (False, True):
        net = sharded(Two(), mesh)
        state = state_of(mesh, net)
        if told:
            net.set_reduce_scatter_unused_params(True)
        errors.append(error(gradients, net, batch(rank)))
        state.close()
    return errors


def refusals(rank: int, size: int) -> list[tuple[str, str]]:
    """Modules and states that do not go together."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    mesh = meshes(size)
    hook = torch_sm3.adasum_fsdp_hook
    state = torch_sm3.AdasumState(
        mesh.get_group("replica"), shard_group=mesh.get_group("shard")
    )
    alone = torch_sm3.AdasumState(mesh.get_group("replica"))
    net = sharded(make_net(), mesh)
    old = FullyShardedDataParallel(make_net(), device_id=torch.device("cpu"))
    overlap = {"shard_group": dist.group.WORLD}
    found = [
        error(hook, "state", net),
        error(hook, state, make_net()),
        error(hook, state, old),
        error(hook, state, fully_shard(make_net(), mesh=mesh)),
        error(hook, alone, net),
        error(torch_sm3.AdasumState, mesh.get_group("replica"), **overlap),
    ]
    state.close()
    found.append(error(hook, state, net))
    alone.close()
    return found
