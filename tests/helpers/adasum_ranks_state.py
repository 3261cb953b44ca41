# SPDX-License-Identifier: Apache-2.0
"""The life of Adasum's state, as each rank runs it."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from helpers.adasum_ranks import (
    SHORT,
    Grads,
    batch,
    caught,
    grads,
    hooked,
    local_grads,
    loss_of,
    make_net,
    wrap,
)
from helpers.adasum_ranks_ddp import iteration
from torch.nn.parallel import DistributedDataParallel

import torch_sm3


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int,
    steps: Iterable[int],
) -> None:
    """Train on this rank's batches."""
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, batch(rank, step)).backward()
        optimizer.step()


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9)


def weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def resume(rank: int, size: int, options: dict[str, Any]) -> list[list[torch.Tensor]]:
    """A hundred steps in one go, and three ways to go on from a checkpoint."""
    with hooked(
        make_net(), torch_sm3.AdasumState(**options), bucket_cap_mb=0.05
    ) as straight:
        train(straight, sgd(straight), rank, range(100))
        ends = [weights(straight)]
    with hooked(
        make_net(), torch_sm3.AdasumState(**options), bucket_cap_mb=0.05
    ) as model:
        optimizer = sgd(model)
        train(model, optimizer, rank, range(50))
        state = model._comm_hooks[0][1]
        file = io.BytesIO()
        # Neither a pickled state nor a wrapped module that knows it has a group
        # inside.
        torch.save(
            {
                "model": model.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "options": state.state_dict(),
                "state": pickle.dumps(state),
                "wrapped": model,
            },
            file,
        )
    for way in ("options", "state", "wrapped"):
        file.seek(0)
        saved = torch.load(file, weights_only=False)
        net = make_net()
        net.load_state_dict(saved["model"])
        if way == "options":
            state = torch_sm3.AdasumState(**options)
            state.load_state_dict(saved["options"])
        elif way == "state":
            state = pickle.loads(saved["state"])
        else:
            net, state = saved["wrapped"].module, saved["wrapped"]._comm_hooks[0][1]
        with hooked(net, state, bucket_cap_mb=0.05) as model:
            optimizer = sgd(model)
            optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
            train(model, optimizer, rank, range(50, 100))
            assert state.step == 100
            ends.append(weights(net))
    return ends


def train_100_steps(rank: int, size: int) -> list[torch.Tensor]:
    """Weights after 100 steps with a learning rate that moves them far."""
    with hooked(make_net(), bucket_cap_mb=0.05, static_graph=True) as model:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        start = weights(model)
        train(model, optimizer, rank, range(100))
        end = weights(model)
    moved = [float((a - b).norm()) for a, b in zip(start, end, strict=True)]
    assert 0.1 < sum(moved) < 100, moved
    return end


def two_modules(rank: int, size: int) -> dict[str, tuple[Grads, Grads]]:
    """Two models at once: a state each, their orders of backward not one, and one."""
    local = [local_grads(make_net(), batch(rank, step)) for step in (0, 1)]
    found = {}
    with hooked(make_net(), bucket_cap_mb=0.05) as a, hooked(make_net()) as b:
        losses = [loss_of(a, batch(rank, 0)), loss_of(b, batch(rank, 1))]
        # The reducer of b, alive at the same time, ends first.
        losses[1].backward()
        losses[0].backward()
        found["a"], found["b"] = (local[0], grads(a)), (local[1], grads(b))
        for step in (0, 1):
            iteration(a, batch(rank, step))
            iteration(b, batch(rank, 1 - step))
        found["a again"], found["b again"] = (local[1], grads(a)), (local[0], grads(b))
    state = torch_sm3.AdasumState()
    one, _ = wrap(make_net(), state, bucket_cap_mb=0.05)
    two, _ = wrap(make_net(), state)
    losses = [loss_of(one, batch(rank, 0)), loss_of(two, batch(rank, 1))]
    for loss in losses:
        loss.backward()
    found["one"], found["two"] = (local[0], grads(one)), (local[1], grads(two))
    state.close()
    return found


def shared_state_out_of_order(rank: int, size: int) -> tuple[str, str, float]:
    """One state for two models whose backwards come in another order on rank 0."""
    state = torch_sm3.AdasumState(timeout=SHORT)
    nets = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 5)]
    models = [wrap(net, state)[0] for net in nets]
    if rank == 0:
        models.reverse()
    # Not by backward: DDP's own group would be out of order as well.
    failure = caught(
        lambda: [
            torch_sm3.adasum_hook(state, FakeBucket(list(model.parameters()))).wait()
            for model in models
        ]
    )
    state.close()
    return failure


class FakeBucket:
    """What the hook reads of a dist.GradBucket; DDP refuses models that differ."""

    def __init__(self, parameters: list[torch.Tensor], index: int = 0) -> None:
        self._parameters = parameters
        self._index = index
        self._buffer = torch.cat([p.detach().flatten() for p in parameters])

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def parameters(self) -> list[torch.Tensor]:
        return self._parameters

    def gradients(self) -> list[torch.Tensor]:
        sizes = [p.numel() for p in self._parameters]
        return [
            part.view(p.shape)
            for part, p in zip(self._buffer.split(sizes), self._parameters, strict=True)
        ]

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return True


def close_and_rebind(rank: int, size: int) -> tuple[list[str], list[tuple[Any, Any]]]:
    """Use after close, then after rebind."""
    model, state = wrap(make_net())
    local = local_grads(make_net(), batch(rank))
    state.close()
    state.close()
    texts = [
        caught(lambda: torch_sm3.adasum_all_reduce(torch.ones(2), state=state))[1],
        caught(state.rebind and (lambda: iteration(model, batch(rank))))[1],
    ]
    # Backward broke off in the middle; a fresh wrapper starts from the same state.
    state.rebind()
    again, _ = wrap(make_net(), state)
    found = [(local, iteration(again, batch(rank)))]
    state.rebind()
    found.append((local, iteration(again, batch(rank))))
    state.close()
    return texts, found


def subgroups(rank: int, size: int) -> dict[str, Any]:
    """Groups of some ranks, also in another order; rank outside; rebind to one."""
    members = sorted({0, size - 1})
    group = dist.new_group(members)
    backwards = dist.new_group(list(range(size))[::-1], sort_ranks=False)
    found: dict[str, Any] = {}
    leaf = torch.randn(10, generator=torch.Generator().manual_seed(rank))
    found["leaf"] = leaf
    state = torch_sm3.AdasumState(backwards)
    found["backwards"] = leaf.clone()
    torch_sm3.adasum_all_reduce(found["backwards"], state=state)
    if rank not in members:
        found["outside"] = caught(lambda: torch_sm3.AdasumState(group))
        found["outside call"] = caught(
            lambda: torch_sm3.adasum_all_reduce(leaf.clone(), group)
        )
        state.close()
        return found
    # Fewer ranks than before, and back to all.
    state.rebind(group)
    found["some"] = leaf.clone()
    torch_sm3.adasum_all_reduce(found["some"], state=state)
    loaded = pickle.loads(pickle.dumps(state))
    state.close()
    found["unbound"] = caught(
        lambda: torch_sm3.adasum_all_reduce(leaf.clone(), state=loaded)
    )
    loaded.rebind(group)
    found["loaded"] = leaf.clone()
    torch_sm3.adasum_all_reduce(found["loaded"], state=loaded)
    loaded.close()
    found["by group"] = leaf.clone()
    torch_sm3.adasum_all_reduce(found["by group"], group)
    return found


def smaller_and_larger(rank: int, size: int) -> list[tuple[Any, Any]]:
    """A DDP model whose group changes: all ranks, the first ones, all again."""
    some = dist.new_group(list(range(max(1, size - 1))))
    state = torch_sm3.AdasumState()
    model, _ = wrap(make_net(), state)
    local = local_grads(make_net(), batch(rank))
    found: list[tuple[Any, Any]] = [(local, iteration(model, batch(rank)))]
    if rank < max(1, size - 1):
        model._update_process_group(some)
        state.rebind(some)
        found.append((local, iteration(model, batch(rank))))
    else:
        state.close()
        found.append(())
    dist.barrier()
    model._update_process_group(dist.group.WORLD)
    state.rebind()
    found.append((local, iteration(model, batch(rank))))
    state.close()
    return found


def second_registration(rank: int, size: int) -> list[str]:
    """DDP takes one hook; its own error passes through."""
    texts = []
    with hooked(make_net()) as model:
        state = torch_sm3.AdasumState()
        hook = torch_sm3.adasum_hook
        texts.append(caught(lambda: model.register_comm_hook(state, hook)))
        other = DistributedDataParallel(make_net())
        texts.append(caught(lambda: other.register_comm_hook(state, lambda s, b: b)))
        state.close()
    return [name for name, *_ in texts]
