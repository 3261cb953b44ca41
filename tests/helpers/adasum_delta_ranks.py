# SPDX-License-Identifier: Apache-2.0
"""What each rank runs in the tests of delta mode over Gloo; answers go to the parent.

A *twin* steps beside the optimizer under test: the same kind of optimizer, on a copy of
the parameters, given the same gradients, and never combined. What it does from the
common start is the leaf that the parent puts into the oracle.
"""

from __future__ import annotations

import copy
import io
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from torch_sm3 import SM3, AdasumOptimizer, AdasumState

SHORT = timedelta(seconds=20)
# Cuts the net of the tests, of 34,450 weights, into four buckets.
SMALL = 13_000

KINDS = {
    "SGD": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "foreach": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "foreach": False}),
    "SM3": (SM3, {"lr": 0.1}),
    "SM3 momentum": (SM3, {"lr": 0.1, "momentum": 0.9, "foreach": True}),
    "SM3 int8": (
        SM3,
        {"lr": 0.1, "momentum": 0.9, "momentum_dtype": torch.int8, "beta2": 0.9},
    ),
}


def make_net():
    torch.manual_seed(11)
    return torch.nn.Sequential(
        torch.nn.Linear(16, 200),
        torch.nn.ReLU(),
        torch.nn.Linear(200, 150),
        torch.nn.Tanh(),
        torch.nn.Linear(150, 7, bias=False),
    )


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 16, generator=generator)


def loss_of(model, x):
    return model(x).square().sum()


def caught(call):
    """Return what ``call`` raises."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def copies(params):
    return [p.detach().clone() for p in params]


def backward(params, rank, step, scale=1.0):
    """Leave gradients of this rank's batch on a net's parameters."""
    net = make_net()
    for own, param in zip(net.parameters(), params, strict=True):
        own.data = param.data
    (scale * loss_of(net, batch(rank, step))).backward()
    for own, param in zip(net.parameters(), params, strict=True):
        param.grad = own.grad.to(param.dtype)


class Twin:
    """The wrapped optimizer's double."""

    def __init__(self, params, kind, options):
        self.params = [p.detach().clone().requires_grad_() for p in params]
        self.optimizer = kind(self.params, **options)

    def step(self, params):
        """Step from where ``params`` are with their gradients; return the changes."""
        for own, param in zip(self.params, params, strict=True):
            own.data.copy_(param.detach())
            own.grad = None if param.grad is None else param.grad.clone()
        self.optimizer.step()
        return [
            (a.detach().to(torch.promote_types(a.dtype, torch.float32))) - b.detach()
            for a, b in zip(self.params, params, strict=True)
        ]


def follow(params, optimizer, twin, rank, steps):
    """Return for each step the start, this rank's changes, and the end."""
    seen = []
    for step in steps:
        backward(params, rank, step)
        start = copies(params)
        changes = twin.step(params)
        optimizer.step()
        seen.append((start, changes, copies(params)))
    return seen


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


def states_of(optimizer):
    """Return a copy of the state, in the order of the parameters."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [
        {k: v.clone() for k, v in optimizer.state.get(p, {}).items()} for p in params
    ]


def consolidation(rank, world):
    """The state of several optimizers before and after."""
    answers = {}
    kinds = ("SM3", "SM3 momentum", "SM3 int8", "Adam", "AdamW", "RMSprop", "SGD")
    for name in kinds:
        kind, options = KINDS[name]
        params = list(make_net().parameters())
        optimizer = AdasumOptimizer(kind(params, **options))
        said = [optimizer.state_dict()["consolidated"]]
        for step in range(3):
            backward(params, rank, step)
            params[2].grad = params[2].grad if rank == 0 or step == 2 else None
            # Only the first rank ever has a gradient of this one.
            params[3].grad = params[3].grad if rank == 0 else None
            optimizer.step()
        said.append(optimizer.state_dict()["consolidated"])
        before = states_of(optimizer)
        optimizer.consolidate_state()
        said.append(optimizer.state_dict()["consolidated"])
        after = states_of(optimizer)
        backward(params, rank, 3)
        optimizer.step()
        said.append(optimizer.state_dict()["consolidated"])
        optimizer.close()
        answers[name] = before, after, said
    return answers


def merge_rules(rank, world):
    """Keys that nobody knows, with and without a rule."""
    answers = []
    for merge in (None, {"mu_product": "keep"}, {"mu_product": "mean", "step": "keep"}):
        params = [torch.nn.Parameter(torch.ones(4))]
        optimizer = AdasumOptimizer(torch.optim.NAdam(params), merge=merge)
        for _ in range(rank + 1):
            params[0].grad = torch.full((4,), float(rank + 1))
            optimizer._wrapped.step()
        before = states_of(optimizer)
        failure = caught(optimizer.consolidate_state)
        answers.append((failure, before, states_of(optimizer)))
        optimizer.close()
    return answers


def resume(rank, world):
    """Training in one go, and with a checkpoint of each rank in the middle."""
    ends = {}
    for name, last, options in (
        ("SM3 int8", 20, {}),
        ("SM3", 20, {"whole": True}),
        # Its checkpoint falls between two combinations.
        ("Adam", 100, {"combine_every": 4}),
    ):
        middle = last // 2
        kind, inner = KINDS[name]

        def make(params, kind=kind, inner=inner, options=options):
            return AdasumOptimizer(kind(params, **inner), bucket_bytes=SMALL, **options)

        def train(params, optimizer, steps):
            for step in steps:
                backward(params, rank, step)
                optimizer.step()

        straight = list(make_net().parameters())
        optimizer = make(straight)
        train(straight, optimizer, range(last))
        optimizer.close()

        params = list(make_net().parameters())
        optimizer = make(params)
        train(params, optimizer, range(middle))
        file = io.BytesIO()
        torch.save({"params": copies(params), "opt": optimizer.state_dict()}, file)
        optimizer.close()
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        # As from a fresh program: equal start values, then what was saved.
        params = list(make_net().parameters())
        optimizer = make(params)
        for param, value in zip(params, saved["params"], strict=True):
            param.data.copy_(value)
        optimizer.load_state_dict(saved["opt"])
        train(params, optimizer, range(middle, last))
        steps = optimizer.adasum_state.step
        optimizer.close()
        ends[name] = copies(straight), copies(params), steps
    return ends


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
            merge_rules,
            resume,
            local_failure,
            one_rank_has_the_bits_of_the_wrapped_optimizer,
        )
    }
