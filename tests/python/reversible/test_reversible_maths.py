# SPDX-License-Identifier: Apache-2.0
"""Formulas, round trips and gradients of the reversible blocks."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.reversible_models import (
    TanhMLP,
    assert_close,
    couplings,
    gradients,
    loss_of,
    mlp,
    plain,
)
from reference import reversible_oracle as oracle
from torch import nn

from torch_sm3.reversible import (
    AdditiveCoupling,
    HalfResidual,
    ReversibleSequence,
    Select,
    Swap,
    inverse,
)

pytestmark = pytest.mark.usefixtures("engine")


def as_numpy(blocks):
    def weights(f):
        return f.w.detach().double().numpy(), f.u.detach().double().numpy()

    return [(weights(b.F), weights(b.G)) for b in blocks]


@pytest.mark.parametrize(
    ("dtype", "tol"), [(torch.float64, 1e-12), (torch.float32, 1e-4)]
)
def test_coupling_equals_the_float64_oracle(dtype, tol):
    seq = couplings(5, lambda: TanhMLP(6, 11)).to(dtype)
    x1, x2, c1, c2 = torch.randn(4, 3, 6, dtype=dtype).unbind()
    x1.requires_grad_(), x2.requires_grad_()
    y1, y2 = seq(x1, x2)
    torch.autograd.backward([y1, y2], [c1, c2])
    blocks = as_numpy(seq)
    want = oracle.forward(x1.detach().numpy(), x2.detach().numpy(), blocks)
    for got, expected in zip((y1, y2), want, strict=True):
        torch.testing.assert_close(
            got.detach().double(),
            torch.from_numpy(expected).double(),
            rtol=tol,
            atol=tol,
        )
    g1, g2, grads = oracle.backward(*want, c1.numpy(), c2.numpy(), blocks)
    expected = [g1, g2, *[a for block in grads for half in block for a in half]]
    assert_close(
        [g.double() for g in gradients(seq, x1, x2)],
        [torch.from_numpy(a).double() for a in expected],
        tol,
    )
    back = oracle.inverse(*want, blocks)
    for got, expected in zip(inverse(seq, y1, y2), back, strict=True):
        torch.testing.assert_close(
            got.double(), torch.from_numpy(expected).double(), rtol=tol, atol=tol
        )


def test_half_residual_formula_and_inverse():
    f = nn.Linear(4, 4)
    block = HalfResidual(f, nn.Tanh(), n_context=1)
    a, c = torch.randn(2, 3, 4).unbind()
    y, c_out = block(a, c)
    assert torch.equal(y, a + torch.tanh(f(c))) and c_out is c
    back, _ = inverse(block, y, c)
    torch.testing.assert_close(back, a)
    assert not back.requires_grad


def test_half_residual_with_two_contexts():
    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.5))

        def forward(self, left, right):
            return self.scale * left * right

    blocks = [HalfResidual(Product(), n_context=2), Select([1, 2, 0])] * 3
    seq = ReversibleSequence(*copy.deepcopy(blocks)).double()
    assert (seq.n_in, seq.n_out) == (3, 3)
    stack = [torch.randn(5, dtype=torch.double, requires_grad=True) for _ in range(3)]
    loss_of(seq(*stack)).backward()
    got = gradients(seq, *stack)
    loss_of(plain(seq, *stack)).backward()
    assert_close(got, gradients(seq, *stack), 1e-12)


def test_coupling_equals_two_half_residuals_bit_for_bit():
    f, g = mlp(), mlp()
    one = ReversibleSequence(*[AdditiveCoupling(f, g) for _ in range(3)])
    blocks = [HalfResidual(f), Swap(), HalfResidual(g), Swap()]
    two = ReversibleSequence(*blocks * 3)
    x1, x2 = (torch.randn(4, 8, requires_grad=True) for _ in range(2))
    results = []
    for seq in (one, two):
        y = seq(x1, x2)
        loss_of(y).backward()
        weights = nn.ModuleList([f, g])
        results.append([*y, *gradients(weights, x1, x2)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("depth", [1, 2, 9])
def test_gradients_equal_plain_autograd(depth):
    seq = couplings(depth)
    x1, x2 = (torch.randn(4, 8, requires_grad=True) for _ in range(2))
    y = seq(x1, x2)
    loss_of(y).backward()
    got = gradients(seq, x1, x2)
    z = plain(seq, x1, x2)
    loss_of(z).backward()
    assert all(torch.equal(a, b) for a, b in zip(y, z, strict=True))
    assert_close(got, gradients(seq, x1, x2), 1e-4)


def test_one_tensor_as_both_streams_gets_the_sum():
    seq = couplings(3).double()
    x = torch.randn(4, 8, dtype=torch.double, requires_grad=True)
    loss_of(seq(x, x)).backward()
    got = gradients(seq, x)
    loss_of(plain(seq, x, x)).backward()
    assert_close(got, gradients(seq, x), 1e-12)


def test_gradcheck_of_streams_and_of_every_parameter():
    seq = couplings(2, lambda: TanhMLP(3, 4)).double()
    names = [name for name, _ in seq.named_parameters()]
    parameters = [p.detach().clone().requires_grad_() for p in seq.parameters()]
    streams = [
        torch.randn(2, 3, dtype=torch.double, requires_grad=True) for _ in range(2)
    ]

    def call(x1, x2, *values):
        for name, value in zip(names, values, strict=True):
            owner, _, last = name.rpartition(".")
            module = seq.get_submodule(owner)
            # A plain attribute: the replaced weights of nn.DataParallel look so.
            module._parameters.pop(last, None)
            setattr(module, last, value)
        return seq(x1, x2)

    assert torch.autograd.gradcheck(call, [*streams, *parameters])


def test_only_one_output_used():
    seq = couplings(3).double()
    x = torch.randn(4, 8, dtype=torch.double, requires_grad=True)
    for pick in (0, 1):
        loss_of([seq(x, x)[pick]]).backward()
        got = gradients(seq, x)
        loss_of([plain(seq, x, x)[pick]]).backward()
        want = gradients(seq, x)
        assert_close(got, want, 1e-12)
        # The last G does not reach the first output.
        assert sum(g is None for g in want) == (6 if pick == 0 else 0)


def test_select_permutes_and_duplicates():
    assert Select([2, 0, 1])("a", "b", "c") == ("c", "a", "b")
    assert Select([1, 0, 1, 0]).inverse("b", "a", "b", "a") == ("a", "b")
    assert Swap().inverse(1, 2) == (2, 1)
    with pytest.raises(ValueError, match=r"expected every input to occur.*\[1\]"):
        Select([0, 2])
    with pytest.raises(IndexError, match=r"indices in \[0, 2\), but got 2"):
        Select([0, 1, 2], n_in=2)


def test_gradients_of_duplicates_are_summed():
    seq = ReversibleSequence(
        HalfResidual(mlp()),
        Select([0, 1, 0]),
        HalfResidual(mlp()),
        Swap(),
        HalfResidual(mlp()),
    ).double()
    x = [torch.randn(2, 8, dtype=torch.double, requires_grad=True) for _ in range(2)]
    y = seq(*x)
    assert len(y) == seq.n_out == 3
    loss_of(y).backward()
    got = gradients(seq, *x)
    loss_of(plain(seq, *x)).backward()
    assert_close(got, gradients(seq, *x), 1e-12)


def test_deeper_items_pass_untouched():
    seq = couplings(2)
    x, deep = torch.randn(2, 8), torch.arange(3)
    y = seq(x, x, deep, None, "text")
    assert y[2] is deep and y[3:] == (None, "text")
    loss_of(y).backward()
    assert all(p.grad is not None for p in seq.parameters())


def test_empty_sequence_is_the_identity():
    x = torch.randn(3, requires_grad=True)
    assert ReversibleSequence()(x, 1) == (x, 1)
    assert ReversibleSequence()() == ()


@pytest.mark.filterwarnings("ignore:Complex modules:UserWarning")
def test_complex_streams():
    seq = ReversibleSequence(AdditiveCoupling(nn.Linear(4, 4), nn.Linear(4, 4)))
    seq = seq.to(torch.complex128)
    x = torch.randn(2, 4, dtype=torch.complex128, requires_grad=True)
    torch.view_as_real(sum(seq(x, x))).sin().sum().backward()
    got = gradients(seq, x)
    torch.view_as_real(sum(plain(seq, x, x))).sin().sum().backward()
    for a, b in zip(got, gradients(seq, x), strict=True):
        torch.testing.assert_close(a, b)
