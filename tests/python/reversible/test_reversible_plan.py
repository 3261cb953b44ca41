# SPDX-License-Identifier: Apache-2.0
"""What is kept of each block."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from helpers.memory_meter import memory_meter
from helpers.reversible_models import (
    BLOCKS,
    ENGINES,
    assert_close,
    assert_equal,
    blocks_of,
    couplings,
    loss_of,
    mlp,
    plain_run,
    step,
    streams_of,
)
from torch import nn

from torch_sm3.reversible import (
    AdditiveCoupling,
    DriftMonitor,
    MomentumCoupling,
    ReversibleSequence,
    Swap,
)

engines = pytest.mark.parametrize("engine", ENGINES)
WORDS = ["reversible", "store", "checkpoint", "remember"]


@engines
@pytest.mark.parametrize("plan", WORDS)
@pytest.mark.parametrize("kind", BLOCKS)
def test_every_plan_equals_the_plain_run(engine, plan, kind):
    blocks = blocks_of(kind, 3, dropout=0.2)
    seq = ReversibleSequence(*blocks, plan=plan, engine=engine).double()
    assert [entry.plan for entry in seq.plan_report] == [plan] * len(seq)
    x = streams_of(seq, dtype=torch.double)
    got, want = step(seq, seq, x), step(plain_run(blocks), seq, x)
    assert_equal(got[0], want[0])
    assert_close(got[1], want[1], 1e-10)


@engines
@pytest.mark.parametrize("kind", BLOCKS)
def test_mixed_plans_equal_the_plain_run(engine, kind):
    blocks = blocks_of(kind, 6, dropout=0.2)
    plans = [WORDS[i % 4] for i in range(len(blocks))]
    seq = ReversibleSequence(*blocks, plan=plans, engine=engine).double()
    x = streams_of(seq, dtype=torch.double)
    for pick in (None, [0], [1]):
        got = step(seq, seq, x, pick=pick)
        want = step(plain_run(blocks), seq, x, pick=pick)
        assert_equal(got[0], want[0])
        for a, b in zip(got[1], want[1], strict=True):
            assert b is None or a is not None
            if b is not None:
                assert_close([a], [b], 1e-10)


@pytest.mark.parametrize("exact", ["grid", "sidecar"])
@engines
def test_mixed_plans_in_exact_modes(engine, exact):
    blocks = blocks_of("additive", 8, dropout=0.2)
    seq = ReversibleSequence(*blocks, plan=WORDS * 2, engine=engine, exact=exact)
    store = ReversibleSequence(*blocks, plan="store", engine=engine, exact=exact)
    x = streams_of(seq)
    assert_equal(step(seq, seq, x)[1], step(store, seq, x)[1])
    assert_equal(
        step(seq, seq, x, pick=[0])[1][:2], step(store, seq, x, pick=[0])[1][:2]
    )


class Twice(nn.Module):
    """Reads its input several times, so that the order of sums matters."""

    def __init__(self):
        super().__init__()
        self.inner = mlp()

    def forward(self, x):
        return self.inner(x) + x * torch.tanh(x)


def test_stored_blocks_sum_as_their_engine_does():
    blocks = [AdditiveCoupling(Twice(), Twice()) for _ in range(6)]
    seq = ReversibleSequence(*blocks, plan=["store", "checkpoint"] * 3, engine="graph")
    x = streams_of(seq)
    assert_equal(step(seq, seq, x)[1], step(plain_run(blocks), seq, x)[1])
    options = {"double_backward": True}
    auto = ReversibleSequence(*blocks, plan="store", **options)
    assert_equal(step(auto, auto, x)[1], step(plain_run(blocks), auto, x)[1])


@engines
def test_drift_ends_at_a_checkpoint(engine):
    """The error of the worst block falls with the distance of the checkpoints."""
    blocks = [AdditiveCoupling(mlp(16), mlp(16)) for _ in range(40)]
    x = streams_of(ReversibleSequence(*blocks), 8, 16)
    errors = []
    for options in ({}, {"keep_every": 4}, {"plan": "checkpoint"}):
        monitor = DriftMonitor(max_rel=math.inf)
        seq = ReversibleSequence(*blocks, engine=engine, monitor=monitor, **options)
        step(seq, seq, x)
        errors.append(max(float(drift.max_rel) for drift in seq.drift))
    assert errors[0] > errors[1] > errors[2] == 0


def test_keep_every_counts_reversible_blocks():
    blocks = [b for _ in range(4) for b in (*blocks_of("half", 1), Swap())]
    seq = ReversibleSequence(*blocks, keep_every=2)
    kept = [i for i, e in enumerate(seq.plan_report) if e.plan == "checkpoint"]
    assert kept == [3, 9]
    assert seq.plan_report[3].reason == "one of every 2 blocks"
    assert seq.plan_report[0].reason == "as the argument says"
    plans = ["store", "reversible"] * 2
    seq = ReversibleSequence(*blocks_of("additive", 4), plan=plans, keep_every=2)
    assert [e.plan for e in seq.plan_report] == [*plans[:3], "checkpoint"]


@engines
def test_what_each_plan_keeps(engine):
    """Live bytes of eight blocks: streams at the end, at each block, or the graph."""
    blocks, x = blocks_of("additive", 8, 16), torch.randn(64, 16)
    live = {}
    for plan in WORDS:
        seq = ReversibleSequence(*blocks, plan=plan, engine=engine)
        loss_of(seq(x, x)).backward()
        with memory_meter() as meter:
            y = seq(x, x)
        live[plan] = meter.live
        del y
    assert live["reversible"] == live["remember"] == 2 * x.nbytes
    # Each half keeps the accumulator that it changes; x itself is the caller's.
    assert live["checkpoint"] == 16 * x.nbytes
    assert live["store"] > 3 * live["checkpoint"]


@engines
def test_stored_blocks_run_once(engine):
    seq = ReversibleSequence(
        *blocks_of("additive", 3),
        plan=["reversible", "store", "checkpoint"],
        engine=engine,
    )
    x, counts = streams_of(seq), [0, 0, 0]
    step(seq, seq, x)
    for i, block in enumerate(seq):

        def count(*_, i=i):
            counts[i] += 1

        block.F[1].register_forward_hook(count)
    step(seq, seq, x)
    assert counts == [2, 1, 2]


def test_slices_and_copies_keep_the_plan():
    seq = couplings(4, plan=["store", "checkpoint", "reversible", "store"])
    assert [e.plan for e in seq[1:].plan_report] == [
        "checkpoint",
        "reversible",
        "store",
    ]
    assert seq[-1:].plan == ("store",)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"plan": "stored"}, r"one of .*, but got 'stored' \(argument 'plan'\)"),
        (
            {"plan": ["reversible"] * 3},
            r"each of 2 blocks, but got 3 \(argument 'plan'",
        ),
        ({"plan": ["store", "auto"]}, "but got 'auto'"),
        ({"keep_every": 0}, r"at least 1, but got 0 \(argument 'keep_every'\)"),
        ({"exact": "exactly"}, r"none, grid, sidecar, but got 'exactly'"),
        ({"engine": "nodes"}, r"auto, node, graph, but got 'nodes'"),
        ({"overflow": "warn"}, r"store, raise, but got 'warn'"),
        ({"grid_bits": -1}, r"but got -1 \(argument 'grid_bits'\)"),
        ({"engine": "node", "double_backward": True}, r"but got 'node'"),
    ],
)
def test_wrong_settings(options, text):
    with pytest.raises(ValueError, match=text):
        couplings(2, **options)


def test_momentum_that_forgets_is_warned_of():
    def make(depth, **options):
        blocks = [MomentumCoupling(nn.Identity(), 0.9) for _ in range(depth)]
        return ReversibleSequence(*blocks, **options)

    with pytest.warns(RuntimeWarning, match="exact='sidecar'"):
        make(120)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(100)
        make(120, exact="sidecar")
        make(120, plan="store")
