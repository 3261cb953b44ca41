# SPDX-License-Identifier: Apache-2.0
"""Live bytes of many steps, with the cycle collector off."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager, suppress

import pytest
import torch
from helpers.memory_meter import memory_meter
from helpers.reversible_models import (
    BLOCKS,
    ENGINES,
    blocks_of,
    couplings,
    loss_of,
    mlp,
    streams_of,
)
from torch import nn

from torch_sm3.reversible import (
    AdditiveCoupling,
    DriftMonitor,
    HalfResidual,
    ReversibleSequence,
    Swap,
    remember,
)

engines = pytest.mark.parametrize("engine", ENGINES)
OPTIONS = {
    "none": {},
    "grid": {"exact": "grid"},
    "sidecar": {"exact": "sidecar"},
    "checkpoint": {"plan": "checkpoint"},
    "monitor": {"monitor": DriftMonitor(max_rel=1.0)},
    "mixed": {"plan": ["reversible", "store", "checkpoint", "remember"]},
}


@contextmanager
def no_collector():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def assert_flat(run, steps=6):
    """Run several steps; from the second on none leaves a byte."""
    with no_collector():
        run()
        for _ in range(steps):
            with memory_meter() as meter:
                run()
            assert meter.live == 0


class Tricky(nn.Module):
    """Remembers, returns aux outputs, draws, and raises when told to."""

    def __init__(self):
        super().__init__()
        self.inner = mlp(dropout=0.3)
        self.calls_until_error = -1

    def forward(self, x):
        if self.calls_until_error == 0:
            raise KeyError("asked for")
        self.calls_until_error -= 1
        y = self.inner(x)
        mask = remember(y > 0)
        return torch.where(mask, y, 0.1 * y), y.mean(-1)


def tricky(engine, **options):
    blocks = []
    for _ in range(2):
        blocks += [HalfResidual(Tricky(), has_aux=True), Swap()]
    return ReversibleSequence(*blocks, engine=engine, **options)


@engines
@pytest.mark.parametrize("options", OPTIONS)
def test_twenty_steps_of_every_mode(engine, options):
    seq = couplings(4, lambda: mlp(dropout=0.3), engine=engine, **OPTIONS[options])
    x = streams_of(seq)
    optimizer = torch.optim.SGD([*x, *seq.parameters()], lr=1e-3)

    def step():
        loss_of(seq(*x)).backward()
        optimizer.step()
        optimizer.zero_grad()

    assert_flat(step, 20)


@engines
@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("exact", ["none", "sidecar"])
def test_every_block(engine, kind, exact):
    seq = ReversibleSequence(*blocks_of(kind, 2), engine=engine, exact=exact)
    x = streams_of(seq)
    tensors = [*x, *seq.parameters()]

    def step():
        torch.autograd.grad(loss_of(seq(*x)), tensors)

    assert_flat(step, 3)


@engines
@pytest.mark.parametrize("options", OPTIONS)
def test_forward_without_backward(engine, options):
    seq = couplings(4, lambda: mlp(dropout=0.3), engine=engine, **OPTIONS[options])
    x = streams_of(seq)
    assert_flat(lambda: seq(*x))


@engines
@pytest.mark.parametrize("pick", [0, 1, 2])
def test_unused_outputs(engine, pick):
    """One of both streams, or an aux output alone."""
    seq = tricky(engine)
    x = streams_of(seq)
    tensors = [*x, *seq.parameters()]

    def step():
        (a, b), aux = seq(*x)
        used = [a, b, aux[0]][pick]
        torch.autograd.grad(used.sum(), tensors, allow_unused=True)

    assert_flat(step)


@engines
def test_exception_in_the_loss(engine):
    seq = tricky(engine, exact="sidecar")
    x = streams_of(seq)

    def step():
        with suppress(ZeroDivisionError):
            (a, b), _ = seq(*x)
            loss = (a + b).sum()
            loss / (1 // 0)

    assert_flat(step)


@engines
@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_exception_in_a_function(engine, after):
    """In the first run of either block, or in either recompute."""
    seq = tricky(engine, exact="sidecar")
    x = streams_of(seq)
    first, second = seq[0].layers[0], seq[2].layers[0]

    def step():
        # Each function runs once forwards, then the second one runs again first.
        first.calls_until_error = [0, -1, 1, -1][after]
        second.calls_until_error = [-1, 0, -1, 1][after]
        with pytest.raises(KeyError, match="asked for"):
            (a, b), _ = seq(*x)
            (a.sum() + b.sum()).backward()
        first.calls_until_error = second.calls_until_error = -1
        for t in [*x, *seq.parameters()]:
            t.grad = None

    step()  # what the first call learns costs runs of F

    assert_flat(step)


@engines
def test_a_retained_graph_is_freed_with_its_outputs(engine):
    seq = couplings(3, engine=engine)
    x = streams_of(seq)

    def step():
        loss = loss_of(seq(*x))
        for _ in range(2):
            loss.backward(retain_graph=True)
        for t in [*x, *seq.parameters()]:
            t.grad = None

    assert_flat(step)


def test_double_backward():
    seq = couplings(2, double_backward=True)
    x = streams_of(seq)

    def step():
        grads = torch.autograd.grad(loss_of(seq(*x)), x, create_graph=True)
        torch.autograd.grad(sum(g.square().sum() for g in grads), x)

    assert_flat(step)


@engines
def test_no_cycle_holds_the_streams(engine):
    """Dropping the outputs drops the final streams at once, backward or not."""
    seq = couplings(3, engine=engine)
    x = streams_of(seq)
    with no_collector():
        for backward in (False, True):
            y = seq(*x)
            refs = [weakref.ref(t.untyped_storage()) for t in y]
            if backward:
                loss_of(y).backward()
            del y
            assert [ref() for ref in refs] == [None, None]


@engines
def test_what_a_function_kept_is_freed_before_the_next_one_runs(engine):
    """The peak of a backward pass holds one function's tensors, not two."""
    seq = ReversibleSequence(
        *[AdditiveCoupling(mlp(64), mlp(64)) for _ in range(4)], engine=engine
    )
    x = torch.randn(256, 64)
    for _ in range(2):
        y = seq(x, x)
        loss = (y[0] + y[1]).sum()
        del y
        with memory_meter() as meter:
            loss.backward()
        del loss
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.nbytes) or t.detach(), lambda t: t
    ):
        seq[0].F(x.clone().requires_grad_())
    # Streams, their gradients, one function's tensors and its gradients of them.
    assert meter.peak < 6 * x.nbytes + 2 * sum(saved)
