# SPDX-License-Identifier: Apache-2.0
"""Exact modes beyond their range, and values that are not finite."""

from __future__ import annotations

import pytest
import torch
from helpers.memory_meter import memory_meter
from helpers.reversible_models import (
    ENGINES,
    assert_close,
    assert_exact,
    blocks_of,
    loss_of,
    pair,
    step,
    streams_of,
)
from torch import nn

from torch_sm3.reversible import (
    AdditiveCoupling,
    ReversibleSequence,
    _call,
)
from torch_sm3.reversible._exact import Watch

engines = pytest.mark.parametrize("engine", ENGINES)
modes = pytest.mark.parametrize("exact", ["grid", "sidecar"])


class Grow(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.factor = factor

    def forward(self, x):
        return self.factor * torch.tanh(self.linear(x))


def overflowing(exact, **options):
    factors = [1.0, 1e9, 1.0] if exact == "grid" else [1.0, 1e6, 1.0]
    blocks = [AdditiveCoupling(Grow(f), Grow(f)) for f in factors]
    return blocks, options | {"exact": exact}


@pytest.fixture(params=[None, 2], ids=["at once", "late"])
def lag(request, monkeypatch):
    """Read overflow flags as for a CUDA device, too."""
    if request.param is not None:
        monkeypatch.setattr(_call, "Watch", lambda: Watch(lag=request.param))
    return request.param


@engines
@modes
def test_overflow_is_stored_and_counted(engine, exact, lag):
    blocks, options = overflowing(exact)
    x = streams_of(ReversibleSequence(*blocks), 64)
    seq, _ = assert_exact(blocks, engine, x, **options)
    assert seq.stats.overflows["block 0"] == 0
    assert seq.stats.overflows["block 1"] >= 2  # two calls
    before = dict(seq.stats.overflows)
    step(seq, seq, x)
    assert {k: 3 * v // 2 for k, v in before.items()} == dict(seq.stats.overflows)


@engines
@modes
def test_overflow_raises(engine, exact, lag):
    blocks, options = overflowing(exact, overflow="raise")
    seq = ReversibleSequence(*blocks, engine=engine, **options)
    x = streams_of(seq, 64)
    with pytest.raises(OverflowError, match=rf"block 1 .*exact='{exact}'.*'overflow'"):
        seq(*x)
    assert_close(
        [y.detach() for y in ReversibleSequence(blocks[0], **options)(*x)],
        [y.detach() for y in ReversibleSequence(blocks[0], exact=exact)(*x)],
        0,
    )


@engines
@modes
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_streams_that_are_not_finite(engine, exact, bad, lag):
    blocks = [AdditiveCoupling(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(3)]
    seq, store = pair(blocks, engine, exact=exact)
    x = streams_of(seq, requires_grad=False)
    x[0][1, 2] = bad
    got, want = step(seq, seq, x), step(store, seq, x)
    for a, b in zip(got[1], want[1], strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
    if exact == "grid":
        assert seq.stats.overflows["block 0"] > 0


@engines
def test_special_values_in_a_sidecar(engine):
    """Signs of zeros and denormals come back; so does what an infinity swallowed."""
    found = []

    class Keep(nn.Module):
        def __init__(self, by):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(by))

        def forward(self, x):
            found.append(x.detach().clone())
            return self.scale * torch.ones_like(x)

    blocks = [AdditiveCoupling(Keep(3e38), Keep(1.0)) for _ in range(3)]
    seq = ReversibleSequence(*blocks, engine=engine, exact="sidecar")
    values = [0.0, -0.0, 1e-45, -1e-40, 3e38, -3e38, float("inf"), float("nan")]
    x = [torch.tensor(values).repeat(8).requires_grad_() for _ in range(2)]
    seq(*x)  # the first call probes
    found.clear()
    y = seq(*x)
    first = list(found)
    found.clear()
    torch.autograd.backward(y, [torch.ones_like(t) for t in y])
    if engine == "graph":  # F saved nothing that depends on its input
        return
    for a, b in zip(first, reversed(found), strict=True):
        assert torch.equal(a.view(torch.int32), b.view(torch.int32))


def test_checkpointed_blocks_need_no_sidecar():
    blocks = blocks_of("additive", 4, 64)
    x = torch.randn(64, 64)
    kept = []
    for exact in ("none", "sidecar"):
        seq = ReversibleSequence(*blocks, exact=exact, plan="checkpoint")
        loss_of(seq(x, x)).backward()
        with memory_meter() as meter:
            y = seq(x, x)
        kept.append(meter.live)
        del y
    assert kept[0] == kept[1]
