# SPDX-License-Identifier: Apache-2.0
"""Exact modes of functions whose bits hang on grad mode or strides."""

from __future__ import annotations

import pytest
import torch
from helpers.reversible_models import (
    ENGINES,
    Rotation,
    assert_exact,
    couplings,
    mlp,
    step,
    streams_of,
)
from torch import nn

from torch_sm3.reversible import (
    AdditiveCoupling,
    Block,
    ConcatenatePair,
    HalfResidual,
    ReversibleSequence,
    Select,
    Split,
)

engines = pytest.mark.parametrize("engine", ENGINES)
modes = pytest.mark.parametrize("exact", ["grid", "sidecar"])


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
