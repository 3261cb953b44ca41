# SPDX-License-Identifier: Apache-2.0
"""What each rank runs in the tests of the rule of delta mode."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from helpers.adasum_delta_twins import (
    KINDS,
    SMALL,
    Twin,
    backward,
    batch,
    caught,
    copies,
    follow,
    loss_of,
    make_net,
)

from torch_sm3 import AdasumOptimizer, AdasumState


def rule(rank, world):
    """Every kind of optimizer, cut into buckets, beside its twin."""
    seen = {}
    for name, (kind, options) in KINDS.items():
        params = list(make_net().parameters())
        optimizer = AdasumOptimizer(kind(params, **options), bucket_bytes=SMALL)
        assert len(optimizer._layout.buckets) == 4
        seen[name] = follow(
            params, optimizer, Twin(params, kind, options), rank, range(3)
        )
        optimizer.close()
    return seen


def modes(rank, world):
    """Mode and scale of a state apply to the changes."""
    seen = {}
    for mode, scale in (("psum", 1.0), ("mean", 1.0), ("sum", 0.5), ("tree", 0.5)):
        params = list(make_net().parameters())
        state = AdasumState(mode=mode, scale=scale)
        optimizer = AdasumOptimizer(torch.optim.Adam(params, 0.01), state=state)
        twin = Twin(params, torch.optim.Adam, {"lr": 0.01})
        seen[mode, scale] = follow(params, optimizer, twin, rank, range(2))
        assert state.step == 2
        state.close()
    return seen


def options_of_the_state(rank, world):
    """Warm-up, layers that get the mean, metrics by name, and a look at all bits."""
    named = dict(make_net().named_parameters())
    params = list(named.values())
    state = AdasumState(
        warmup_steps=1,
        exclude="0.bias",
        named_parameters=named,
        metrics=True,
        check="full",
    )
    optimizer = AdasumOptimizer(
        torch.optim.Adam(params, 0.01), state=state, bucket_bytes=SMALL
    )
    twin = Twin(params, torch.optim.Adam, {"lr": 0.01})
    seen = follow(params, optimizer, twin, rank, range(2))
    layers = state.metrics().layers if world > 1 else {}
    answers = seen, sorted(layers), state.step
    if rank == world - 1:
        with torch.no_grad():
            params[0][0, 0] += 1e-3
    backward(params, rank, 2)
    failure = caught(optimizer.step)
    state.close()
    return *answers, failure


def dtypes(rank, world):
    """Parameters of every dtype, some of odd strides, in one optimizer."""
    generator = torch.Generator().manual_seed(3)

    def make(*shape, dtype):
        return torch.randn(*shape, generator=generator, dtype=dtype)

    values = [
        make(300, dtype=torch.float32).to(torch.bfloat16),
        make(20, 30, dtype=torch.float32).half(),
        make(7, dtype=torch.float64),
        make(5, 6, dtype=torch.float32).t(),
        make(2, 3, 4, 5, dtype=torch.float32).to(memory_format=torch.channels_last),
        make(9, dtype=torch.complex64),
        torch.empty(0),
        torch.tensor(2.0),
    ]
    params = [torch.nn.Parameter(v) for v in values]
    own = torch.Generator().manual_seed(100 + rank)
    optimizer = AdasumOptimizer(torch.optim.SGD(params, lr=0.3), bucket_bytes=1000)
    twin = Twin(params, torch.optim.SGD, {"lr": 0.3})
    seen = []
    for _ in range(2):
        for p in params:
            g = torch.randn(p.shape, generator=own, dtype=torch.float64)
            p.grad = g.to(p.dtype)
        start = copies(params)
        changes = twin.step(params)
        optimizer.step()
        seen.append((start, changes, copies(params)))
    strides = [p.stride() for p in params] == [v.stride() for v in values]
    optimizer.close()
    return seen, strides


def windows(rank, world):
    """Three local steps to a combination, and LBFGS with a closure."""
    params = list(make_net().parameters())
    optimizer = AdasumOptimizer(
        torch.optim.Adam(params, 0.01), combine_every=3, bucket_bytes=SMALL
    )
    own = [p.detach().clone().requires_grad_() for p in params]
    twin = torch.optim.Adam(own, 0.01)
    seen = []
    for window in range(2):
        start = copies(params)
        for a, b in zip(own, params, strict=True):
            a.data.copy_(b.data)
        for step in range(3 * window, 3 * window + 3):
            assert optimizer.adasum_state.step == window
            backward(params, rank, step)
            backward(own, rank, step)
            twin.step()
            optimizer.step()
        changes = [a.detach() - b for a, b in zip(own, start, strict=True)]
        seen.append((start, changes, copies(params)))
    optimizer.close()
    return seen


def closures(rank, world):
    """LBFGS, which needs a closure and everything at once."""
    net = make_net()
    params = list(net.parameters())
    options = {"lr": 0.05, "max_iter": 3, "history_size": 4}
    optimizer = AdasumOptimizer(torch.optim.LBFGS(params, **options), whole=True)
    other = copy.deepcopy(net)
    own = list(other.parameters())
    twin = torch.optim.LBFGS(own, **options)
    seen, losses = [], []
    for step in range(2):

        def closure(net=net, step=step):
            net.zero_grad()
            loss = net(batch(rank, step)).square().mean()
            loss.backward()
            return loss

        start = copies(params)
        for a, b in zip(own, params, strict=True):
            a.data.copy_(b.data)
        twin.step(lambda step=step: closure(other, step))
        changes = [
            a.detach() - b for a, b in zip(other.parameters(), start, strict=True)
        ]
        losses.append(float(optimizer.step(closure).detach()))
        seen.append((start, changes, copies(params)))
    optimizer.close()
    return seen, losses


def convolutions(rank, world):
    """Horovod's test: two 1x1 convolutions, SGD 0.1, one large input."""
    torch.manual_seed(2)
    nets = [torch.nn.Conv2d(1, 1, 1) for _ in range(2)]
    params = [p for net in nets for p in net.parameters()]
    generator = torch.Generator().manual_seed(rank)
    x = torch.rand(1, 1, 1000, 1000, generator=generator)
    optimizer = AdasumOptimizer(torch.optim.SGD(params, lr=0.1))
    start = copies(params)
    sum(net(x).mean() for net in nets).backward()
    local = [-0.1 * p.grad for p in params]
    optimizer.step()
    optimizer.close()
    return [(start, local, copies(params))]


def accumulation(rank, world):
    """Four micro-batches before a step, and one batch of all four."""
    ends = []
    for together in (False, True):
        net = make_net()
        params = list(net.parameters())
        optimizer = AdasumOptimizer(torch.optim.Adam(params, 0.01))
        parts = [batch(rank, step) for step in range(4)]
        for part in [torch.cat(parts)] if together else parts:
            loss_of(net, part).backward()
        optimizer.step()
        ends.append((copies(params), optimizer.adasum_state.step))
        optimizer.close()
    return ends


def missing_gradients(rank, world):
    """One layer on odd ranks only, one nowhere, one frozen later with momentum."""
    params = list(make_net().parameters())
    frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    options = {"lr": 0.01, "momentum": 0.9}
    optimizer = AdasumOptimizer(torch.optim.SGD([*params, frozen], **options))
    twin = Twin(params, torch.optim.SGD, options)
    seen = []
    for step in range(3):
        backward(params, rank, step)
        params[0].grad = params[0].grad if rank % 2 else None
        params[1].grad = None
        if step == 1:
            params[2].requires_grad_(False)
        grads = [p.grad for p in params]
        start = copies(params)
        changes = twin.step(params)
        optimizer.step()
        assert all(p.grad is g for p, g in zip(params, grads, strict=True))
        seen.append((start, changes, copies(params)))
    assert torch.equal(frozen, torch.ones(3))
    assert len(optimizer._layout.layers) == len(params)
    optimizer.close()
    return seen


def one_rank_has_the_bits_of_the_wrapped_optimizer(rank, world):
    """Groups of one rank each: nothing is combined."""
    group = dist.new_subgroups(1)[0]
    same = {}
    for name, (kind, options) in KINDS.items():
        params, plain = (list(make_net().parameters()) for _ in range(2))
        optimizer = AdasumOptimizer(kind(params, **options), group, bucket_bytes=SMALL)
        other = kind(plain, **options)
        for step in range(5):
            backward(params, rank, step)
            backward(plain, rank, step)
            optimizer.step()
            other.step()
        optimizer.consolidate_state()
        same[name] = all(map(torch.equal, params, plain))
        assert optimizer.state_dict()["consolidated"]
        optimizer.close()
    return same
