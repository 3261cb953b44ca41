# SPDX-License-Identifier: Apache-2.0
"""Bad input of the Python engines: refused at construction or entry, with figures."""

from __future__ import annotations

import pytest
import torch
from helpers.reversible_models import (
    ENGINES,
    Rotation,
    blocks_of,
    couplings,
    loss_of,
    mlp,
    streams_of,
)
from torch import nn

from torch_sm3.reversible import (
    AdditiveCoupling,
    AffineCoupling,
    Block,
    GroupCoupling,
    HalfResidual,
    MomentumCoupling,
    ReversibleSequence,
    Select,
    Split,
    inverse,
    is_recomputing,
)

engines = pytest.mark.parametrize("engine", ENGINES)
both_modes = pytest.mark.parametrize("grad", [True, False])


def call(seq, *stack, grad=True, **side):
    with torch.set_grad_enabled(grad):
        return seq(*stack, **side)


@both_modes
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_odd_sizes(grad, dim):
    x = torch.randn(3, 7)
    seq = couplings(1, split_dim=dim)
    size = x.shape[dim]
    with pytest.raises(ValueError, match=rf"{dim}, but got {size} of shape \(3, 7\)"):
        call(seq, x, grad=grad)
    with pytest.raises(ValueError, match=r"ReversibleSequence: .* even size"):
        inverse(seq, x)
    seq = ReversibleSequence(couplings(1)[0], Select([1, 0]), Split(dim))
    x = torch.randn(3, 7)
    seq[0].F = seq[0].G = nn.Linear(7, 7)
    with pytest.raises(ValueError, match=r"Split of block 2: .* of shape \(3, 7\)"):
        call(seq, x, x, grad=grad)


@both_modes
def test_wrong_numbers_of_streams(grad):
    x = torch.randn(2, 8)
    for seq, count in (
        (couplings(2), 2),
        (couplings(2, split_dim=-1), 2),
        (ReversibleSequence(Select([2, 0, 1])), 3),
        (ReversibleSequence(GroupCoupling(*[nn.Identity()] * 4)), 4),
    ):
        with pytest.raises(TypeError, match=rf"at least {count} streams, but got 0"):
            call(seq, grad=grad)
        with pytest.raises(TypeError, match=rf"at least {count} streams"):
            inverse(seq)
    with pytest.raises(TypeError, match=r"at least 3 streams, but got 2"):
        call(ReversibleSequence(Rotation()), x, x, grad=grad)


@engines
@both_modes
@pytest.mark.parametrize("value", [torch.zeros(2, 8), (), None, [torch.zeros(2, 8)]])
def test_aux_outputs_that_are_missing(engine, grad, value):
    class Returns(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return value

    seq = ReversibleSequence(
        blocks_of("half", 1)[0], HalfResidual(Returns(), has_aux=True), engine=engine
    )
    x = torch.randn(2, 8)
    name = type(value).__name__
    text = rf"F of block 1 to return a tuple .* but got {name} \(argument 'has_aux'\)"
    with pytest.raises(TypeError, match=text):
        call(seq, x, x, grad=grad)


@engines
@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        ((torch.zeros(2, 8),), TypeError, "scale and shift, but got 1"),
        ([torch.zeros(2, 8)] * 2, TypeError, "scale and shift, but got list"),
        (torch.zeros(2, 15), ValueError, r"even last size, but got shape \(2, 15\)"),
        (torch.zeros(()), ValueError, r"even last size, but got shape \(\)"),
        (torch.zeros(2, 8), ValueError, r"return shape \(2, 8\), but got \(2, 4\)"),
        ((torch.zeros(2, 8), torch.zeros(2)), ValueError, r"but got \(2,\)"),
        ((torch.zeros(2, 8), None), TypeError, "return a tensor, but got NoneType"),
    ],
)
def test_scale_and_shift_of_wrong_kinds(engine, value, error, text):
    class Returns(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return value

    block = AffineCoupling(nn.Linear(8, 16), Returns())
    x = torch.randn(2, 8)
    for grad in (True, False):
        with pytest.raises(error, match=rf"F of block 0 .*{text}"):
            call(ReversibleSequence(block, engine=engine), x, x, grad=grad)


@engines
@pytest.mark.parametrize("kind", ["additive", "momentum", "ring", "half"])
def test_no_half_broadcasts(engine, kind):
    class Narrow(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 1)

        def forward(self, x):
            return self.linear(x)

    make = {
        "additive": lambda f: AdditiveCoupling(f, f),
        "momentum": MomentumCoupling,
        "ring": lambda f: GroupCoupling(f, f, f),
        "half": HalfResidual,
    }[kind]
    seq = ReversibleSequence(make(Narrow()), engine=engine)
    x = streams_of(seq, 2)
    with pytest.raises(ValueError, match=r"block 0 .*\(2, 8\), but got \(2, 1\)"):
        seq(*x)


@engines
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.parametrize("exact", ["none", "grid", "sidecar"])
def test_layouts_that_are_not_dense(engine, exact):
    seq, x = couplings(1, engine=engine, exact=exact), torch.randn(2, 8)
    nested = torch.nested.nested_tensor([x, x], layout=torch.jagged)
    for other in (x.to_sparse(), x.to_sparse_csr(), nested):
        with pytest.raises(NotImplementedError, match="dense streams"):
            seq(other, x)
        with pytest.raises(NotImplementedError, match="dense streams"):
            seq(x, other)


@engines
@pytest.mark.parametrize("exact", ["grid", "sidecar"])
def test_complex_streams_of_exact_modes(engine, exact):
    seq = couplings(1, lambda: nn.Linear(8, 8), engine=engine, exact=exact)
    x = torch.randn(2, 8, dtype=torch.complex64)
    with pytest.raises(TypeError, match=rf"'{exact}', but got torch.complex64"):
        seq(x, x)


@engines
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_streams_of_a_grid(engine, dtype):
    seq = couplings(1, engine=engine, exact="grid").to(dtype)
    x = torch.randn(2, 8, dtype=dtype)
    with pytest.raises(TypeError, match=rf"float32 or float64 .* but got {dtype}"):
        seq(x, x)


@pytest.mark.parametrize("kind", ["affine", "momentum", "custom"])
def test_blocks_that_a_grid_does_not_serve(kind):
    blocks = [*blocks_of("additive", 1), blocks_of(kind, 1)[0]]
    name = type(blocks[1]).__name__
    with pytest.raises(ValueError, match=rf"but got {name} at 1 \(argument 'exact'\)"):
        ReversibleSequence(*blocks, exact="grid")


def test_low_precision_counts_what_is_rebuilt():
    x = torch.randn(2, 8, dtype=torch.bfloat16)
    blocks = [block.bfloat16() for block in blocks_of("half", 5)]
    with pytest.raises(ValueError, match=r"at most 4 .* but got 5; .*'allow_drift'"):
        ReversibleSequence(*blocks)(x, x)
    ReversibleSequence(*blocks, plan="checkpoint")(x, x)
    ReversibleSequence(*blocks, keep_every=3)(x, x)
    ReversibleSequence(*blocks, exact="sidecar")(x, x)
    ReversibleSequence(*blocks, plan="store")(x, x)


@pytest.mark.parametrize("clamp", [0.0, -1.0, float("nan")])
def test_clamp(clamp):
    with pytest.raises(ValueError, match=rf"{clamp} \(argument 'clamp'\)"):
        AffineCoupling(nn.Identity(), nn.Identity(), clamp=clamp)


@pytest.mark.parametrize("gamma", [0.0, 1.0, -0.5, 2.0, float("nan")])
def test_gamma(gamma):
    with pytest.raises(ValueError, match=rf"{gamma} \(argument 'gamma'\)"):
        MomentumCoupling(nn.Identity(), gamma)


def test_functions_that_are_no_modules():
    for make, name in (
        (lambda: AffineCoupling(nn.Identity(), 3), "AffineCoupling"),
        (lambda: MomentumCoupling(3), "MomentumCoupling"),
        (lambda: GroupCoupling(nn.Identity(), 3), "GroupCoupling"),
        (lambda: HalfResidual(nn.Identity(), attention=3), "HalfResidual"),
    ):
        with pytest.raises(TypeError, match=rf"{name}: expected a module, but got int"):
            make()
    with pytest.raises(ValueError, match=r"at least 2 modules, but got 1"):
        GroupCoupling(nn.Identity())


@pytest.mark.parametrize("layer", [None, 3, nn.Linear(2, 2), [couplings(1)[0]]])
def test_layers_that_are_no_blocks(layer):
    name = type(layer).__name__
    with pytest.raises(ValueError, match=rf"layer 1 to be a Block, but got {name}"):
        ReversibleSequence(couplings(1)[0], layer)


# --- writes in place ------------------------------------------------------------


class Writes(nn.Module):
    """Writes to its input, or to its side context, or only to what it made."""

    def __init__(self, where):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.where = where

    def forward(self, x, memory=None):
        y = self.linear(x)
        target = {"input": x, "side": memory, "own": y}[self.where]
        with torch.no_grad():
            target.mul_(2)
        return y


@engines
@pytest.mark.parametrize("where", ["input", "side", "own"])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_writes_in_place(engine, where, requires_grad):
    seq = ReversibleSequence(
        *blocks_of("half", 1), HalfResidual(Writes(where)), engine=engine
    )
    x = torch.randn(2, 8)
    for _ in range(2):
        memory = torch.randn(2, 8, requires_grad=requires_grad)
        if where == "own":
            loss_of(seq(x, x, memory=memory)).backward()
            continue
        with pytest.raises(
            RuntimeError, match=r"F of block 2 to leave its inputs alone"
        ):
            seq(x, x, memory=memory)


@engines
@pytest.mark.parametrize("inplace", ["relu", "leaf"])
def test_writes_in_place_that_autograd_sees(engine, inplace):
    """The first operator of F overwrites the stream that it is given."""

    class Overwrites(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return self.linear(torch.relu_(x))

    blocks = [] if inplace == "leaf" else blocks_of("additive", 1)
    index = len(blocks)
    seq = ReversibleSequence(*blocks, HalfResidual(Overwrites()), engine=engine)
    x = streams_of(seq)
    with pytest.raises(RuntimeError, match=rf"F of block {index} to leave its inputs"):
        seq(*x)


# --- the recompute --------------------------------------------------------------


class Capricious(nn.Module):
    """Takes another way in the recompute."""

    def __init__(self, way):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.way = way

    def forward(self, x):
        y = self.linear(x)
        if not is_recomputing():
            return torch.tanh(y)
        if self.way == "more":
            return torch.tanh(torch.tanh(y))
        if self.way == "fewer":
            return y
        return torch.tanh(y.double()).float()


@pytest.mark.parametrize("way", ["more", "fewer", "dtype"])
def test_saved_tensors_that_differ_between_the_runs(way):
    seq = ReversibleSequence(
        AdditiveCoupling(mlp(), mlp()),
        AdditiveCoupling(mlp(), Capricious(way)),
        engine="graph",
    )
    with pytest.raises(RuntimeError, match=r"block 1 to save the same tensors"):
        loss_of(seq(*streams_of(seq))).backward()
    assert not is_recomputing()


@engines
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_an_error_in_the_recompute_is_the_users(engine, place):
    class Unlucky(Exception):
        pass

    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp(dropout=0.5)

        def forward(self, x):
            if is_recomputing() and fails:
                torch.rand(3)
                raise Unlucky(place)
            return self.inner(x)

    index = {"first": 0, "middle": 1, "last": 2}[place]
    halves = [mlp(dropout=0.5) for _ in range(3)]
    halves[index] = Fails()
    seq = ReversibleSequence(
        *[AdditiveCoupling(f, mlp()) for f in halves], engine=engine
    )
    fails = False
    loss_of(seq(*streams_of(seq))).backward()  # exact modes and learning run F again
    fails = True
    loss = loss_of(seq(*streams_of(seq)))
    state = torch.get_rng_state()
    with pytest.raises(Unlucky, match=place):
        loss.backward()
    assert torch.equal(torch.get_rng_state(), state) and not is_recomputing()
    fails = False
    loss_of(seq(*streams_of(seq))).backward()


@engines
def test_side_context_of_wrong_names(engine):
    class Takes(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x, memory):
            return self.linear(x) + memory

    x = torch.randn(2, 8)
    seq = ReversibleSequence(HalfResidual(Takes()), engine=engine)
    for grad in (True, False):
        with pytest.raises(TypeError, match="memory"):
            call(seq, x, x, grad=grad)
        with pytest.raises(TypeError, match="but got mask, other"):
            call(seq, x, x, grad=grad, memory=x, mask=x, other=1)
    with pytest.raises(TypeError, match="but got memory"):
        inverse(couplings(1), x, x, memory=x)


@engines
def test_custom_blocks_of_wrong_counts(engine):
    class Wrong(Block):
        n_in = n_out = 2

        def __init__(self, forward, backward):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))
            self.counts = forward, backward

        def forward(self, a, b):
            return (a * self.weight, b)[: self.counts[0]]

        def inverse(self, a, b):
            return (a / self.weight, b)[: self.counts[1]]

    x = torch.randn(2, 8)
    text = "Wrong to return a tuple of 2 items, but got 1"
    with pytest.raises(TypeError, match=text):
        ReversibleSequence(Wrong(1, 2), engine=engine)(x, x)
    y = ReversibleSequence(Wrong(2, 1), engine=engine)(x, x)
    with pytest.raises(TypeError, match=text):
        y[0].sum().backward()


@engines
def test_outputs_changed_in_place(engine):
    seq = couplings(2, engine=engine)
    x = streams_of(seq)
    for pick in (0, 1):
        y = seq(*x)
        y[pick].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss_of(y).backward()
