# SPDX-License-Identifier: Apache-2.0
"""Blocks of the user's own: forward, inverse, and nothing else."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.reversible_models import assert_close, gradients, loss_of, mlp, plain
from torch import nn

from torch_sm3.reversible import (
    AdditiveCoupling,
    Block,
    ReversibleSequence,
    Swap,
    inverse,
)

pytestmark = pytest.mark.usefixtures("engine")


class Affine(Block):
    """Scales one stream by a function of the other, and passes the other through."""

    n_in = n_out = 2

    def __init__(self, dropout=0.0):
        super().__init__()
        self.scale = mlp(dropout=dropout)
        self.shift = mlp(dropout=dropout)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x1, x2, gain=1.0):
        self.calls += 1
        return x1 * torch.exp(torch.tanh(self.scale(x2))) + gain * self.shift(x2), x2

    def inverse(self, y1, y2, gain=1.0):
        # In the order of forward, so that both draw the same dropout masks.
        scale = torch.exp(-torch.tanh(self.scale(y2)))
        return (y1 - gain * self.shift(y2)) * scale, y2


def sequence():
    blocks = [
        Affine(),
        Swap(),
        AdditiveCoupling(mlp(), mlp()),
        Affine(),
        Swap(),
        Affine(),
    ]
    return ReversibleSequence(*blocks).double()


def double():
    return torch.randn(4, 8, dtype=torch.double, requires_grad=True)


def test_gradients_equal_the_plain_run():
    seq, x1, x2 = sequence(), double(), double()
    twin = copy.deepcopy(seq)
    for _ in range(2):
        y = seq(x1, x2)
        loss_of(y).backward()
        got = gradients(seq, x1, x2)
        z = plain(twin, x1, x2)
        loss_of(z).backward()
        assert all(torch.equal(a, b) for a, b in zip(y, z, strict=True))
        assert_close(got, gradients(twin, x1, x2), 1e-10)
        for a, b in zip(seq.buffers(), twin.buffers(), strict=True):
            assert torch.equal(a, b)
    for a, b in zip(inverse(seq, *y), (x1, x2), strict=True):
        torch.testing.assert_close(a, b.detach())


@pytest.mark.parametrize("pick", [0, 1])
def test_one_output_used(pick):
    seq, x = sequence(), double()
    seq(x, x)[pick].sum().backward()
    got = gradients(seq, x)
    plain(seq, x, x)[pick].sum().backward()
    want = gradients(seq, x)
    # A node that is run for its other output gives zeros where plain gives None.
    got = [
        torch.zeros_like(g) if w is None and g is not None else g
        for g, w in zip(got, want, strict=True)
    ]
    pairs = [(g, w) for g, w in zip(got, want, strict=True) if w is not None]
    assert_close([g for g, _ in pairs], [w for _, w in pairs], 1e-10)


def test_dropout_and_side_context():
    seq = ReversibleSequence(Affine(0.4), Swap(), Affine(0.4)).double()
    x, gain = double(), torch.tensor(0.7, dtype=torch.double, requires_grad=True)
    grads = []
    for reversible in (True, False):
        torch.manual_seed(0)
        if reversible:
            y = seq(x, x, gain=gain)
        else:
            y = seq[2](*seq[1](*seq[0](x, x, gain=gain)), gain=gain)
        loss_of(y).backward()
        grads.append([*gradients(seq, x, gain), torch.rand(2)])
    assert_close(*grads, 1e-10)


def test_items_of_other_types():
    class Count(Block):
        n_in = n_out = 3

        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.ones(2))

        def forward(self, x, count, name):
            return x + count * self.bias, count + 1, name

        def inverse(self, y, count, name):
            return y - (count - 1) * self.bias, count - 1, name

    seq = ReversibleSequence(Count(), Count(), Count())
    y = seq(torch.zeros(2), torch.tensor(1), "name")
    assert y[1] == 4 and y[2] == "name"
    y[0].sum().backward()
    assert [b.bias.grad[0].item() for b in seq] == [1.0, 2.0, 3.0]


def test_growing_and_shrinking_stacks():
    class Split(Block):
        n_in, n_out = 1, 2

        def forward(self, x):
            return x.chunk(2, -1)

        def inverse(self, a, b):
            return (torch.cat([a, b], -1),)

    class Concatenate(Block):
        n_in, n_out = 2, 1

        def forward(self, a, b):
            return (torch.cat([a, b], -1),)

        def inverse(self, x):
            return x.chunk(2, -1)

    seq = ReversibleSequence(
        Split(), AdditiveCoupling(mlp(), mlp()), Concatenate(), Split(), Concatenate()
    ).double()
    assert (seq.n_in, seq.n_out) == (1, 1)
    x = torch.randn(3, 16, dtype=torch.double, requires_grad=True)
    loss_of(seq(x)).backward()
    got = gradients(seq, x)
    y = x
    a, b = seq[1](*y.chunk(2, -1))
    loss_of([torch.cat([a, b], -1)]).backward()
    assert_close(got, gradients(seq, x), 1e-12)


def test_wrong_results():
    class Wrong(Block):
        n_in = n_out = 1

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return x * self.weight

    with pytest.raises(
        TypeError, match="Wrong to return a tuple of 1 items, but got Tensor"
    ):
        ReversibleSequence(Wrong())(torch.ones(2))
    with pytest.raises(NotImplementedError):
        inverse(Wrong(), torch.ones(2))
