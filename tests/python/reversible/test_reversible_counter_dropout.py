# SPDX-License-Identifier: Apache-2.0
"""Dropout by a counter: masks, state, and no generator."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from helpers.attention_checks import generator_draws
from helpers.reversible_models import gradients, plain
from reference import philox_oracle
from torch import nn

from torch_sm3.reversible import AdditiveCoupling, CounterDropout, ReversibleSequence


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize(("seed", "offset"), [(0, 0), (2**63 + 9, 3), (-1, 2**40 + 1)])
def test_masks_equal_the_oracle(p, seed, offset):
    dropout = CounterDropout(p, seed=seed, offset=offset)
    x = torch.randn(3, 7, dtype=torch.double, requires_grad=True)
    for call in range(3):
        y = dropout(x)
        numbers = offset + np.arange(21).reshape(3, 7)
        key = (seed + call) % 2**64
        want = torch.from_numpy(philox_oracle.factors(key, numbers, p))
        torch.testing.assert_close(y, x * want, rtol=1e-15, atol=0)
        (grad,) = torch.autograd.grad(y.sum(), x)
        torch.testing.assert_close(grad, want, rtol=1e-15, atol=0)


def test_the_mask_belongs_to_the_shape_not_the_memory():
    x = torch.randn(6, 4)
    one, two = CounterDropout(seed=1), CounterDropout(seed=1)
    assert torch.equal(one(x), two(x.t().contiguous().t()))


def test_eval_and_zero_rate_pass_through():
    x = torch.randn(5)
    for dropout in (CounterDropout(0.5).eval(), CounterDropout(0.0)):
        assert dropout(x) is x and dropout.counter == 0


def test_only_construction_draws():
    assert generator_draws(lambda: CounterDropout()) == 1
    assert generator_draws(lambda: CounterDropout(seed=4)) == 0
    dropout = CounterDropout()
    assert generator_draws(lambda: dropout(torch.ones(9))) == 0
    assert not torch.equal(dropout.seed, CounterDropout().seed)


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "state_dict"])
def test_a_saved_model_goes_on(way):
    dropout, x = CounterDropout(), torch.ones(64)
    dropout(x)
    if way == "deepcopy":
        other = copy.deepcopy(dropout)
    elif way == "pickle":
        other = pickle.loads(pickle.dumps(dropout))
    else:
        other = CounterDropout()
        other.load_state_dict(dropout.state_dict())
    assert torch.equal(other(x), dropout(x))
    assert dropout.counter == other.counter == 2


def test_casting_a_model_keeps_the_seed():
    dropout = CounterDropout(seed=2**62 + 1).half()
    assert dropout.seed.dtype is torch.int64 and int(dropout.seed) == 2**62 + 1


def test_built_on_the_meta_device():
    with torch.device("meta"):
        dropout = CounterDropout(seed=3)
    assert dropout.seed.is_meta
    dropout.to_empty(device="cpu").reset_parameters()
    assert torch.equal(dropout(torch.ones(9)), CounterDropout(seed=3)(torch.ones(9)))


def test_backward_after_further_calls():
    dropout = CounterDropout(seed=0)
    x = torch.ones(32, requires_grad=True)
    y = dropout(x)
    dropout(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad, y.detach())


def test_a_reversible_block_sees_the_same_mask_twice():
    def make():
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), CounterDropout(0.5))

    blocks = [AdditiveCoupling(make(), make()) for _ in range(3)]
    seq = ReversibleSequence(*blocks).double()
    twin = copy.deepcopy(seq)
    x = torch.randn(4, 8, dtype=torch.double, requires_grad=True)
    for step in range(3):
        before = torch.get_rng_state()
        y = seq(x, x)
        (y[0] * y[1]).sum().backward()
        got = gradients(seq, x)
        assert torch.equal(torch.get_rng_state(), before)
        z = plain(twin, x, x)
        (z[0] * z[1]).sum().backward()
        for a, b in zip((*y, *got), (*z, *gradients(twin, x)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
        for module in seq.modules():
            if isinstance(module, CounterDropout):
                assert module.counter == step + 1


@pytest.mark.parametrize("p", [-0.1, 1.1, float("nan")])
def test_wrong_rate(p):
    with pytest.raises(ValueError, match=rf"rate in \[0, 1\], but got {p}"):
        CounterDropout(p)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_reversible_row_22_counter_dropout_in_a_captured_graph():
    linear = nn.Linear(8, 64, device="cuda")
    dropout = CounterDropout(0.5, seed=0).cuda()
    x = torch.randn(4, 8, device="cuda")

    def step():
        y = dropout(linear(x))
        return [y, *torch.autograd.grad(y.square().sum(), linear.parameters())]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()  # what libraries allocate on their first call
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for start in (0, 7):
        results = []
        for run in (graph.replay, step):
            dropout.counter.fill_(start)
            steps = [run() or captured for _ in range(3)]
            assert dropout.counter == start + 3
            results.append([t.clone() for t in steps[-1]])
        for a, b in zip(*results, strict=True):
            assert torch.equal(a == 0, b == 0)
            torch.testing.assert_close(a, b)
