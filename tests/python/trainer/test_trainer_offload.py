# SPDX-License-Identifier: Apache-2.0
"""Offloading, memory that gradients must not share, and the scale's agreement."""

import pytest
import torch
from helpers.trainer_models import (
    WIDTH,
    adamw,
    assert_equal,
    batch,
    build,
    make,
    sm3,
    state,
    steps,
)
from torch import Tensor, nn

from torch_sm3.reversible import AdditiveCoupling, HalfResidual
from torch_sm3.trainer import ReversibleTrainer, Trainer, _passes
from torch_sm3.trainer._defragment import defragment
from torch_sm3.trainer._offload import Carrier
from torch_sm3.trainer._reduce import Pending
from torch_sm3.trainer._scale import Scale


def homes(trainer):
    """Where weights and slots lie; step counts stay where they are anyhow."""
    found = [p for layer in trainer._layers for p in layer.parameters]
    for optimizer in trainer.optimizers:
        for values in optimizer.state.values():
            found += [v for k, v in values.items() if isinstance(v, Tensor)]
    return {id(t): t.data_ptr() for t in found}


@pytest.mark.parametrize("optimizer", [sm3, adamw])
@pytest.mark.parametrize(
    "options", [{}, {"clip_grad_norm": 0.1}, {"n_async_layers": 4}]
)
def test_after_a_step_all_is_home(optimizer, options):
    made = make(
        "reversible", built=build(), optimizer=optimizer, offload="host", **options
    )
    before = homes(made)
    steps(made, 1)
    with_slots = homes(made)
    assert with_slots.items() >= before.items()
    steps(made, 2)
    assert homes(made) == with_slots
    made.eval_step(batch(0))
    assert homes(made) == with_slots
    assert not made._plan.place._guests and not made._plan.place._ahead


def test_weights_are_away_while_other_layers_run():
    """At a layer only it and those that are fetched ahead are on the device."""
    made = make("reversible", built=build(tied=False), offload="host")
    rest = {id(p): p.data_ptr() for la in made._layers for p in la.parameters}
    seen = []

    def look(module, _):
        away = {
            layer.index
            for layer in made._layers
            if layer.parameters
            and all(p.data_ptr() == rest[id(p)] for p in layer.parameters)
        }
        seen.append(len(made._layers) - 1 - len(away))

    handles = [
        m.register_forward_pre_hook(look)
        for layer in made._layers
        for m in layer.module.modules()
        if isinstance(m, nn.Linear)
    ]
    made.one_step(batch(0), rng=0)
    for handle in handles:
        handle.remove()
    # The layer, one ahead, and one whose copies home are under way.
    assert seen and max(seen) <= 3


class Shift(nn.Module):
    """The gradient of its weight is its cotangent itself, not a copy."""

    def __init__(self, shape):
        super().__init__()
        self.shift = nn.Parameter(torch.randn(shape))

    def forward(self, x):
        return x + self.shift


class Sum(nn.Module):
    n_in = 2

    def forward(self, a, b):
        return (a * b).sum()


class Streams(nn.Linear):
    def forward(self, x):
        h = super().forward(x)
        return h, h


@pytest.mark.parametrize(
    "options",
    [
        {"n_microbatches": 2},
        {"clip_grad_norm": 0.1},
        {"clip_grad_norm": 0.1, "clip_strategy": "host_grads"},
    ],
)
def test_gradients_do_not_share_memory_with_cotangents(options):
    """They are added to and scaled in place."""

    def made(cls):
        torch.manual_seed(0)
        shape = (4 // options.get("n_microbatches", 1), WIDTH)
        layers = [AdditiveCoupling(Shift(shape), Shift(shape)) for _ in range(3)]
        return cls(
            [([Streams(WIDTH, WIDTH), Stack(shape)], layers)],
            Sum(),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            exact="sidecar",
            **options,
        )

    trainers = [made(cls) for cls in (ReversibleTrainer, Trainer.from_blocks)]
    x = torch.randn(4, WIDTH)
    for step in range(3):
        assert_equal(*([t.one_step(x, rng=step)[0]] for t in trainers))
    assert_equal(*(state(t) for t in trainers))


class WithAux(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        h = self.inner(x)
        return h, h.mean()


class Biased(nn.Module):
    """Its bias and the aux output get one and the same gradient tensor."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, a, b, aux):
        return (a * b).mean() * 0.0 + (aux + self.bias)


@pytest.mark.parametrize("strategy", ["two_pass", "host_grads"])
def test_gradients_do_not_share_memory_with_those_of_aux_outputs(strategy):
    found = []
    for cls in (ReversibleTrainer, Trainer.from_blocks):
        torch.manual_seed(0)
        block = HalfResidual(WithAux(), has_aux=True)
        made = cls(
            [([Streams(4, WIDTH)], [block])],
            Biased(),
            lambda p: torch.optim.SGD(p, lr=0.1),
            exact="sidecar",
            clip_grad_norm=0.1,
            clip_strategy=strategy,
            grad_scaler=torch.amp.GradScaler("cpu", init_scale=4.0),
        )
        made.one_step(torch.randn(3, 4), rng=0)
        found.append(state(made))
    assert_equal(*found)


class Stack(nn.Module):
    n_in = 2

    def __init__(self, shape):
        super().__init__()
        self.first = Shift(shape)
        self.second = Shift(shape)

    def forward(self, a, b):
        return self.first(a), self.second(b)


def test_defragmenting_moves_what_is_ours_and_keeps_sharing():
    mine, theirs = torch.arange(6.0), torch.arange(4.0)
    view, alias = mine[2:4], theirs[1:]
    before = [t.data_ptr() for t in (mine, view, theirs, alias)]
    values = [t.clone() for t in (mine, view, theirs, alias)]
    cpu = torch.device("cpu")
    defragment(cpu, [mine, view, mine, theirs, alias, None, 3], [theirs])
    after = [t.data_ptr() for t in (mine, view, theirs, alias)]
    assert after[2:] == before[2:] and after[0] != before[0]
    assert_equal([mine, view, theirs, alias], values)
    mine[2] = 9.0
    assert view[0] == 9.0


def test_one_ranks_flag_is_everyones():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scale = Scale(scaler, torch.device("cpu"))
    grad = torch.full((3,), 16.0)
    scale.unscale([grad])
    assert grad.tolist() == [2.0] * 3
    assert scale.finish(lambda flag: flag + 1) is True
    assert scaler.get_scale() == 4.0
    scale = Scale(scaler, torch.device("cpu"))
    assert scale.finish(lambda flag: flag) is False
    assert scaler.get_scale() == 4.0
    off = Scale(torch.amp.GradScaler("cpu", enabled=False), torch.device("cpu"))
    assert not off.is_on and off.finish(lambda flag: flag + 1) is False


class SpyReducer:
    """Looks like two ranks, and notes when a reduction begins and when it is needed."""

    size, rank = 2, 0

    def __init__(self, events):
        self.events = events

    def start(self, parameters, grads):
        place = len(self.events)
        self.events.append(("start", id(parameters[0])))

        def wait():
            self.events.append(("wait", self.events[place][1]))
            return grads

        return Pending(wait)

    def mean(self, value):
        return value

    any = mean


@pytest.mark.parametrize("n_async", [0, 1, 2])
def test_reductions_overlap_the_reversal_of_the_layers_below(n_async):
    events = []
    made = make("reversible", built=build(tied=False), n_async_layers=n_async)
    made._reducer = SpyReducer(events)
    names = {id(la.owned[0]): la.index for la in made._layers if la.owned}
    for layer in made._layers[1:]:
        for module in layer.module.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(
                    lambda *_, index=layer.index: events.append(("run", index))
                )
    made.one_step(batch(0), rng=0)
    order = [(kind, names.get(key, key)) for kind, key in events]
    order = order[order.index(("start", 8)) :]
    alive, most = 0, 0
    for kind, _ in order:
        alive += {"start": 1, "wait": -1, "run": 0}[kind]
        most = max(most, alive)
    # One more than may wait exists for a moment: it has just begun.
    assert alive == 0 and most == n_async + 1
    between = order[order.index(("start", 7)) : order.index(("wait", 7))]
    assert (("run", 6) in between) == (n_async > 0)


class Event:
    """The end of a copy of a carrier."""

    def __init__(self, carrier, count):
        self.carrier, self.count = carrier, count

    def synchronize(self):
        while self.carrier.done < self.count:
            self.carrier.queue[self.carrier.done]()
            self.carrier.done += 1


class LateCarrier(Carrier):
    """Copies as late as a device's stream may: in order, when somebody waits.

    What is read without waiting is NaN, and what is written too early comes home.
    """

    def __init__(self, device):
        super().__init__(device)
        self.queue, self.done = [], 0

    def later(self, copy):
        self.queue.append(copy)
        return Event(self, len(self.queue))

    def to_device(self, host):
        copy = torch.full_like(host, torch.nan if host.is_floating_point() else -1)
        return copy, self.later(lambda: copy.copy_(host))

    def to_host(self, source, host):
        source = source.detach()
        return self.later(lambda: host.copy_(source))

    def wait(self, event):
        if event is not None:
            event.synchronize()


@pytest.mark.parametrize("n_prefetch", [0, 1, 3])
@pytest.mark.parametrize("n_async", [0, 1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"n_microbatches": 2},
        {"clip_grad_norm": 0.05},
        {"clip_grad_norm": 0.05, "clip_strategy": "host_grads"},
    ],
)
def test_every_copy_is_waited_for(options, n_prefetch, n_async, monkeypatch):
    made = make(
        "reversible",
        built=build(),
        offload="host",
        n_prefetch_layers=n_prefetch,
        n_async_layers=n_async,
        **options,
    )
    carrier = LateCarrier(torch.device("cpu"))
    made._plan.place._carrier = carrier
    monkeypatch.setattr(_passes, "Carrier", LateCarrier)
    found = steps(made)
    assert carrier.done == len(carrier.queue) > 100
    assert_equal(found, steps(make("store", built=build(), **options)))
