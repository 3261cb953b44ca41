# SPDX-License-Identifier: Apache-2.0
"""Algorithms, nodes, wires, checks and metrics, as each rank runs them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from helpers.adasum_ranks import (
    Grads,
    batch,
    caught,
    hooked,
    local_grads,
    make_net,
    wrap,
)
from helpers.adasum_ranks_ddp import iteration
from torch.distributed.algorithms.join import Join

import torch_sm3


def hook(rank: int, size: int, options: dict[str, Any]) -> list[tuple[Grads, Grads]]:
    """Three iterations of DDP with options of the state; local gradients first."""
    state = torch_sm3.AdasumState(**options)
    with hooked(make_net(), state, bucket_cap_mb=0.05) as model:
        return [
            (
                local_grads(make_net(), batch(rank, step)),
                iteration(model, batch(rank, step)),
            )
            for step in range(3)
        ]


def algorithms(rank: int, size: int, names: list[str]) -> dict[str, Any]:
    """Leaves, and what each algorithm makes of them or says."""
    generator = torch.Generator().manual_seed(rank)
    leaves = [torch.randn(n, generator=generator) for n in (1, 40_001, 0, 70, 16_384)]
    leaves += [torch.zeros(20) if rank == 0 else torch.ones(20) * rank]
    # Squares beyond float64: needs a second pass.
    leaves += [torch.randn(300, generator=generator).double() * 1e-200]
    found: dict[str, Any] = {"leaves": leaves}
    for name in names:
        tensors = [leaf.clone() for leaf in leaves]
        failures = [
            caught(lambda n=name: torch_sm3.AdasumState(algorithm=n).close()),
            caught(
                lambda n=name, t=tensors: torch_sm3.adasum_all_reduce(t, algorithm=n)
            ),
        ]
        found[name] = failures, tensors
    return found


def choices(rank: int, size: int) -> tuple[str, str, str]:
    """algorithm_in_use: by name, for a small bucket, for a large one."""
    state = torch_sm3.AdasumState(algorithm="gather")
    named = state.algorithm_in_use
    state.close()
    with hooked(torch.nn.Linear(3, 3)) as model:
        state = model._comm_hooks[0][1]
        large = state.algorithm_in_use  # as for a bucket of DDP's default size
        iteration(model, torch.ones(1, 3))
        return named, state.algorithm_in_use, large


def wide_results(rank: int, size: int) -> tuple[Grads, Grads]:
    """A sum beyond the range of float16, kept in float32."""
    generator = torch.Generator().manual_seed(rank)
    leaves = [torch.zeros(4, 50), torch.randn(30_000, generator=generator)]
    leaves[0][rank % 4] = 6e4
    tensors = [leaf.half() for leaf in leaves]
    # Two such leaves at the same place, so the sum leaves float16.
    tensors[0][3] = 6e4 if rank == size - 1 else tensors[0][3]
    before: Grads = [t.clone() for t in tensors]
    out = [torch.empty_like(t, dtype=torch.float32) for t in tensors]
    torch_sm3.adasum_all_reduce(tensors, out=out, result_dtype=torch.float32)
    assert all(map(torch.equal, tensors, before))
    return before, list(out)


def mean_under_join(rank: int, size: int, how: str) -> list[tuple[Grads, Grads]]:
    """Uneven inputs where layers get the mean: 2 batches on even ranks, 1 on odd."""
    options: dict[str, Any] = {
        "mode": {"mode": "mean"},
        "warm-up": {"warmup_steps": 5},
        "excluded": {"exclude": lambda p: True},
    }[how]
    state = torch_sm3.AdasumState(**options)
    found = []
    with (
        hooked(make_net(), state, bucket_cap_mb=0.05) as model,
        Join([model], divide_by_initial_world_size=True),
    ):
        for step in range(2 if rank % 2 == 0 else 1):
            local = local_grads(make_net(), batch(rank, step))
            found.append((local, iteration(model, batch(rank, step))))
    return found


def shards(rank: int, size: int, mode: str) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Two replicas of two shards: this rank's whole leaves, part and two results."""
    replica, shard = divmod(rank, 2)
    replicas = [dist.new_group([s, s + 2]) for s in range(2)][shard]
    both = [dist.new_group([2 * r, 2 * r + 1]) for r in range(2)][replica]
    # Equal on both shards of a replica.
    whole = torch.randn(50_001, generator=torch.Generator().manual_seed(replica))
    cut = 20_000
    part = (whole[:cut] if shard == 0 else whole[cut:]).clone()
    # A parameter that every shard holds whole.
    copy = whole[:77].clone()
    state = torch_sm3.AdasumState(replicas, shard_group=both, mode=mode)
    torch_sm3.adasum_all_reduce([part, copy], state=state)
    state.close()
    overlapping = caught(lambda: torch_sm3.AdasumState(replicas, shard_group=replicas))
    for group in (replicas, both):
        dist.destroy_process_group(group)
    return whole, torch.cat([part, copy]), overlapping


def flipped_bit(rank: int, size: int, algorithm: str) -> tuple[list[str], Any]:
    """One bit of one rank's result is flipped in the second of three steps."""
    net = make_net()
    state = torch_sm3.AdasumState(
        check="hash", algorithm=algorithm, named_parameters=net.named_parameters()
    )
    model, _ = wrap(net, state, bucket_cap_mb=1000)
    names = []
    for step in range(3):
        if step == 1 and rank == size - 1:
            # The bucket holds the parameters in reverse order: of the last layer, 1050
            # elements, then a bias of 150.
            state._binding.exchange.damage(4 * (1050 + 10))
        failure = caught(lambda s=step: iteration(model, batch(rank, s)))
        names.append(failure[0])
        if step == 1:
            text = failure
    state.close()
    return names, text


def flipped_parameter(rank: int, size: int) -> tuple[list[str], Any]:
    """A weight of one rank drifts by one bit between two steps; check="full"."""
    net = make_net()
    state = torch_sm3.AdasumState(check="full", named_parameters=net.named_parameters())
    model, _ = wrap(net, state, bucket_cap_mb=0.05)
    names = []
    for step in range(2):
        if step == 1 and rank == size - 1:
            net[2].weight.detach().view(torch.int32)[3, 5] ^= 1
        failure = caught(lambda s=step: iteration(model, batch(rank, s)))
        names.append(failure[0])
    state.close()
    return names, failure


def multipliers(rank: int, size: int) -> dict[str, tuple[Any, float, float]]:
    """Metrics of orthogonal, identical and nearly opposite gradients."""
    state = torch_sm3.AdasumState(metrics=True)
    leaves = {
        "orthogonal": torch.eye(size)[rank] * 3.0,
        "identical": torch.ones(10),
        "random": torch.randn(999, generator=torch.Generator().manual_seed(rank)),
    }
    found = {}
    for name, leaf in leaves.items():
        value = leaf.clone()
        torch_sm3.adasum_all_reduce(value, state=state)
        mean = leaf.clone()
        dist.all_reduce(mean)
        mean /= size
        (layer,) = state.metrics().layers.values()
        found[name] = (
            layer,
            float(value.double().norm() / mean.double().norm()),
            state.metrics().messages_sent,
        )
    state.close()
    return found
