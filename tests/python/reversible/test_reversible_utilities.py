# SPDX-License-Identifier: Apache-2.0
"""Blocks that move stack items, in sequences and alone."""

from __future__ import annotations

import logging

import pytest
import torch
from helpers.reversible_models import (
    ENGINES,
    assert_close,
    assert_equal,
    blocks_of,
    gradients,
    loss_of,
    mlp,
    plain,
    plain_run,
    step,
    wide,
)
from torch import nn

from torch_sm3.reversible import (
    AdditiveCoupling,
    AffineCoupling,
    ConcatenatePair,
    HalfResidual,
    PrintShape,
    Reshape,
    ReversibleSequence,
    Select,
    Split,
    Swap,
    inverse,
)

engines = pytest.mark.parametrize("engine", ENGINES)


def double(*shape):
    return torch.randn(*shape, dtype=torch.double, requires_grad=True)


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
