# SPDX-License-Identifier: Apache-2.0
"""Discrete choices inside functions: what ``remember`` keeps for the recompute."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.reversible_models import (
    ENGINES,
    Rotation,
    assert_close,
    assert_equal,
    mlp,
    plain_run,
    step,
    streams_of,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from torch_sm3.reversible import (
    AdditiveCoupling,
    Block,
    HalfResidual,
    LayerRun,
    ReversibleSequence,
    Select,
    inverse,
    is_recomputing,
    remember,
)

engines = pytest.mark.parametrize("engine", ENGINES)


class Experts(nn.Module):
    """Routes each row to two of four experts; scores are almost equal.

    ``disturb`` stands for the rounding errors of a rebuilt stream: as small as they
    are, they change the order.
    """

    def __init__(self, remembers=True, key=None):
        super().__init__()
        self.experts = nn.ModuleList([mlp(8, 0.1) for _ in range(4)])
        self.remembers = remembers
        self.key = key
        self.disturb = 0.0
        self.routes = []
        self.register_buffer("load", torch.zeros(4, dtype=torch.long))

    def forward(self, x):
        scores = 1 + 1e-12 * x[:, :4]
        best = (scores + self.disturb * torch.arange(4)).topk(2).indices
        if self.remembers:
            best = remember(best, self.key)
        self.routes.append(best)
        self.load += torch.bincount(best.flatten(), minlength=4)
        gates = scores.gather(1, best)
        values = torch.stack([expert(x) for expert in self.experts], 1)
        index = best[:, :, None].expand(-1, -1, x.shape[1])
        return (values.gather(1, index) * gates[:, :, None]).sum(1)


def disturbed(blocks, value):
    for block in blocks:
        for module in block.modules():
            if isinstance(module, Experts):
                module.disturb = value


def run(seq, blocks, x, seed=0):
    """Forward, then backward with streams that are rebuilt with an error."""
    torch.manual_seed(seed)
    y = seq(*x)
    disturbed(blocks, 1e-11)
    sum(t.sin().sum() for t in y).backward()
    disturbed(blocks, 0.0)
    tensors = [*x, *seq.parameters()]
    grads = [t.grad for t in tensors]
    for t in tensors:
        t.grad = None
    return grads


def routing(depth=3, **options):
    return [AdditiveCoupling(Experts(**options), mlp()) for _ in range(depth)]


@engines
@pytest.mark.parametrize("key", [None, "route"])
def test_reversible_row_20_routing_with_near_ties(engine, key):
    """Routing is the first run's, the load counter advances once in a step."""
    blocks = routing(key=key)
    twins = copy.deepcopy(blocks)
    seq = ReversibleSequence(*blocks, engine=engine, plan="remember").double()
    plain = plain_run(twins).double()
    x = streams_of(seq, 16, dtype=torch.double)
    for seed in range(2):
        got, want = run(seq, blocks, x, seed), run(plain, [], x, seed)
        assert_close(got, want, 1e-9)
        for block, twin in zip(blocks, twins, strict=True):
            first, second = block.F.routes[-2:]
            assert torch.equal(first, second)
            assert torch.equal(first, twin.F.routes[-1])
            assert torch.equal(block.F.load, twin.F.load)
            assert block.F.load.sum() == 32 * (seed + 1)


@engines
def test_without_it_the_routing_changes(engine):
    """The test above could not fail if this one did."""
    blocks = routing(1, remembers=False)
    seq = ReversibleSequence(*blocks, engine=engine).double()
    run(seq, blocks, streams_of(seq, 16, dtype=torch.double))
    first, second = blocks[0].F.routes
    assert not torch.equal(first, second)


class Several(nn.Module):
    """Remembers values of several kinds, with keys and without, in several layers."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.shift = 0.0

    def forward(self, x):
        y = self.linear(x)
        mask = remember(y + self.shift > 0)
        scale = remember(y.detach().abs().amax() + self.shift, "scale")
        best = remember((y + self.shift).argmax(-1))
        return torch.where(mask, y, 0.1 * y) / scale + y.gather(1, best[:, None])


@engines
@pytest.mark.parametrize("exact", ["none", "grid", "sidecar"])
def test_several_values_in_several_blocks(engine, exact):
    blocks = [AdditiveCoupling(Several(), Several()) for _ in range(3)]
    seq = ReversibleSequence(*blocks, engine=engine, exact=exact).double()
    x = streams_of(seq, dtype=torch.double)
    plain = plain_run(blocks, exact=exact)
    for _ in range(2):
        got, want = step(seq, seq, x), step(plain, seq, x)
        assert_equal(got[0], want[0])
        assert_close(got[1], want[1], 1e-10)


@engines
def test_several_calls_before_their_backward_passes(engine):
    block = AdditiveCoupling(Several(), Several()).double()
    seq = ReversibleSequence(block, block, engine=engine)
    xs = [streams_of(seq, dtype=torch.double) for _ in range(3)]
    losses = [sum(y.sin().sum() for y in seq(*x)) for x in xs]
    for loss in losses:
        loss.backward()
    got = [t.grad for x in xs for t in x] + [p.grad for p in seq.parameters()]
    for t in [*(t for x in xs for t in x), *seq.parameters()]:
        t.grad = None
    plain = plain_run([block, block])
    for x in xs:
        sum(y.sin().sum() for y in plain(*x)).backward()
    want = [t.grad for x in xs for t in x] + [p.grad for p in seq.parameters()]
    assert_close(got, want, 1e-11)


@engines
def test_masks_are_packed_and_saved_once(engine):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(()))

        def forward(self, x):
            return self.weight * remember(x > 0).to(x.dtype)

    seq = ReversibleSequence(
        *[AdditiveCoupling(Masked(), Masked()) for _ in range(2)], engine=engine
    )
    x, packed = streams_of(seq, 16, 8), []
    for _ in range(2):
        packed.clear()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: packed.append(t) or t, lambda t: t
        ):
            y = seq(*x)
    kinds = [(t.dtype, t.numel()) for t in packed]
    assert kinds == [(torch.uint8, 16)] * 4 + [(torch.float32, 128)] * 2
    sum(t.sum() for t in y).backward()


@engines
def test_a_value_changed_in_place_is_found(engine):
    kept = []

    class Leaky(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            y = self.linear(x)
            best = remember(y.argmax(-1))
            kept.append(best)
            return y * best[:, None]

    seq = ReversibleSequence(AdditiveCoupling(Leaky(), mlp()), engine=engine)
    y = seq(*streams_of(seq))
    kept[-1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y[0].sum().backward()


# --- checkpointed regions -------------------------------------------------------


class Region(nn.Module):
    """A region of F that checkpoint runs once more in the nested backward pass."""

    def __init__(self, key):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.key = key
        self.shift = 0.0
        self.seen = []

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)

    def inner(self, x):
        y = self.linear(x)
        best = remember((y + self.shift * torch.arange(8)).argmax(-1), self.key)
        self.seen.append(best)
        return torch.tanh(y) * best[:, None]


@engines
def test_a_keyed_value_in_a_checkpointed_region(engine):
    seq = ReversibleSequence(
        AdditiveCoupling(Region("best"), mlp()),
        AdditiveCoupling(mlp(), Region("best")),
        engine=engine,
    ).double()
    x = streams_of(seq, dtype=torch.double)
    for _ in range(2):
        got, want = step(seq, seq, x), step(plain_run(seq), seq, x)
        assert_close(got[1], want[1], 1e-11)
    region = seq[0].F
    region.seen.clear()
    y = seq(*x)
    region.shift = 100.0  # what the recompute would choose
    sum(t.sum() for t in y).backward()
    assert len(region.seen) >= 3
    assert all(torch.equal(seen, region.seen[0]) for seen in region.seen)


@engines
def test_an_unkeyed_value_in_a_checkpointed_region(engine):
    seq = ReversibleSequence(
        AdditiveCoupling(mlp(), mlp()),
        AdditiveCoupling(Region(None), mlp()),
        engine=engine,
    )
    x = streams_of(seq)
    with pytest.raises(RuntimeError, match="checkpointed region of block 1"):
        step(seq, seq, x)
    value = torch.randn(3)
    assert remember(value) is value


@engines
def test_a_checkpointed_region_outside_of_blocks(engine):
    """It runs again in the same backward pass, and remembers nothing."""
    seq = ReversibleSequence(
        AdditiveCoupling(Region("best"), Several()), engine=engine
    ).double()
    before, after = Region(None).double(), Region(None).double()
    x = torch.randn(4, 8, dtype=torch.double, requires_grad=True)
    h = before(x)
    y = seq(h, h)
    after(y[0] + y[1]).sum().backward()
    got = [x.grad, *(p.grad for p in before.parameters())]
    x.grad = None
    before.zero_grad()
    h = before(x)
    y = plain_run(seq)(h, h)
    after(y[0] + y[1]).sum().backward()
    assert_close(got, [x.grad, *(p.grad for p in before.parameters())], 1e-11)


@engines
def test_a_checkpoint_around_a_sequence(engine):
    seq = ReversibleSequence(
        AdditiveCoupling(Region("best"), Several()),
        AdditiveCoupling(Several(), Region("best")),
        engine=engine,
    ).double()
    x = streams_of(seq, dtype=torch.double)
    for _ in range(2):
        got = step(lambda *s: checkpoint(seq, *s, use_reentrant=False), seq, x)
        assert_close(got[1], step(plain_run(seq), seq, x)[1], 1e-11)


# --- counts, keys, shapes -------------------------------------------------------


class Changing(nn.Module):
    """Remembers something else in the recompute."""

    def __init__(self, change):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.change = change

    def forward(self, x):
        y = self.linear(x)
        for value, key in self.change(y, is_recomputing()):
            remember(value, key)
        return torch.tanh(y)


CHANGES = {
    "more": lambda y, again: [(y, None)] * (1 + again),
    "fewer": lambda y, again: [(y, None)] * (2 - again),
    "none": lambda y, again: [(y, None)] * (1 - again),
    "key": lambda y, again: [(y, "new" if again else "old")],
    "shape": lambda y, again: [(y[again:], None)],
    "dtype": lambda y, again: [(y.to(torch.half if again else y.dtype), None)],
}


@engines
@pytest.mark.parametrize("change", CHANGES)
def test_what_differs_between_the_runs_is_named(engine, change):
    seq = ReversibleSequence(
        AdditiveCoupling(mlp(), mlp()),
        AdditiveCoupling(mlp(), Changing(CHANGES[change])),
        engine=engine,
    )
    with pytest.raises(RuntimeError, match="block 1"):
        step(seq, seq, streams_of(seq))
    assert not is_recomputing()
    # Nothing is left behind: outside F it is an identity.
    x = torch.randn(3)
    assert remember(x) is x


# --- where it is an identity ----------------------------------------------------


def test_an_identity_outside_and_in_plain_runs():
    x = torch.randn(4, 8, requires_grad=True)
    assert remember(x) is x
    blocks = [AdditiveCoupling(Several(), Several())]
    blocks[0].F.shift = blocks[0].G.shift = 0.0
    store = ReversibleSequence(*blocks, plan="store")
    seq = ReversibleSequence(*blocks)
    want = [y.detach() for y in store(x, x)]
    with torch.no_grad():
        assert_equal(seq(x, x), want)
        back = inverse(seq, *want)
    for a in back:
        torch.testing.assert_close(a, x.detach())


def test_custom_blocks_remember_in_both_directions():
    class Routed(Rotation):
        def _turn(self, c):
            angle = self.angle(c)
            sign = remember(angle > 0).to(c.dtype) * 2 - 1
            return torch.cos(sign * angle), torch.sin(sign * angle)

    blocks = [b for _ in range(2) for b in (Routed(), Select([2, 0, 1]))]
    for engine in ENGINES:
        seq = ReversibleSequence(*blocks, engine=engine).double()
        x = streams_of(seq, dtype=torch.double)
        for _ in range(2):
            got, want = step(seq, seq, x), step(plain_run(blocks), seq, x)
            assert_close(got[1], want[1], 1e-11)


@engines
@pytest.mark.parametrize("exact", ["none", "sidecar"])
def test_an_inverse_need_not_ask_for_every_choice(engine, exact):
    class Scaled(Block):
        n_in = n_out = 1

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(8) + 1)

        def forward(self, x):
            remember((x > 0).sum())  # for a statistic, say
            sign = remember(torch.sign(self.weight.detach()), "sign")
            return (x * self.weight * sign,)

        def inverse(self, y):
            return (y / (self.weight * remember(torch.ones(8), "sign")),)

    seq = ReversibleSequence(Scaled(), Scaled(), engine=engine, exact=exact)
    x = streams_of(seq)
    got, want = step(seq, seq, x), step(plain_run(seq), seq, x)
    assert_equal(got[0], want[0])
    assert_close(got[1], want[1], 1e-5)


def test_layer_runs_remember():
    block = HalfResidual(Experts()).double()
    x = [torch.randn(16, 8, dtype=torch.double) for _ in range(2)]
    layer = LayerRun(block)
    y = layer.forward(x, {})
    assert layer.kept_bytes == 16 * 2 * 8
    disturbed([block], 1e-11)
    layer.reverse_and_grad(y, [torch.ones_like(t) for t in y])
    first, second = block.layers[0].routes
    assert torch.equal(first, second)


def test_a_sequence_inside_a_function_remembers_for_itself():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.seq = ReversibleSequence(*routing(2))

        def forward(self, x):
            a, b = self.seq(x, x)
            return remember(a > 0).to(a.dtype) * (a - b)

    for engine in ENGINES:
        blocks = [AdditiveCoupling(Inner(), mlp()) for _ in range(2)]
        seq = ReversibleSequence(*blocks, engine=engine).double()
        x = streams_of(seq, dtype=torch.double)
        got, want = step(seq, seq, x), step(plain_run(blocks), seq, x)
        assert_close(got[1], want[1], 1e-9)
