# SPDX-License-Identifier: Apache-2.0
"""Autocast, remembered choices, hooks, frozen weights, errors in layers, memory."""

import gc

import pytest
import torch
from helpers.memory_meter import memory_meter
from helpers.trainer_models import (
    WIDTH,
    assert_equal,
    batch,
    build,
    make,
    mlp,
    state,
    steps,
)
from torch import nn

from torch_sm3.reversible import (
    AdditiveCoupling,
    HalfResidual,
    MomentumCoupling,
    remember,
)
from torch_sm3.trainer import ReversibleTrainer, Trainer

KINDS = ["reversible", "store"]


@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 0.02}])
def test_autocast_of_the_step_is_that_of_the_store_run(options):
    found = []
    for kind in KINDS:
        made = make(kind, built=build(), **options)
        with torch.autocast("cpu", torch.bfloat16):
            found.append(steps(made))
    assert_equal(*found)
    plain = steps(make("store", built=build(), **options))
    assert not torch.equal(found[0][0], plain[0])


class Route(nn.Module):
    """Chooses by its own noise: only a remembered choice comes twice."""

    def __init__(self):
        super().__init__()
        self.experts = nn.Parameter(torch.randn(2, WIDTH))
        self.calls = 0

    def forward(self, *items):
        x = items[0]
        self.calls += 1
        choice = remember(torch.tensor(self.calls % 2))
        h = x * self.experts[choice]
        return (h, h) if len(items) == 1 else (h, items[1])


class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.route = Route()

    def forward(self, x):
        return self.route(x)[0]


class Sum(nn.Module):
    n_in = 2

    def forward(self, a, b):
        return (a * b).sum()


@pytest.mark.parametrize("strategy", ["two_pass", "host_grads"])
def test_discrete_choices_are_remembered_in_every_kind_of_layer(strategy):
    torch.manual_seed(0)
    route, half = Route(), Half()
    made = ReversibleTrainer(
        [([nn.Linear(4, WIDTH), route], [AdditiveCoupling(half, mlp(0))])],
        Sum(),
        lambda p: torch.optim.SGD(p, lr=1.0),
        clip_grad_norm=1e9,
        clip_strategy=strategy,
    )
    before = [m.experts.detach().clone() for m in (route, half.route)]
    made.one_step(torch.randn(3, 4), rng=0)
    for old, module in zip(before, (route, half.route), strict=True):
        changed = (old != module.experts).any(1).tolist()
        # The first run chose expert 1, and no other gets a gradient.
        assert changed == [False, True]


@pytest.mark.parametrize("n", [1, 2])
def test_tensor_hooks_see_each_complete_gradient_once(n):
    """They run once for a microbatch, and what they return counts."""
    found = []
    for kind in KINDS:
        blocks, loss = build()
        seen = {}

        def watch(parameter, name, seen=seen):
            def hook(grad):
                seen.setdefault(name, []).append(grad.clone())
                return grad * 0.5

            parameter.register_hook(hook)

        watch(blocks[0][0][0].weight, "tied")
        watch(blocks[0][0][0].memory.weight, "standard")
        watch(blocks[0][1][0].F.up.weight, "reversible")
        watch(loss.bias, "loss")
        made = make(kind, built=(blocks, loss), n_microbatches=n)
        found.append([*steps(made, 2), *[g for k in sorted(seen) for g in seen[k]]])
        assert all(len(grads) == 2 * n for grads in seen.values()) and len(seen) == 4
    assert_equal(*found)


@pytest.mark.parametrize("offload", ["none", "host"])
def test_frozen_weights_and_eval_mode_layers_are_left_alone(offload):
    found = []
    for kind in KINDS:
        blocks, loss = build()
        for parameter in blocks[0][1][0].parameters():
            parameter.requires_grad_(False)
        blocks[0][0][0].memory.weight.requires_grad_(False)
        blocks[1][0][0].eval()
        frozen = [p.clone() for p in blocks[0][1][0].parameters()]
        made = make(kind, built=(blocks, loss), offload=offload)
        found.append(steps(made))
        assert_equal(list(blocks[0][1][0].parameters()), frozen)
        assert int(blocks[1][0][0].norm.num_batches_tracked) == 0
        assert not blocks[1][0][0].training
    assert_equal(*found)


def test_a_gradient_is_never_needed_where_nothing_trains():
    """A mask in the stack stays without grad, as under ordinary autograd."""
    seen = []

    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x, mask):
            seen.append((x.requires_grad, mask.requires_grad))
            return x * self.w * mask

    torch.manual_seed(0)
    blocks = [
        ([], [HalfResidual(Reads(), n_context=2), AdditiveCoupling(mlp(0), mlp(0))])
    ]
    made = ReversibleTrainer(blocks, Sum(), lambda p: torch.optim.SGD(p, lr=0.1))
    made.one_step((torch.randn(3, WIDTH), torch.randn(3, WIDTH), torch.ones(3, WIDTH)))
    assert seen[-1] == (False, False)


def test_outputs_of_a_standard_layer_need_grad_as_under_autograd():
    """A float mask that it makes does not, though the layer has weights."""
    seen = []

    class Makes(nn.Linear):
        def forward(self, x):
            h = super().forward(x)
            return h, h, (x > 0).float()

    class Reads(nn.Module):
        def forward(self, x, mask):
            seen.append((x.requires_grad, mask.requires_grad))
            return x * mask

    half = HalfResidual(Reads(), n_context=2)
    made = ReversibleTrainer(
        [([Makes(WIDTH, WIDTH)], [half])], Sum(), lambda p: torch.optim.SGD(p, lr=0.1)
    )
    for _ in range(2):
        made.one_step(torch.randn(3, WIDTH))
        assert seen[-1] == (True, False)


@pytest.mark.parametrize("offload", ["none", "host"])
def test_an_error_in_a_layer_leaves_the_trainer_usable(offload):
    made = make("reversible", built=build(), offload=offload)
    twin = make("reversible", built=build(), offload=offload)
    torch.manual_seed(0)
    before, generator = state(made), torch.get_rng_state()
    calls = []

    def fail(*_):
        calls.append(1)
        if len(calls) == 1:
            raise KeyError("stop")

    handle = made.all_layers[1].register_forward_pre_hook(fail)
    middle = made.all_layers[1].F.up.register_forward_pre_hook(fail)
    with pytest.raises(KeyError, match="stop"):
        made.one_step(batch(0), rng=1)
    handle.remove()
    middle.remove()
    assert_equal(state(made), before)
    assert torch.equal(torch.get_rng_state(), generator)
    assert_equal(steps(made), steps(twin))


def test_a_weight_that_a_layer_does_not_own_is_refused():
    weight = nn.Parameter(torch.ones(WIDTH))

    class Closure(nn.Module):
        def forward(self, x):
            return x * weight

    block = AdditiveCoupling(Closure(), mlp(0))
    made = ReversibleTrainer([([], [block])], Sum(), lambda p: torch.optim.SGD(p))
    with pytest.raises(RuntimeError, match=r"layer 0 .*one of shape \(8,\)"):
        made.one_step((torch.randn(3, WIDTH), torch.randn(3, WIDTH)))


def test_side_context_that_a_layer_changes_is_refused():
    class Named(nn.Module):
        def forward(self, x, other):
            return x * other

    blocks = [([], [AdditiveCoupling(Named(), nn.Identity())])]
    made = Trainer.from_blocks(
        blocks, Sum(), lambda p: torch.optim.SGD(p), side={"other": -1}
    )
    with pytest.raises(ValueError, match="'other' to be an item that no reversible"):
        made.one_step((torch.randn(3, WIDTH), torch.randn(3, WIDTH)))
    made = Trainer.from_blocks(
        blocks, Sum(), lambda p: torch.optim.SGD(p), side={"other": -9}
    )
    with pytest.raises(ValueError, match="a stack of at least 9 items"):
        made.one_step((torch.randn(3, WIDTH), torch.randn(3, WIDTH)))


@pytest.mark.parametrize(
    ("options", "n"),
    [
        ({}, 200),
        ({"offload": "host", "clip_grad_norm": 0.01, "n_microbatches": 2}, 40),
        ({"clip_grad_norm": 0.01, "clip_strategy": "host_grads"}, 40),
    ],
)
def test_live_bytes_do_not_grow(options, n):
    """With Python's cycle collector off: nothing hangs on a cycle."""
    made = make("reversible", built=build(), **options)
    data = batch(0)
    for i in range(2):
        made.one_step(data, rng=i)
    gc.collect()
    gc.disable()
    try:
        with memory_meter() as read:
            for i in range(n):
                made.one_step(data, rng=i)
    finally:
        gc.enable()
    assert read.live == 0


def test_peak_does_not_grow_with_depth():
    """Deeper by weights alone: activations are those of one layer."""
    peaks = []
    for depth in (4, 16):
        torch.manual_seed(0)
        layers = [AdditiveCoupling(mlp(0), mlp(0)) for _ in range(depth)]
        made = ReversibleTrainer(
            [([], layers)], Sum(), lambda p: torch.optim.SGD(p, lr=0.1)
        )
        x = torch.randn(512, WIDTH), torch.randn(512, WIDTH)
        made.one_step(x, rng=0)
        gc.collect()
        with memory_meter() as read:
            made.one_step(x, rng=1)
        peaks.append(read.peak)
    # A generator state for each layer that is run is all that is added.
    assert peaks[1] - peaks[0] < 12 * 12_000


def test_streams_beyond_the_grid_are_kept_and_counted():
    torch.manual_seed(0)

    def made(cls):
        torch.manual_seed(0)
        layers = [AdditiveCoupling(mlp(0), mlp(0)) for _ in range(2)]
        return cls(
            [([], layers)], Sum(), lambda p: torch.optim.SGD(p, lr=1e-3), exact="grid"
        )

    one, other = made(ReversibleTrainer), made(Trainer.from_blocks)
    x = torch.randn(3, WIDTH)
    assert_equal([one.one_step((x, x), rng=0)[0]], [other.one_step((x, x), rng=0)[0]])
    assert one.overflows == {}
    big = torch.full((3, WIDTH), 1e4).addcmul(x, x)
    for trainer in (one, other):
        trainer.one_step((big, x), rng=0)
    assert one.overflows == {"layer 0 (AdditiveCoupling)": 1,
                             "layer 1 (AdditiveCoupling)": 1}  # fmt: skip
    assert_equal(state(one), state(other))


def test_streams_of_low_precision_need_an_exact_mode():
    def made(depth, exact):
        layers = [AdditiveCoupling(mlp(0), mlp(0)) for _ in range(depth)]
        for layer in layers:
            layer.bfloat16()
        return ReversibleTrainer(
            [([], layers)], Sum(), lambda p: torch.optim.SGD(p, lr=0.1), exact=exact
        )

    x = torch.randn(3, WIDTH).bfloat16()
    with pytest.raises(ValueError, match="at most 4 reversible blocks on"):
        made(5, "none").one_step((x, x))
    made(4, "none").one_step((x, x))
    made(5, "sidecar").one_step((x, x))
    with pytest.raises(TypeError, match="float32 or float64 streams for exact='grid'"):
        made(2, "grid").one_step((x, x))


def test_a_grid_needs_additive_layers_and_momentum_a_warning():
    layers = [MomentumCoupling(mlp(0), gamma=0.1) for _ in range(9)]

    def made(exact):
        return ReversibleTrainer(
            [([], layers)], Sum(), lambda p: torch.optim.SGD(p, lr=0.1), exact=exact
        )

    with pytest.raises(ValueError, match="additive blocks for exact='grid'"):
        made("grid")
    with pytest.warns(RuntimeWarning, match="multiplies rounding errors"):
        made("none")
