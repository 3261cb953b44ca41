# SPDX-License-Identifier: Apache-2.0
"""Every block against its formula, its inverse and the plain run, in both engines."""

from __future__ import annotations

import logging

import pytest
import torch
from helpers.reversible_models import (
    BLOCKS,
    ENGINES,
    TanhMLP,
    assert_close,
    assert_equal,
    blocks_of,
    gradients,
    loss_of,
    mlp,
    plain,
    plain_run,
    step,
    streams_of,
    wide,
)
from reference import reversible_couplings_oracle as oracle
from torch import nn

from torch_sm3.reversible import (
    AdditiveCoupling,
    AffineCoupling,
    ConcatenatePair,
    GroupCoupling,
    HalfResidual,
    MomentumCoupling,
    PrintShape,
    Reshape,
    ReversibleSequence,
    Select,
    Split,
    Swap,
    inverse,
)

engines = pytest.mark.parametrize("engine", ENGINES)


class Wide(TanhMLP):
    """The oracle's function, with values of twice the width."""

    def __init__(self, width, hidden):
        super().__init__(width, hidden)
        self.u = nn.Parameter(torch.randn(hidden, 2 * width) / hidden**0.5)


class Pair(Wide):
    """The same values as a pair."""

    def forward(self, x):
        return super().forward(x).chunk(2, -1)


def numpy_of(*tensors):
    return [t.detach().double().numpy() for t in tensors]


def weights_of(f):
    return tuple(numpy_of(f.w, f.u))


def compare(got, want, tol=1e-11):
    want = [torch.from_numpy(array) for array in want]
    assert_close([g.detach() for g in got], want, tol)


def double(*shape):
    return torch.randn(*shape, dtype=torch.double, requires_grad=True)


@engines
@pytest.mark.parametrize("make", [Wide, Pair])
@pytest.mark.parametrize("clamp", [0.5, 2.0])
def test_affine_coupling_equals_the_oracle(engine, make, clamp):
    halves = make(3, 5), make(3, 5)
    seq = ReversibleSequence(
        AffineCoupling(*halves, clamp=clamp, with_logdet=True), engine=engine
    ).double()
    x1, x2 = double(4, 3), double(4, 3)
    c1, c2, c3 = torch.randn(4, 3).double(), torch.randn(4, 3).double(), double(4)
    (y1, y2), (logdet,) = seq(x1, x2)
    torch.autograd.backward([y1, y2, logdet], [c1, c2, c3.detach()])
    f, g = (weights_of(half) for half in halves)
    a1, a2 = numpy_of(x1, x2)
    b1 = oracle.affine_half(a1, a2, f, clamp)
    b2 = oracle.affine_half(a2, b1, g, clamp)
    total = oracle.affine_half_logdet(a2, f, clamp)
    total = total + oracle.affine_half_logdet(b1, g, clamp)
    compare([y1, y2, logdet], [b1, b2, total])
    g1, g2, g3 = numpy_of(c1, c2, c3)
    old2, g2, more, grad_g = oracle.affine_half_backward(b2, b1, g2, g3, g, clamp)
    g1 = g1 + more
    old1, g1, more, grad_f = oracle.affine_half_backward(b1, old2, g1, g3, f, clamp)
    compare([x1, x2], [old1, old2])
    compare(gradients(seq, x1, x2), [g1, g2 + more, *grad_f, *grad_g])
    assert (torch.exp(logdet.detach().abs()) <= torch.e ** (2 * 3 * clamp)).all()


def test_the_logarithm_of_the_determinant_is_that_of_the_jacobian():
    block = AffineCoupling(Wide(3, 5), Wide(3, 5), with_logdet=True).double()
    x = double(1, 6)
    jacobian = torch.autograd.functional.jacobian(
        lambda x: torch.cat(block(*x.chunk(2, -1))[0], -1), x
    )
    _, logdet = block(*x.chunk(2, -1))
    torch.testing.assert_close(
        torch.linalg.slogdet(jacobian.reshape(6, 6)).logabsdet, logdet[0]
    )


@pytest.mark.parametrize("shape", [(4,), (2, 3, 4)])
def test_logdet_is_summed_over_each_example(shape):
    class Constant(nn.Module):
        def forward(self, x):
            return torch.full_like(x, 0.25), torch.zeros_like(x)

    block = AffineCoupling(Constant(), Constant(), with_logdet=True)
    _, logdet = block(torch.randn(shape), torch.randn(shape))
    each = 2 * torch.tanh(torch.tensor(0.125)) * 2
    count = torch.Size(shape[1:]).numel()
    torch.testing.assert_close(logdet, (each * count).expand(shape[0]))


@engines
@pytest.mark.parametrize("gamma", [0.1, 0.9])
def test_momentum_coupling_equals_the_oracle(engine, gamma):
    blocks = [MomentumCoupling(TanhMLP(3, 5), gamma) for _ in range(2)]
    seq = ReversibleSequence(*blocks, engine=engine).double()
    x, v = double(4, 3), double(4, 3)
    cx, cv = torch.randn(2, 4, 3, dtype=torch.double).unbind()
    outputs = seq(x, v)
    torch.autograd.backward(outputs, [cx, cv])
    a, b = numpy_of(x, v)
    fs = [weights_of(block.F) for block in blocks]
    for f in fs:
        a, b = oracle.momentum(a, b, f, gamma)
    compare(outputs, [a, b])
    ga, gb = numpy_of(cx, cv)
    weights = []
    for f in reversed(fs):
        a, b, ga, gb, found = oracle.momentum_backward(a, b, ga, gb, f, gamma)
        weights = [*found, *weights]
    compare([x, v], [a, b], 1e-9)
    compare(gradients(seq, x, v), [ga, gb, *weights], 1e-9)


@engines
@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_ring_of_streams_equals_the_oracle(engine, n):
    block = GroupCoupling(*[TanhMLP(3, 5) for _ in range(n)])
    seq = ReversibleSequence(block, engine=engine).double()
    x = [double(4, 3) for _ in range(n)]
    cotangents = [torch.randn(4, 3, dtype=torch.double) for _ in range(n)]
    outputs = seq(*x)
    torch.autograd.backward(outputs, cotangents)
    fs = [weights_of(f) for f in block.Fs]
    y = oracle.ring(numpy_of(*x), fs)
    compare(outputs, y)
    old, grads, weights = oracle.ring_backward(y, numpy_of(*cotangents), fs)
    compare(x, old)
    compare(gradients(seq, *x), [*grads, *(a for pair in weights for a in pair)])
    compare(inverse(seq, *outputs), old)


@engines
@pytest.mark.parametrize("kind", BLOCKS)
def test_gradients_equal_the_plain_run(engine, kind):
    blocks = blocks_of(kind, 4, dropout=0.3)
    seq = ReversibleSequence(*blocks, engine=engine).double()
    x = streams_of(seq, dtype=torch.double)
    got, grads = step(seq, seq, x)
    want, expected = step(plain_run(blocks), seq, x)
    assert_equal(got, want)
    assert_close(grads, expected, 1e-10)
    assert all(grad is not None for grad in grads)


@pytest.mark.parametrize("kind", BLOCKS)
def test_round_trip(kind):
    seq = ReversibleSequence(*blocks_of(kind, 3)).double()
    x = streams_of(seq, dtype=torch.double)
    back = inverse(seq, *seq(*x))
    for a, b in zip(back, x, strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=1e-9, atol=1e-9)
    block = seq[0]
    y = block(*x[: block.n_in])
    again = block.inverse(*y)
    assert_close([a.detach() for a in again], [b.detach() for b in x], 1e-10)
    # The inverse is ordinary differentiable code.
    loss_of(again).backward()
    assert any(p.grad is not None for p in seq.parameters())


@engines
@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_of_one_input_alone(engine, kind, frozen):
    """What nothing else needs the gradient of is still reached through the block."""
    blocks = blocks_of(kind, 2)
    seq = ReversibleSequence(*blocks, engine=engine).double()
    seq.requires_grad_(not frozen)
    for i in range(seq.n_in):
        x = streams_of(seq, dtype=torch.double, requires_grad=False)
        x[i].requires_grad_()
        _, grads = step(seq, seq, x)
        _, expected = step(plain_run(blocks), seq, x)
        assert grads[i] is not None
        assert_close(grads, expected, 1e-10)


@engines
@pytest.mark.parametrize("kind", BLOCKS)
def test_one_output_used(engine, kind):
    blocks = blocks_of(kind, 2)
    seq = ReversibleSequence(*blocks, engine=engine).double()
    x = streams_of(seq, dtype=torch.double)
    for i in range(seq.n_out):
        _, grads = step(seq, seq, x, pick=[i])
        _, expected = step(plain_run(blocks), seq, x, pick=[i])
        # A node that runs for another output gives zeros where plain gives None.
        for j, (got, want) in enumerate(zip(grads, expected, strict=True)):
            if want is None and got is not None:
                assert kind in ("custom", "once") and not got.any()
                grads[j] = None
        assert_close(grads, expected, 1e-10)


# --- gradcheck ------------------------------------------------------------------


def small(kind):
    """Blocks of small smooth functions, for numerical differentiation."""
    torch.manual_seed(3)
    made = {
        "additive": lambda: AdditiveCoupling(TanhMLP(2, 3), TanhMLP(2, 3)),
        "affine": lambda: AffineCoupling(Pair(2, 3), Wide(2, 3)),
        "momentum": lambda: MomentumCoupling(TanhMLP(2, 3), 0.6),
        "ring": lambda: GroupCoupling(*[TanhMLP(2, 3) for _ in range(3)]),
        "half": lambda: HalfResidual(TanhMLP(2, 3)),
    }
    if kind in made:
        blocks = [made[kind](), made[kind]()]
    else:
        blocks = BLOCKS[kind](2)
        blocks[0].angle = TanhMLP(2, 3)
    return [block.double() for block in blocks]


def with_weights(seq):
    """A function of streams and weights, and small values for all of them."""
    names = [name for name, _ in seq.named_parameters()]
    values = [p.detach().clone().requires_grad_() for p in seq.parameters()]
    x = streams_of(seq, 2, 2, dtype=torch.double)

    def call(*tensors):
        streams, weights = tensors[: seq.n_in], tensors[seq.n_in :]
        for name, value in zip(names, weights, strict=True):
            owner, _, last = name.rpartition(".")
            module = seq.get_submodule(owner)
            # A plain attribute: the replaced weights of nn.DataParallel look so.
            module._parameters.pop(last, None)
            setattr(module, last, value)
        return seq(*streams)

    return call, [*x, *values]


KINDS = [*BLOCKS]


@engines
@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(engine, kind):
    seq = ReversibleSequence(*small(kind), engine=engine)
    call, tensors = with_weights(seq)
    assert torch.autograd.gradcheck(call, tensors)


@pytest.mark.parametrize("kind", KINDS)
def test_reversible_row_19_gradgradcheck(kind):
    seq = ReversibleSequence(*small(kind)[:1], engine="graph", double_backward=True)
    call, tensors = with_weights(seq)
    assert torch.autograd.gradgradcheck(call, tensors, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_reversible_row_19_gradient_penalty(kind):
    """``double_backward`` alone makes ``auto`` choose the graph engine."""
    blocks = blocks_of(kind, 2)
    seq = ReversibleSequence(*blocks, double_backward=True).double()
    x = streams_of(seq, dtype=torch.double)
    results = []
    for run in (seq, plain_run(blocks)):
        grads = torch.autograd.grad(loss_of(run(*x)), x, create_graph=True)
        sum(g.square().sum() for g in grads).backward()
        results.append([*grads, *gradients(seq, *x)])
    assert_close(*results, 1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_reversible_row_19_the_node_engine_refuses(kind):
    seq = ReversibleSequence(*blocks_of(kind, 1), engine="node").double()
    x = streams_of(seq, dtype=torch.double)
    with pytest.raises(NotImplementedError, match="double_backward=True"):
        torch.autograd.grad(loss_of(seq(*x)), x, create_graph=True)


# --- half-residuals -------------------------------------------------------------


class Product(nn.Module):
    """Takes several items and returns a tuple for the next layer."""

    def __init__(self, n):
        super().__init__()
        self.scales = nn.Parameter(torch.linspace(0.5, 1.5, n))

    def forward(self, *items):
        parts = [s * x for s, x in zip(self.scales, items, strict=True)]
        return sum(parts), parts[0] * parts[-1]


class Join(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, left, right):
        return torch.tanh(self.linear(left)) * right


@engines
@pytest.mark.parametrize("n_context", [1, 2, 3])
def test_several_layers_and_contexts(engine, n_context):
    block = HalfResidual(
        Product(n_context), Join(), nn.Dropout(0.3), n_context=n_context
    )
    assert block.n_in == block.n_out == 1 + n_context
    order = [*range(1, 1 + n_context), 0]
    blocks = [b for _ in range(3) for b in (block, Select(order))]
    seq = ReversibleSequence(*blocks, engine=engine).double()
    x = streams_of(seq, dtype=torch.double)
    got, grads = step(seq, seq, x)
    want, expected = step(plain_run(blocks), seq, x)
    assert_equal(got, want)
    assert_close(grads, expected, 1e-10)


class Routed(nn.Module):
    """Has aux outputs of every kind."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        h = torch.tanh(self.linear(x))
        return h, {"norm": h.square().mean(-1), "best": h.argmax(-1)}, (None, h * x), 3


@engines
def test_aux_outputs_of_every_kind(engine):
    blocks = [
        b for _ in range(2) for b in (HalfResidual(Routed(), has_aux=True), Swap())
    ]
    seq = ReversibleSequence(*blocks, engine=engine).double()
    x = streams_of(seq, dtype=torch.double)

    def run(module):
        outputs, aux = module(*x)
        assert len(aux) == 2
        (named, (nothing, product), number) = aux[1]
        assert nothing is None and number == 3 and named["best"].dtype == torch.int64
        parts = [a for m, (_, p), _ in aux for a in (m["norm"], p)]
        loss_of([*outputs, *parts]).backward()
        return [*outputs, named["best"], product, *gradients(seq, *x)]

    for _ in range(2):  # the first call learns, the second knows
        assert_close(run(seq), run(plain_run(blocks)), 1e-11)


@engines
@pytest.mark.parametrize("which", [0, 1])
def test_a_loss_on_an_aux_output_alone(engine, which):
    blocks = [
        b for _ in range(2) for b in (HalfResidual(Routed(), has_aux=True), Swap())
    ]
    seq = ReversibleSequence(*blocks, engine=engine).double()
    x = streams_of(seq, dtype=torch.double)

    def run(module):
        _, aux = module(*x)
        aux[which][0]["norm"].sin().sum().backward()
        return gradients(seq, *x)

    got, want = run(seq), run(plain_run(blocks))
    assert_close(got, want, 1e-11)
    # The other block's function is not reached by the first one's aux output.
    assert sum(grad is None for grad in want[2:]) == (2 if which == 0 else 0)


@engines
def test_an_aux_output_that_is_an_input(engine):
    class Passed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return self.linear(x), x, x

    seq = ReversibleSequence(HalfResidual(Passed(), has_aux=True), engine=engine)
    seq = seq.double()
    x = streams_of(seq, dtype=torch.double)

    def run(module):
        outputs, ((one, two),) = module(*x)
        loss_of([*outputs, one, 2 * two]).backward()
        return gradients(seq, *x)

    for _ in range(2):
        assert_close(run(seq), run(plain_run(seq)), 1e-11)


def test_aux_outputs_of_a_bare_block():
    block = HalfResidual(Routed(), has_aux=True)
    (y, c), (named, _, number) = block(torch.randn(2, 8), torch.randn(2, 8))
    assert y.shape == c.shape and named["norm"].shape == (2,) and number == 3
    block = HalfResidual(nn.Linear(8, 8))
    assert len(block(torch.randn(2, 8), torch.randn(2, 8))) == 2


# --- custom blocks --------------------------------------------------------------


def test_one_run_and_the_default_agree():
    default, once = BLOCKS["custom"](), BLOCKS["once"]()
    once[0].load_state_dict(default[0].state_dict())
    results = []
    for blocks in (default, once):
        seq = ReversibleSequence(*blocks).double()
        torch.manual_seed(1)
        x = streams_of(seq, dtype=torch.double)
        results.append([*x, *step(seq, seq, x)[1]])
    assert_close(*results, 1e-11)


def test_functions_run_twice_and_those_of_custom_blocks_three_times():
    runs = {
        "additive": 2,
        "half": 2,
        "momentum": 2,
        "affine": 2,
        "once": 2,
        "custom": 3,
    }
    for kind, count in runs.items():
        seq, calls = ReversibleSequence(*blocks_of(kind, 3)), []
        x = streams_of(seq)
        step(seq, seq, x)  # the first call may probe
        for module in seq.modules():
            if isinstance(module, nn.LayerNorm):
                module.register_forward_hook(lambda m, *_: calls.append(id(m)))  # noqa: B023
        step(seq, seq, x)
        assert {calls.count(key) for key in calls} == {count}, kind


# --- utilities ------------------------------------------------------------------


class Moves(nn.Module):
    """Uses every utility between halves."""

    def __init__(self, engine):
        super().__init__()
        self.seq = ReversibleSequence(
            HalfResidual(mlp()),
            Select([1, 0, 1]),  # x2 x1 x2
            HalfResidual(mlp()),
            Swap(),
            HalfResidual(mlp()),
            ConcatenatePair(),  # joined, joined, x2
            Select([0, 2, 1]),
            PrintShape("here", n_in=2),
            Split(0),  # halves of joined, x2, joined
            Reshape((2, 16), (4, 8)),
            Select([2, 0, 1, 3]),
            HalfResidual(mlp()),
            Swap(),
            HalfResidual(mlp()),
            engine=engine,
        )


@engines
def test_every_utility_in_one_sequence(engine):
    model = Moves(engine).double()
    blocks = list(model.seq)
    x = [double(4, 8), double(4, 8)]
    got, grads = step(model.seq, model, x)
    want, expected = step(lambda *s: plain(blocks, *s), model, x)
    assert_equal(got, want)
    assert_close(grads, expected, 1e-11)
    assert [tuple(y.shape) for y in got] == [(4, 8), (4, 8), (2, 16), (4, 16)]
    back = inverse(model.seq, *got)
    assert_close(back, [t.detach() for t in x], 1e-11)


@engines
@pytest.mark.parametrize("dim", [0, -1])
def test_parts_of_different_sizes(engine, dim):
    blocks = [
        HalfResidual(nn.Linear(8, 8)),
        Select([0, 2, 1]),
        ConcatenatePair(dim),
        HalfResidual(nn.Linear(8, 8) if dim == 0 else nn.Linear(12, 12)),
    ]
    seq = ReversibleSequence(*blocks, engine=engine).double()
    third = double(2, 8) if dim == 0 else double(4, 4)
    x = [double(4, 8), double(4, 8), third]
    got, grads = step(seq, seq, x)
    want, expected = step(lambda *s: plain(blocks, *s), seq, x)
    assert_equal(got, want)
    assert_close(grads, expected, 1e-11)


@engines
def test_gradients_of_three_copies_are_summed(engine):
    seq = ReversibleSequence(
        HalfResidual(mlp()), Select([0, 1, 0, 0]), engine=engine
    ).double()
    x = [double(3, 8), double(3, 8)]
    y = seq(*x)
    assert len(y) == seq.n_out == 4
    torch.autograd.backward(
        [y[0], y[2], y[3]], [torch.full_like(y[0], k) for k in (1, 2, 4)]
    )
    assert torch.equal(x[0].grad, torch.full_like(x[0], 7))


def test_concatenation_outside_a_sequence_knows_halves_only():
    joined = torch.randn(2, 6)
    left, right = inverse(ConcatenatePair(), joined, joined)
    assert torch.equal(torch.cat([left, right], -1), joined)
    with pytest.raises(ValueError, match=r"even size.*but got 5"):
        inverse(ConcatenatePair(), joined[:, :5], joined[:, :5])


def test_reshape_changes_the_prefix():
    block = Reshape((2, 3), (6,))
    (y,) = block(torch.arange(24).reshape(2, 3, 4))
    assert y.shape == (6, 4) and torch.equal(y.flatten(), torch.arange(24))
    assert block.inverse(y)[0].shape == (2, 3, 4)
    with pytest.raises(ValueError, match=r"begins with \(2, 3\), but got \(3, 2, 4\)"):
        block(torch.zeros(3, 2, 4))
    with pytest.raises(ValueError, match=r"product 6, but got \(5,\)"):
        Reshape((2, 3), (5,))


@engines
def test_print_shape_logs_once_for_each_direction(engine, caplog):
    seq = ReversibleSequence(
        AdditiveCoupling(mlp(), mlp()),
        PrintShape("after block 0", n_in=2),
        AdditiveCoupling(mlp(), mlp()),
        engine=engine,
    )
    x = torch.randn(2, 8)
    with caplog.at_level(logging.INFO, "torch_sm3.reversible"):
        for _ in range(2):
            y = seq(x, x)
            assert len(caplog.messages) in (1, 2)
            loss_of(y).backward()
    shapes = "(2, 8) torch.float32, (2, 8) torch.float32"
    assert caplog.messages == [
        f"after block 0 forward: {shapes}",
        f"after block 0 reverse: {shapes}",
    ]


@engines
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_one_tensor_split_in_halves(engine, dim):
    blocks = blocks_of("additive", 2)
    if dim != 0:
        blocks = [AdditiveCoupling(mlp(4), mlp(4)) for _ in range(2)]
    seq = ReversibleSequence(*blocks, split_dim=dim, engine=engine).double()
    x = double(4, 8)
    y = seq(x)
    assert y.shape == x.shape
    loss_of([y]).backward()
    got = gradients(seq, x)
    loss_of([torch.cat(plain(seq, *x.chunk(2, dim)), dim)]).backward()
    assert_close(got, gradients(seq, x), 1e-11)
    (back,) = inverse(seq, y)
    torch.testing.assert_close(back, x.detach())


def test_affine_scale_is_bounded():
    class Large(nn.Module):
        def forward(self, x):
            return torch.full_like(x, 1e6), torch.zeros_like(x)

    x = torch.ones(2, 3, dtype=torch.double)
    y, _ = AffineCoupling(Large(), Large(), clamp=1.5)(x, x)
    torch.testing.assert_close(y, x * torch.e**1.5)


def test_wide_functions_of_several_dimensions():
    seq = ReversibleSequence(AffineCoupling(wide(), wide())).double()
    x = [double(2, 3, 8), double(2, 3, 8)]
    got = step(seq, seq, x)
    want = step(plain_run(seq), seq, x)
    assert_equal(got[0], want[0])
    assert_close(got[1], want[1], 1e-11)
