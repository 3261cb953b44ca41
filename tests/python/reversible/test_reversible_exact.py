# SPDX-License-Identifier: Apache-2.0
"""Exact modes: gradients are those of the store run, bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.memory_meter import memory_meter
from helpers.reversible_models import (
    ADDITIVE,
    BLOCKS,
    ENGINES,
    Rotation,
    assert_close,
    assert_equal,
    blocks_of,
    couplings,
    loss_of,
    mlp,
    plain_run,
    step,
    streams_of,
)
from torch import nn

from torch_sm3.reversible import (
    AdditiveCoupling,
    AffineCoupling,
    Block,
    ConcatenatePair,
    HalfResidual,
    MomentumCoupling,
    ReversibleSequence,
    Select,
    Split,
    _call,
    inverse,
)
from torch_sm3.reversible._exact import Watch

engines = pytest.mark.parametrize("engine", ENGINES)
modes = pytest.mark.parametrize("exact", ["grid", "sidecar"])


def pair(blocks, engine, **options):
    """A sequence and its store run, of the same engine and blocks."""
    seq = ReversibleSequence(*blocks, engine=engine, **options)
    return seq, ReversibleSequence(*blocks, engine=engine, plan="store", **options)


def assert_exact(blocks, engine, stack, **options):
    seq, store = pair(blocks, engine, **options)
    for seed in range(2):  # the first call learns, the second knows
        got, want = step(seq, seq, stack, seed), step(store, seq, stack, seed)
        assert_equal(got[0], want[0])
        assert_equal(got[1], want[1])
    return seq, got


def low_precision(dtype):
    """Runs F in another dtype, as autocast does."""

    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp(16, 0.1)

        def forward(self, x):
            with torch.autocast("cpu", dtype):
                return self.inner(x)

    return Cast


@engines
@modes
@pytest.mark.parametrize("function", ["fp32", "bf16", "autocast"])
def test_depth_128(engine, exact, function):
    """Also equal to the plain run, where nothing sums gradients in another order."""
    width, depth, dtype = 16, 128, torch.float32
    if function == "bf16":
        if exact == "grid":
            pytest.skip("the grid has float32 and float64 streams")
        dtype = torch.bfloat16
    make = low_precision(torch.bfloat16) if function == "autocast" else mlp
    halves = [
        make() if function == "autocast" else make(width, 0.1) for _ in range(2 * depth)
    ]
    blocks = [
        AdditiveCoupling(f, g) for f, g in zip(halves[::2], halves[1::2], strict=True)
    ]
    seq, store = pair(blocks, engine, exact=exact)
    seq.to(dtype)
    x = streams_of(seq, 4, width, dtype=dtype)
    got, want = step(seq, seq, x), step(store, seq, x)
    assert_equal(got[0], want[0])
    assert_equal(got[1], want[1])
    assert all(torch.isfinite(g).all() for g in got[1])
    if engine == "graph":
        expected = step(plain_run(blocks, exact=exact), seq, x)
        assert_equal(got[1], expected[1])


@modes
def test_reversible_row_02_many_blocks_and_steps(exact):
    """110 blocks; inputs are not kept, and three optimizer steps end in equal bits."""
    models = []
    for plan in ("reversible", "store"):
        torch.manual_seed(0)
        blocks = blocks_of("additive", 110, dropout=0.1)
        models.append(ReversibleSequence(*blocks, exact=exact, plan=plan))
    for seed in range(3):
        for seq in models:
            optimizer = torch.optim.SGD(seq.parameters(), lr=1e-4)
            torch.manual_seed(seed)
            loss = loss_of(seq(torch.randn(4, 8), torch.randn(4, 8)))
            loss.backward()
            assert torch.isfinite(loss)
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(*[list(seq.parameters()) for seq in models])


@engines
@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sidecar_of_every_block_and_width(engine, kind, dtype):
    blocks = [block.to(dtype) for block in blocks_of(kind, 6, dropout=0.1)]
    seq = ReversibleSequence(*blocks)
    assert_exact(blocks, engine, streams_of(seq, dtype=dtype), exact="sidecar")


@engines
@pytest.mark.parametrize("kind", ADDITIVE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_grid_of_every_additive_block(engine, kind, dtype):
    blocks = [block.to(dtype) for block in blocks_of(kind, 6, dropout=0.1)]
    seq = ReversibleSequence(*blocks)
    assert_exact(blocks, engine, streams_of(seq, dtype=dtype), exact="grid")


@engines
def test_sidecar_of_float16(engine):
    blocks = [block.half() for block in blocks_of("additive", 6)]
    x = streams_of(ReversibleSequence(*blocks), dtype=torch.float16)
    assert_exact(blocks, engine, x, exact="sidecar")


@engines
@modes
def test_without_exactness_the_same_models_drift(engine, exact):
    """The other tests of this file could not fail if this one did."""
    blocks = blocks_of("additive", 64, 16)
    seq, store = pair(blocks, engine, exact="none")
    x = streams_of(seq, 4, 16)
    got, want = step(seq, seq, x), step(store, seq, x)
    assert not all(torch.equal(a, b) for a, b in zip(got[1], want[1], strict=True))
    assert_exact(blocks, engine, x, exact=exact)


@pytest.mark.parametrize("kind", ADDITIVE)
@pytest.mark.parametrize("bits", [0, 8, 16])
def test_the_inverse_of_a_grid_is_exact(kind, bits):
    seq = ReversibleSequence(*blocks_of(kind, 20), exact="grid", grid_bits=bits)
    x = streams_of(seq)
    back = inverse(seq, *seq(*x))
    quantised = [torch.round(t.detach() * 2.0**bits) / 2.0**bits for t in x]
    assert_equal([t.detach() for t in back], quantised)


def test_the_grid_is_the_model():
    """Streams and residuals are multiples of the grid's unit, nothing else changes."""
    f, g, bits = nn.Linear(4, 4), nn.Linear(4, 4), 6
    seq = ReversibleSequence(AdditiveCoupling(f, g), exact="grid", grid_bits=bits)

    def q(x):
        return torch.round(x.double() * 2.0**bits).float() / 2.0**bits

    x1, x2 = torch.randn(3, 4), torch.randn(3, 4)
    y1 = q(x1) + q(f(q(x2)))
    y2 = q(x2) + q(g(y1))
    assert_equal(seq(x1, x2), [y1, y2])
    with torch.no_grad():
        assert_equal(seq(x1, x2), [y1, y2])


def test_items_that_no_block_changes_stay_off_the_grid():
    seq = ReversibleSequence(HalfResidual(nn.Identity()), exact="grid", grid_bits=2)
    a, c, deep = torch.tensor([0.3]), torch.tensor([0.3]), torch.tensor([0.3])
    y = seq(a, c.requires_grad_(), deep)
    assert y[1].item() == c.item() and y[2] is deep
    assert y[0].item() == 0.5  # both are rounded to a quarter
    y[0].sum().backward()
    assert c.grad.item() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_range_of_grid_bits(dtype):
    most = {torch.float32: 23, torch.float64: 52}[dtype]
    x = torch.rand(2, 8, dtype=dtype) / 4
    for bits in (0, most):
        seq = couplings(2, exact="grid", grid_bits=bits).to(dtype)
        loss_of(seq(x, x)).backward()
    for bits in (-1, 53):
        with pytest.raises(ValueError, match=rf"grid_bits|{bits}"):
            couplings(1, exact="grid", grid_bits=bits)
    if dtype == torch.float32:
        with pytest.raises(ValueError, match="24"):
            couplings(1, exact="grid", grid_bits=24)(x, x)


# --- overflow -------------------------------------------------------------------


class Grow(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.factor = factor

    def forward(self, x):
        return self.factor * torch.tanh(self.linear(x))


def overflowing(exact, **options):
    factors = [1.0, 1e9, 1.0] if exact == "grid" else [1.0, 1e6, 1.0]
    blocks = [AdditiveCoupling(Grow(f), Grow(f)) for f in factors]
    return blocks, options | {"exact": exact}


@pytest.fixture(params=[None, 2], ids=["at once", "late"])
def lag(request, monkeypatch):
    """Read overflow flags as for a CUDA device, too."""
    if request.param is not None:
        monkeypatch.setattr(_call, "Watch", lambda: Watch(lag=request.param))
    return request.param


@engines
@modes
def test_overflow_is_stored_and_counted(engine, exact, lag):
    blocks, options = overflowing(exact)
    x = streams_of(ReversibleSequence(*blocks), 64)
    seq, _ = assert_exact(blocks, engine, x, **options)
    assert seq.stats.overflows["block 0"] == 0
    assert seq.stats.overflows["block 1"] >= 2  # two calls
    before = dict(seq.stats.overflows)
    step(seq, seq, x)
    assert {k: 3 * v // 2 for k, v in before.items()} == dict(seq.stats.overflows)


@engines
@modes
def test_overflow_raises(engine, exact, lag):
    blocks, options = overflowing(exact, overflow="raise")
    seq = ReversibleSequence(*blocks, engine=engine, **options)
    x = streams_of(seq, 64)
    with pytest.raises(OverflowError, match=rf"block 1 .*exact='{exact}'.*'overflow'"):
        seq(*x)
    assert_close(
        [y.detach() for y in ReversibleSequence(blocks[0], **options)(*x)],
        [y.detach() for y in ReversibleSequence(blocks[0], exact=exact)(*x)],
        0,
    )


@engines
@modes
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_streams_that_are_not_finite(engine, exact, bad, lag):
    blocks = [AdditiveCoupling(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(3)]
    seq, store = pair(blocks, engine, exact=exact)
    x = streams_of(seq, requires_grad=False)
    x[0][1, 2] = bad
    got, want = step(seq, seq, x), step(store, seq, x)
    for a, b in zip(got[1], want[1], strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
    if exact == "grid":
        assert seq.stats.overflows["block 0"] > 0


@engines
def test_special_values_in_a_sidecar(engine):
    """Signs of zeros and denormals come back; so does what an infinity swallowed."""
    found = []

    class Keep(nn.Module):
        def __init__(self, by):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(by))

        def forward(self, x):
            found.append(x.detach().clone())
            return self.scale * torch.ones_like(x)

    blocks = [AdditiveCoupling(Keep(3e38), Keep(1.0)) for _ in range(3)]
    seq = ReversibleSequence(*blocks, engine=engine, exact="sidecar")
    values = [0.0, -0.0, 1e-45, -1e-40, 3e38, -3e38, float("inf"), float("nan")]
    x = [torch.tensor(values).repeat(8).requires_grad_() for _ in range(2)]
    seq(*x)  # the first call probes
    found.clear()
    y = seq(*x)
    first = list(found)
    found.clear()
    torch.autograd.backward(y, [torch.ones_like(t) for t in y])
    if engine == "graph":  # F saved nothing that depends on its input
        return
    for a, b in zip(first, reversed(found), strict=True):
        assert torch.equal(a.view(torch.int32), b.view(torch.int32))


def test_checkpointed_blocks_need_no_sidecar():
    blocks = blocks_of("additive", 4, 64)
    x = torch.randn(64, 64)
    kept = []
    for exact in ("none", "sidecar"):
        seq = ReversibleSequence(*blocks, exact=exact, plan="checkpoint")
        loss_of(seq(x, x)).backward()
        with memory_meter() as meter:
            y = seq(x, x)
        kept.append(meter.live)
        del y
    assert kept[0] == kept[1]


# --- grad mode ------------------------------------------------------------------


class Sensitive(nn.Module):
    """Rounds otherwise when no gradient is wanted, as fused inference kernels do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        return y if torch.is_grad_enabled() else y + 1e-3


def sensitive(kind):
    if kind == "custom":
        rotation = Rotation()
        rotation.angle = Sensitive()
        return [rotation, Select([2, 0, 1])]
    if kind == "half":
        return [HalfResidual(Sensitive()), Select([1, 0])]
    return [AdditiveCoupling(Sensitive(), mlp())]


@engines
@modes
@pytest.mark.parametrize("kind", ["additive", "half", "custom"])
def test_function_whose_bits_hang_on_grad_mode(engine, exact, kind):
    if (exact, kind) == ("grid", "custom"):
        pytest.skip("the grid has additive blocks only")
    blocks = [b for _ in range(4) for b in sensitive(kind)]
    x = streams_of(ReversibleSequence(*blocks))
    seq, _ = assert_exact(blocks, engine, x, exact=exact)
    learned = seq[0]._steps()[0].learned
    assert learned.grad_matters is (True if engine == "node" else None)
    # Runs that only move the stack, because no gradient arrives, see the same bits.
    store = ReversibleSequence(*blocks, exact=exact, engine=engine, plan="store")
    for pick in range(seq.n_out):
        got, want = step(seq, seq, x, pick=[pick]), step(store, seq, x, pick=[pick])
        for a, b in zip(got[1], want[1], strict=True):
            assert a is None or b is None or torch.equal(a, b)


def test_what_a_call_without_exactness_learned_is_not_enough():
    blocks = sensitive("additive")
    x = streams_of(ReversibleSequence(*blocks))
    step(ReversibleSequence(*blocks), nn.ModuleList(blocks), x)
    assert blocks[0]._steps()[0].learned.grad_matters is None
    assert_exact(blocks, "node", x, exact="sidecar")
    assert blocks[0]._steps()[0].learned.grad_matters is True


def test_functions_that_do_not_mind_run_without_grad():
    seq, seen = couplings(2, exact="sidecar"), []
    x = streams_of(seq)
    step(seq, seq, x)
    seq[0].F[1].register_forward_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    step(seq, seq, x)
    assert seen == [False, True]
    assert [s.learned.grad_matters for s in seq[0]._steps()] == [False, False]


@engines
def test_function_that_differentiates_inside(engine):
    class Force(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            with torch.enable_grad():
                leaf = x if x.requires_grad else x.detach().requires_grad_()
                energy = torch.exp(torch.tanh(self.linear(leaf))).sum()
                (force,) = torch.autograd.grad(energy, leaf, create_graph=True)
            return force

    blocks = [AdditiveCoupling(Force(), mlp()) for _ in range(3)]
    x = streams_of(ReversibleSequence(*blocks))
    assert_exact(blocks, engine, x, exact="grid")


# --- layouts --------------------------------------------------------------------


class SumOfRows(nn.Module):
    """A reduction, whose order follows the strides of its input."""

    def __init__(self, width=16):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width))

    def forward(self, x):
        return torch.tanh(self.scale * x + x.sum(0) / 64 - (x * x).mean(0))


LAYOUTS = {
    "transposed": lambda: torch.randn(16, 512).t(),
    "slice": lambda: torch.randn(512, 32)[:, 7:23],
    "steps": lambda: torch.randn(512, 32)[:, ::2],
    "expanded": lambda: torch.randn(1, 16).expand(512, 16),
}


@engines
@modes
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_inputs(engine, exact, layout):
    blocks = [AdditiveCoupling(SumOfRows(), SumOfRows()) for _ in range(6)]
    make = LAYOUTS[layout]
    assert_exact(blocks, engine, [make(), make()], exact=exact)


class Mix(Block):
    """A custom block whose inverse returns another layout."""

    n_in = n_out = 2

    def __init__(self):
        super().__init__()
        self.function = SumOfRows()

    def forward(self, a, b):
        return a + self.function(b), b

    def inverse(self, a, b):
        return (a - self.function(b)).t().contiguous().t(), b


@engines
def test_custom_inverse_of_another_layout(engine):
    blocks = [b for _ in range(4) for b in (Mix(), Select([1, 0]))]
    x = [torch.randn(512, 16), torch.randn(512, 16)]
    assert_exact(blocks, engine, x, exact="sidecar")


@engines
@modes
def test_layouts_around_utilities(engine, exact):
    """Parts of a joined tensor are strided views of it, in the recompute too."""
    blocks = [
        AdditiveCoupling(SumOfRows(1), SumOfRows(1)),
        ConcatenatePair(),
        Select([0, 1]),
        Split(-1),
        AdditiveCoupling(SumOfRows(1), SumOfRows(1)),
        ConcatenatePair(),
        Split(-1),
        AdditiveCoupling(SumOfRows(1), SumOfRows(1)),
    ]
    x = [torch.randn(512, 1), torch.randn(512, 1)]
    assert_exact(blocks, engine, x, exact=exact)


@engines
@modes
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,)])
def test_streams_of_no_size(engine, exact, shape):
    blocks = [AdditiveCoupling(Keep(), Keep()) for _ in range(3)]
    x = [torch.randn(shape, requires_grad=True) for _ in range(2)]
    assert_exact(blocks, engine, x, exact=exact)


class Keep(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(()))

    def forward(self, x):
        return torch.tanh(self.scale * x)


@engines
@modes
def test_streams_of_two_dtypes(engine, exact):
    """Each keeps its own; the functions change it."""

    class Change(nn.Module):
        def __init__(self, dtype):
            super().__init__()
            self.linear = nn.Linear(8, 8, dtype=dtype)

        def forward(self, x):
            return torch.tanh(self.linear(x))

    single, double = torch.float32, torch.float64
    blocks = [AdditiveCoupling(Change(double), Change(single)) for _ in range(4)]
    x = [
        torch.randn(4, 8, dtype=dtype, requires_grad=True) for dtype in (single, double)
    ]
    _, (outputs, _) = assert_exact(blocks, engine, x, exact=exact)
    assert [y.dtype for y in outputs] == [single, double]


# --- side context, remaining options --------------------------------------------


class Attend(nn.Module):
    """Reads its input and the memory once each."""

    def __init__(self):
        super().__init__()
        self.inner = mlp()

    def forward(self, x, memory):
        return self.inner(x + memory)


@engines
@modes
def test_side_context_in_exact_modes(engine, exact):
    blocks = [AdditiveCoupling(Attend(), Attend()) for _ in range(8)]
    seq, store = pair(blocks, engine, exact=exact)
    x, memory = streams_of(seq), torch.randn(4, 8, requires_grad=True)
    got = step(seq, seq, x, memory=memory)
    want = step(store, seq, x, memory=memory)
    plain = step(plain_run(blocks, exact=exact), seq, x, memory=memory)
    assert_equal(got[1], want[1])
    # F reads each of them through one op, so the plain run has the same sums.
    assert_equal(got[1], plain[1])


@engines
@modes
def test_tied_blocks(engine, exact):
    shared = AdditiveCoupling(mlp(dropout=0.2), mlp(dropout=0.2))
    blocks = [shared] * 4
    assert_exact(blocks, engine, streams_of(ReversibleSequence(shared)), exact=exact)


@modes
def test_retained_graph_in_exact_modes(exact):
    seq = couplings(6, lambda: mlp(dropout=0.3), exact=exact)
    x = streams_of(seq)
    loss = loss_of(seq(*x))
    weights = [*x, *seq.parameters()]
    one = torch.autograd.grad(loss, weights, retain_graph=True)
    two = torch.autograd.grad(loss, weights)
    assert_equal(one, two)


@modes
def test_copies_and_slices_keep_the_mode(exact):
    seq = couplings(4, exact=exact)
    assert seq[1:3].exact == exact and copy.deepcopy(seq).exact == exact


# --- memory ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("additive", torch.float32),
        ("additive", torch.bfloat16),
        ("ring", torch.float32),
        ("momentum", torch.float32),
        ("affine", torch.float32),
    ],
)
def test_bits_of_a_sidecar(kind, dtype):
    """What 16 more blocks keep, for each element that they change."""
    width, rows, live = 64, 128, {}
    blocks = [block.to(dtype) for block in blocks_of(kind, 20, width)]
    per_block = len(BLOCKS[kind](width)[0]._steps())
    x = streams_of(
        ReversibleSequence(*blocks), rows, width, dtype=dtype, requires_grad=False
    )
    for depth in (4, 20):
        seq = ReversibleSequence(*blocks[:depth], exact="sidecar")
        step(seq, seq, x)
        with memory_meter() as meter:
            y = seq(*x)
        live[depth] = meter.live
        del y
        assert not seq.stats.overflows
    elements = 16 * per_block * rows * width
    assert 8 * (live[20] - live[4]) / elements <= 3.25


def test_a_grid_keeps_nothing():
    live, x = {}, torch.randn(64, 8)
    for depth in (4, 20):
        seq = couplings(depth, exact="grid")
        loss_of(seq(x, x)).backward()
        with memory_meter() as meter:
            y = seq(x, x)
        live[depth] = meter.live
        del y
    assert live[4] == live[20]


def test_affine_and_momentum_at_depth_128():
    for make in (
        lambda: AffineCoupling(small_wide(), small_wide()),
        lambda: MomentumCoupling(mlp(), 0.7),
    ):
        blocks = [make() for _ in range(128)]
        x = streams_of(ReversibleSequence(*blocks, exact="sidecar"))
        seq, store = pair(blocks, "node", exact="sidecar")
        assert_equal(step(seq, seq, x)[1], step(store, seq, x)[1])


def small_wide():
    layer = nn.Linear(8, 16)
    with torch.no_grad():
        layer.weight.mul_(0.05)
    return layer
