# SPDX-License-Identifier: Apache-2.0
"""What each rank runs in the tests of delta mode over Gloo, and what starts it."""

from __future__ import annotations

import functools
import os
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from helpers.adasum_delta_rule import (
    accumulation,
    closures,
    convolutions,
    dtypes,
    missing_gradients,
    modes,
    one_rank_has_the_bits_of_the_wrapped_optimizer,
    options_of_the_state,
    rule,
    windows,
)
from helpers.adasum_delta_state import (
    consolidation,
    merge_rules,
    quantised_tensors,
    resume,
    unlike_states,
)
from helpers.adasum_delta_twins import (
    SHORT,
    SMALL,
    Twin,
    backward,
    caught,
    copies,
    make_net,
)
from helpers.processes import run_ranks

from torch_sm3 import AdasumOptimizer, AdasumState


def scaling(rank, world):
    """GradScaler: the last rank meets an infinity in the second of four steps."""
    answers = {}
    for fused in (False, True):
        for unscale in (False, True):
            params = list(make_net().parameters())
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
            options = {"lr": 0.01, "fused": fused}
            optimizer = AdasumOptimizer(
                torch.optim.Adam(params, **options), grad_scaler=scaler
            )
            plain = list(make_net().parameters())
            other = AdasumOptimizer(torch.optim.Adam(plain, **options))
            scales, moved = [], []
            for step in range(4):
                scaler.scale(torch.zeros(()))
                backward(params, rank, step, scaler.get_scale())
                if step == 1 and rank == world - 1:
                    params[0].grad[0, 0] = float("inf")
                if unscale:
                    scaler.unscale_(optimizer)
                before = copies(params)
                scaler.step(optimizer)
                scaler.update()
                moved.append(not all(map(torch.equal, before, copies(params))))
                scales.append(scaler.get_scale())
                if step != 1:
                    backward(plain, rank, step)
                    other.step()
            same = all(map(torch.equal, params, plain))
            answers[fused, unscale] = (scales, moved, same, copies(params))
            optimizer.close()
            other.close()
    return answers


def scales_without_the_scaler(rank, world):
    """Without grad_scaler= ranks still skip together, but scales part."""
    params = list(make_net().parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = AdasumOptimizer(torch.optim.SGD(params, 0.01))
    scaler.scale(torch.zeros(()))
    backward(params, rank, 0, 1024.0)
    if rank == world - 1:
        params[0].grad[0, 0] = float("nan")
    before = copies(params)
    scaler.step(optimizer)
    scaler.update()
    optimizer.close()
    return all(map(torch.equal, before, params)), scaler.get_scale()


def around(rank, world):
    """Schedules, hooks, groups, zero_grad, repr, names."""
    net = make_net()
    params = list(net.parameters())
    inner = torch.optim.SGD(params[:3], lr=0.1)
    calls = []
    inner.register_step_pre_hook(lambda *_: calls.append("inner before"))
    inner.register_step_post_hook(lambda *_: calls.append("inner after"))
    optimizer = AdasumOptimizer(inner, bucket_bytes=1000)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    backward(params, rank, 0)
    optimizer.step()
    schedule.step()
    rates = [group["lr"] for group in inner.param_groups]
    optimizer.add_param_group({"params": params[3:], "lr": 0.2})
    twin = Twin(params, torch.optim.SGD, {"lr": 0.05})
    twin.optimizer = torch.optim.SGD(
        [{"params": twin.params[:3]}, {"params": twin.params[3:], "lr": 0.2}], lr=0.05
    )
    backward(params, rank, 1)
    start, changes = copies(params), twin.step(params)
    optimizer.step()
    seen = [(start, changes, copies(params))]
    optimizer.zero_grad()
    gone = all(p.grad is None for p in params)
    optimizer.close()
    return seen, calls, rates, gone, repr(optimizer)


def start_values(rank, world):
    """Unequal start values, at construction and in a new group; and their repair."""
    answers = {}
    other = {name: p for name, p in make_net().named_parameters()}
    if rank == world - 1:
        with torch.no_grad():
            other["4.weight"][0, 3] += 1e-3
    params = list(other.values())
    answers["at construction"] = caught(
        lambda: AdasumOptimizer(
            torch.optim.SGD(params, 0.1), named_parameters=other.items()
        )
    )
    optimizer = AdasumOptimizer(torch.optim.SGD(params, 0.1), broadcast=True)
    answers["repaired"] = copies(params)
    optimizer.close()

    late = torch.nn.Parameter(torch.full((3, 2), float(rank)).t())
    optimizer = AdasumOptimizer(torch.optim.SGD(params, 0.1))
    optimizer.add_param_group({"params": [late]})
    answers["new group"] = caught(optimizer.step)
    optimizer.close()

    some = params[: 2 + (rank == world - 1)]
    answers["shapes"] = caught(lambda: AdasumOptimizer(torch.optim.SGD(some, 0.1)))
    return answers


class Counting(torch.optim.SGD):
    """An optimizer that counts its steps in its groups."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1


def group_values(rank, world):
    """A step that changes a group: refused in buckets, fine as a whole."""
    params = list(make_net().parameters())
    backward(params, rank, 0)
    start = copies(params)
    optimizer = AdasumOptimizer(Counting(params, 0.1), bucket_bytes=SMALL)
    failure = caught(optimizer.step)
    untouched = all(map(torch.equal, start, params))
    grads_kept = all(p.grad is not None for p in params)
    whole = AdasumOptimizer(Counting(params, 0.1), whole=True)
    whole.step()
    count = whole.param_groups[0]["count"]
    whole.close()
    return failure, untouched and grads_kept, count


class Failing(torch.optim.SGD):
    """An optimizer whose step fails on the last rank, in its third bucket."""

    def step(self, closure=None):
        super().step(closure)
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == self.fails_in:
            raise RuntimeError("out of luck")


def local_failure(rank, world):
    """The wrapped step fails on one rank; the others get an error, not a wait."""
    answers = {}
    for whole in (False, True):
        params = list(make_net().parameters())
        inner = Failing(params, 1e-3)
        inner.fails_in = (1 if whole else 3) if rank == world - 1 else 0
        state = AdasumState(timeout=SHORT)
        optimizer = AdasumOptimizer(inner, state=state, whole=whole, bucket_bytes=SMALL)
        start = copies(params)
        backward(params, rank, 0)
        begin = time.monotonic()
        failure = caught(optimizer.step)
        taken = time.monotonic() - begin
        after = copies(params)
        dist.barrier()
        state.rebind()
        backward(params, rank, 1)
        optimizer.step()
        answers[whole] = failure, taken, start, after, copies(params)
        state.close()
    return answers


def lose_a_peer(rank, world, how):
    """The last rank dies or falls silent between two steps of the others."""
    params = list(make_net().parameters())
    state = AdasumState(timeout=timedelta(seconds=4))
    optimizer = AdasumOptimizer(
        torch.optim.Adam(params, 0.01), state=state, bucket_bytes=SMALL
    )
    backward(params, rank, 0)
    optimizer.step()
    if rank == world - 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(12)  # alive, but it never calls
        return None
    start = copies(params)
    begin = time.monotonic()
    failure = caught(optimizer.step)
    again = caught(optimizer.step)
    closing = caught(state.close)
    taken = time.monotonic() - begin
    return failure, again, closing, taken, all(map(torch.equal, start, params))


def everything(rank, world):
    """Run all of the above in one set of processes."""
    return {
        function.__name__: function(rank, world)
        for function in (
            rule,
            modes,
            options_of_the_state,
            dtypes,
            windows,
            closures,
            convolutions,
            accumulation,
            missing_gradients,
            scaling,
            scales_without_the_scaler,
            around,
            start_values,
            group_values,
            consolidation,
            quantised_tensors,
            merge_rules,
            unlike_states,
            resume,
            local_failure,
            one_rank_has_the_bits_of_the_wrapped_optimizer,
        )
    }


@functools.cache
def results(world):
    """Return what everything has returned on each rank; run once per world size."""
    return run_ranks(world, everything, timeout=400)
