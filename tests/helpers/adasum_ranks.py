# SPDX-License-Identifier: Apache-2.0
"""What each rank runs in the tests of Adasum over Gloo; results go to the parent."""

from __future__ import annotations

import copy
import io
import os
import pickle
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import torch_sm3

SHORT = timedelta(seconds=4)


class Net(torch.nn.Module):
    """A small model with layers of many sizes, one used on odd ranks only."""

    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Linear(16, 200),
            torch.nn.ReLU(),
            torch.nn.Linear(200, 150),
            torch.nn.Tanh(),
            torch.nn.Linear(150, 7, bias=False),
        )
        self.sometimes = torch.nn.Linear(7, 7)
        self.never = torch.nn.Linear(3, 3)

    def forward(self, x, extra=False):
        y = self.body(x)
        return self.sometimes(y) if extra else y


def make_net():
    torch.manual_seed(11)
    net = Net()
    del net.never, net.sometimes
    net.forward = net.body.forward
    return net


def batch(rank, step=0):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 16, generator=generator)


def loss_of(model, *args, **kwargs):
    return model(*args, **kwargs).square().sum()


def grads(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def wrap(net, state=None, hook=torch_sm3.adasum_hook, **options):
    state = torch_sm3.AdasumState() if state is None else state
    model = DistributedDataParallel(net, **options)
    model.register_comm_hook(state, hook)
    return model, state


def ddp_options(rank, world):
    """Gradients of several iterations under every mode of DDP, and the local ones."""
    net = make_net()
    loss_of(net, batch(rank)).backward()
    local = grads(net)
    runs = {}
    for options in (
        {},
        {"bucket_cap_mb": 0.05},
        {"bucket_cap_mb": 1},
        {"bucket_cap_mb": 1000, "gradient_as_bucket_view": True},
        {"find_unused_parameters": True, "bucket_cap_mb": 0.02},
        {"static_graph": True, "bucket_cap_mb": 0.05},
        {"static_graph": True, "gradient_as_bucket_view": True},
    ):
        model, state = wrap(make_net(), **options)
        runs[str(options)] = []
        for _ in range(4):
            model.zero_grad()
            loss_of(model, batch(rank)).backward()
            runs[str(options)].append(grads(model))
        assert state.step == 4
        state.close()
    return local, runs


def accumulation(rank, world):
    """Two micro-batches under no_sync, and Adasum of their sum."""
    net = make_net()
    for step in (1, 2):
        loss_of(net, batch(rank, step)).backward()
    model, state = wrap(make_net(), bucket_cap_mb=0.05)
    with model.no_sync():
        loss_of(model, batch(rank, 1)).backward()
    loss_of(model, batch(rank, 2)).backward()
    state.close()
    return grads(net), grads(model)


def unused(rank, world):
    """A layer that only odd ranks use, and one that nobody uses."""
    torch.manual_seed(5)
    net = Net()
    model, state = wrap(copy.deepcopy(net), find_unused_parameters=True)
    loss_of(net, batch(rank), extra=rank % 2 == 1).backward()
    for _ in range(2):
        model.zero_grad()
        loss_of(model, batch(rank), extra=rank % 2 == 1).backward()
    state.close()
    return grads(net), grads(model)


class TwoHeads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.used, self.ignored = (torch.nn.Linear(16, 16) for _ in "abc")

    def forward(self, x):
        y = self.body(x)
        return self.used(y), self.ignored(y)


def ignored_output(rank, world):
    """A static graph with an output that takes no part in the loss."""
    torch.manual_seed(6)
    net = TwoHeads()
    model, state = wrap(copy.deepcopy(net), static_graph=True)
    net(batch(rank))[0].square().sum().backward()
    # In the next iteration DDP leaves its last bucket open, with or without a hook.
    model(batch(rank))[0].square().sum().backward()
    state.close()
    return grads(net), grads(model)


def held_lock(rank, world):
    """Many small calls progress while this thread never lets go of the interpreter."""
    state = torch_sm3.AdasumState()
    torch_sm3.adasum_all_reduce(torch.ones(3), state=state)
    dist.barrier()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    futures = [
        torch_sm3.adasum_all_reduce(torch.ones(10), state=state, async_op=True)
        for _ in range(50)
    ]
    done = False
    end = time.monotonic() + 60
    while not done and time.monotonic() < end:
        done = all(future.done() for future in futures)
    sys.setswitchinterval(before)
    state.close()
    return done


def options_of_state(rank, world):
    """The other modes, scale, and compression around the hook."""
    net = make_net()
    loss_of(net, batch(rank)).backward()
    results = {}
    for mode, scale in (("psum", 1.0), ("mean", 1.0), ("sum", 1.0), ("tree", 0.5)):
        model, state = wrap(make_net(), torch_sm3.AdasumState(mode=mode, scale=scale))
        loss_of(model, batch(rank)).backward()
        results[mode, scale] = grads(model)
        state.close()
    hook = default_hooks.fp16_compress_wrapper(torch_sm3.adasum_hook)
    model, state = wrap(make_net(), hook=hook)
    loss_of(model, batch(rank)).backward()
    results["fp16", 1.0] = grads(model)
    state.close()
    return grads(net), results


def train(model, optimizer, rank, steps):
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, batch(rank, step)).backward()
        optimizer.step()


def resume(rank, world):
    """A hundred steps in one go, and with a checkpoint in the middle."""
    straight, state = wrap(make_net(), bucket_cap_mb=0.05)
    optimizer = torch.optim.SGD(straight.parameters(), lr=1e-5, momentum=0.9)
    train(straight, optimizer, rank, range(100))
    state.close()

    model, state = wrap(make_net(), bucket_cap_mb=0.05)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9)
    train(model, optimizer, rank, range(50))
    file = io.BytesIO()
    torch.save(
        {
            "model": model.module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "state": state.state_dict(),
            "pickle": pickle.dumps(state),
        },
        file,
    )
    state.close()
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    ends = []
    for state in (torch_sm3.AdasumState(), pickle.loads(saved["pickle"])):
        state.load_state_dict(saved["state"])
        net = make_net()
        net.load_state_dict(saved["model"])
        model, state = wrap(net, state, bucket_cap_mb=0.05)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9)
        optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
        train(model, optimizer, rank, range(50, 100))
        assert state.step == 100
        ends.append([p.detach().clone() for p in net.parameters()])
        state.close()
    return [p.detach().clone() for p in straight.parameters()], *ends


def all_reduce(rank, world):
    """Lists of mixed dtypes and strides, async, the two operators."""
    generator = torch.Generator().manual_seed(rank)
    tensors = [
        torch.randn(10, generator=generator),
        torch.randn(6, 5, generator=generator).t(),
        torch.randn(9, generator=generator).double()[::2],
        torch.empty(0),
        torch.randn(4, 4, generator=generator).to(torch.bfloat16),
        torch.randn(3, generator=generator),
    ]
    before = [t.clone() for t in tensors]
    results = {}

    def again():
        for tensor, start in zip(tensors, before, strict=True):
            tensor.copy_(start)

    assert torch_sm3.adasum_all_reduce(tensors) is None
    results["sync"] = [t.clone() for t in tensors]
    again()
    future = torch_sm3.adasum_all_reduce(tensors, async_op=True)
    assert future.wait() is tensors
    results["async"] = [t.clone() for t in tensors]
    again()
    op = torch.ops.torch_sm3.adasum_all_reduce_
    op.default(tensors, dist.group.WORLD.group_name)
    results["by name"] = [t.clone() for t in tensors]
    again()
    op.process_group(tensors, dist.group.WORLD.boxed())
    results["by group"] = [t.clone() for t in tensors]
    again()
    state = torch_sm3.AdasumState()
    for tensor in tensors:
        torch_sm3.adasum_all_reduce(tensor, state=state)
    results["by state"] = [t.clone() for t in tensors]
    state.close()
    return before, results


def life_of_a_state(rank, world):
    """Close, use after close, rebind, two states at once, subgroups."""
    model, state = wrap(make_net())
    other, other_state = wrap(make_net(), bucket_cap_mb=0.05)
    losses = loss_of(model, batch(rank)), loss_of(other, batch(rank))
    for loss in reversed(losses):
        loss.backward()
    same = all(map(torch.equal, grads(model), grads(other)))
    other_state.close()
    other_state.close()
    messages = []
    try:
        loss_of(other, batch(rank)).backward()
    except RuntimeError as error:
        messages.append(str(error))
    state.rebind()
    first = grads(model)
    model.zero_grad()
    loss_of(model, batch(rank)).backward()
    same = same and all(map(torch.equal, grads(model), first))
    state.close()

    members = [0, world - 1]
    group = dist.new_group(sorted(set(members)))
    try:
        small = torch_sm3.AdasumState(group)
        value = torch.tensor([1.0 + rank])
        torch_sm3.adasum_all_reduce(value, state=small)
        loaded = pickle.loads(pickle.dumps(small))
        small.close()
        try:
            torch_sm3.adasum_all_reduce(value, state=loaded)
        except RuntimeError as error:
            messages.append(str(error))
        loaded.rebind(group)
        torch_sm3.adasum_all_reduce(value, state=loaded)
        loaded.close()
        return same, messages, float(value)
    except ValueError as error:
        return same, messages, str(error)


def windows(rank, world):
    """A call larger than the scratch memory of one window."""
    leaf = torch.arange(5_000_000, dtype=torch.float32) % 1000
    tensors = [leaf.clone(), (rank + 1) * leaf, leaf.clone(), torch.ones(3)]
    torch_sm3.adasum_all_reduce(tensors)
    return (
        torch.equal(tensors[0], leaf),
        torch.equal(tensors[1], leaf * (world + 1) / 2),
        torch.equal(tensors[2], leaf),
    )


def everything(rank, world):
    """Run all of the above in one set of processes."""
    return {
        function.__name__: function(rank, world)
        for function in (
            ddp_options,
            accumulation,
            unused,
            ignored_output,
            held_lock,
            options_of_state,
            resume,
            all_reduce,
            life_of_a_state,
            windows,
        )
    }


def caught(call):
    """Return what ``call`` raises and the seconds it took."""
    start = time.monotonic()
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "nothing", "", time.monotonic() - start


def lose_a_peer(rank, world, how):
    """The last rank fails during training; the others get an error."""
    model, state = wrap(
        make_net(), torch_sm3.AdasumState(timeout=SHORT), bucket_cap_mb=0.05
    )
    # DDP rebuilds its buckets, over its own group, after the first iteration.
    for _ in range(2):
        loss_of(model, batch(rank)).backward()
    pid = torch.tensor(os.getpid() if rank == world - 1 else 0)
    dist.all_reduce(pid)
    if rank == world - 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(12)  # silent: alive, but never calls
        return None
    failure = caught(lambda: loss_of(model, batch(rank)).backward())
    value = torch.ones(3)
    again = caught(lambda: torch_sm3.adasum_all_reduce(value, state=state))
    closing = caught(state.close)
    if how == "stopped" and rank == 0:
        os.kill(int(pid), signal.SIGKILL)
    return failure, again, closing


def disagree(rank, world):
    """Ranks with different layouts, dtypes and options; then one good call."""
    one = torch.ones(6)
    calls = [
        lambda: torch_sm3.adasum_all_reduce(torch.ones(6 + rank % 2)),
        lambda: torch_sm3.adasum_all_reduce([one[: 2 + rank % 2], one[3:]]),
        lambda: torch_sm3.adasum_all_reduce(
            torch.ones(6, dtype=torch.float32 if rank % 2 else torch.float64)
        ),
        lambda: torch_sm3.adasum_all_reduce(one, scale=1.0 + rank % 2),
        lambda: torch_sm3.adasum_all_reduce(one, mode="sum" if rank % 2 else "psum"),
    ]
    failures = [caught(call) for call in calls]
    good = torch.full((3,), float(rank + 1))
    torch_sm3.adasum_all_reduce(good)

    torch.manual_seed(0)
    net = torch.nn.Linear(4, 4 + rank % 2)
    state = torch_sm3.AdasumState(timeout=SHORT)
    bucket = FakeBucket(list(net.parameters()))
    hook = torch_sm3.adasum_hook
    failures.append(caught(lambda: hook(state, bucket).wait()))
    failures.append(caught(lambda: hook(state, bucket).wait()))
    state.close()
    return failures, good


class FakeBucket:
    """What the hook reads of a dist.GradBucket; DDP itself refuses such models."""

    def __init__(self, parameters):
        self._parameters = parameters

    def buffer(self):
        return torch.cat([p.detach().flatten() for p in self._parameters])

    def parameters(self):
        return self._parameters

    def index(self):
        return 0

    def is_last(self):
        return True


def close_while_waiting(rank, world):
    """Rank 0 closes its state while it waits for a rank that never calls."""
    state = torch_sm3.AdasumState()
    outcome = None
    if rank == 0:
        first = torch_sm3.adasum_all_reduce(torch.ones(3), state=state, async_op=True)
        second = torch_sm3.adasum_all_reduce(torch.ones(3), state=state, async_op=True)
        time.sleep(0.5)
        outcome = (caught(state.close), caught(first.wait), caught(second.wait))
    dist.barrier()
    state.close()
    return outcome


def end_in_disorder(rank, world):
    """End the process without closing, the default group destroyed first."""
    model, state = wrap(make_net())
    loss_of(model, batch(rank)).backward()
    torch_sm3.adasum_all_reduce(torch.ones(3))
    dist.destroy_process_group()
    if rank == 0:
        state.close()
    # The state of the others lives until the interpreter ends.
    globals()["kept"] = state
    return True


def default_group_comes_back(rank, world, port):
    """adasum_all_reduce after the default group was destroyed and made again."""
    values = []
    for again in (False, True):
        if again:
            dist.barrier()
            dist.destroy_process_group()
            dist.init_process_group(
                "gloo",
                init_method=f"tcp://127.0.0.1:{port}",
                rank=rank,
                world_size=world,
            )
        value = torch.tensor([1.0 + rank])
        torch_sm3.adasum_all_reduce(value)
        values.append(float(value))
    return values
