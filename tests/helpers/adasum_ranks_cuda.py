# SPDX-License-Identifier: Apache-2.0
"""Adasum of CUDA tensors over Gloo and over NCCL, as each rank runs it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from helpers.adasum_ranks import Grads, batch, grads, loss_of, make_net
from torch.nn.parallel import DistributedDataParallel

import torch_sm3


def group_of(backend: str) -> Any:
    return None if backend == "gloo" else dist.new_group(backend=backend)


def device_of(rank: int, kind: str) -> torch.device:
    """Return a device of this rank: several ranks may share one GPU."""
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", rank % torch.cuda.device_count())


def on_host(gradients: Grads) -> Grads:
    return [None if g is None else g.cpu() for g in gradients]


def hook(
    rank: int, size: int, kind: str, backend: str, options: dict[str, Any]
) -> list[tuple[Grads, Grads]]:
    """Three iterations of DDP; local gradients first."""
    device, group = device_of(rank, kind), group_of(backend)
    state = torch_sm3.AdasumState(group, **options)
    net, local = make_net().to(device), make_net().to(device)
    model = DistributedDataParallel(net, process_group=group, bucket_cap_mb=0.05)
    model.register_comm_hook(state, torch_sm3.adasum_hook)
    found = []
    for step in range(3):
        for run in (local, model):
            run.zero_grad()
            loss_of(run, batch(rank, step).to(device)).backward()
        found.append((on_host(grads(local)), on_host(grads(model))))
    state.close()
    if group is not None:
        dist.destroy_process_group(group)
    return found


def all_reduce(rank: int, size: int, kind: str, backend: str) -> tuple[Grads, Grads]:
    """Mixed dtypes on another stream than the default one."""
    device, group = device_of(rank, kind), group_of(backend)
    generator = torch.Generator().manual_seed(rank)
    leaves = [
        torch.randn(40_001, generator=generator),
        torch.randn(10, generator=generator).half(),
        torch.randn(6, 5, generator=generator).t(),
        torch.full((7,), 6e4).half(),
        torch.zeros(3),
    ]
    if kind == "cpu":
        tensors = [leaf.clone() for leaf in leaves]
        torch_sm3.adasum_all_reduce(tensors, group)
        return list(leaves), list(tensors)
    torch.cuda.set_device(device)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        tensors = [leaf.to(device) for leaf in leaves]
        torch_sm3.adasum_all_reduce(tensors, group)
        after = [t * 1 for t in tensors]
    stream.synchronize()
    return list(leaves), on_host(list(after))


def orthogonal(rank: int, size: int) -> list[float]:
    """The result of gradients with nothing in common, on one GPU."""
    leaf = torch.zeros(size, device=device_of(rank, "cuda"))
    leaf[rank] = rank + 1
    torch_sm3.adasum_all_reduce(leaf)
    return leaf.tolist()
