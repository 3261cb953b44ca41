# SPDX-License-Identifier: Apache-2.0
"""Every block against its formula, its inverse and the plain run, in both engines."""

from __future__ import annotations

import pytest
import torch
from helpers.reversible_models import (
    BLOCKS,
    ENGINES,
    Pair,
    TanhMLP,
    Wide,
    assert_close,
    assert_equal,
    blocks_of,
    gradients,
    loss_of,
    plain_run,
    step,
    streams_of,
)
from reference import reversible_couplings_oracle as oracle
from torch import nn

from torch_sm3.reversible import (
    AffineCoupling,
    GroupCoupling,
    HalfResidual,
    MomentumCoupling,
    ReversibleSequence,
    Select,
    Swap,
    inverse,
)

engines = pytest.mark.parametrize("engine", ENGINES)


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
