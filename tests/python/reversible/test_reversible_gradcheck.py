# SPDX-License-Identifier: Apache-2.0
"""Numerical derivatives, first and second, of every block in both engines."""

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
    blocks_of,
    gradients,
    loss_of,
    plain_run,
    streams_of,
)

from torch_sm3.reversible import (
    AdditiveCoupling,
    AffineCoupling,
    GroupCoupling,
    HalfResidual,
    MomentumCoupling,
    ReversibleSequence,
)

engines = pytest.mark.parametrize("engine", ENGINES)


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
