# SPDX-License-Identifier: Apache-2.0
"""The monitor that measures how far rebuilt streams drift."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from helpers.memory_meter import memory_meter
from helpers.reversible_models import (
    ENGINES,
    couplings,
    loss_of,
    mlp,
    step,
    streams_of,
)
from torch import nn

from torch_sm3.reversible import (
    AdditiveCoupling,
    DriftError,
    DriftMonitor,
    HalfResidual,
    ReversibleSequence,
    Select,
)

engines = pytest.mark.parametrize("engine", ENGINES)


class Twisted(nn.Module):
    """Returns something else in the recompute, so the rebuilt stream is wrong."""

    def __init__(self, by, times=None):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.by = by
        self.wrong = False

    def forward(self, x):
        return self.linear(x) + (self.by if self.wrong else 0)


def twisted(by, **options):
    blocks = [AdditiveCoupling(mlp(), mlp()) for _ in range(3)]
    blocks[1].G = Twisted(by)
    seq = ReversibleSequence(*blocks, **options)
    return seq, blocks[1].G


def drifted(seq, function, x):
    y = seq(*x)
    function.wrong = True
    try:
        loss_of(y).backward()
    finally:
        function.wrong = False


@engines
def test_what_the_monitor_reports(engine):
    reports = []
    monitor = DriftMonitor(max_rel=10, on_report=reports.append)
    seq, function = twisted(0.5, monitor=monitor, engine=engine)
    x = streams_of(seq, 16, 8)
    drifted(seq, function, x)
    assert reports == [seq.drift] and len(seq.drift) == 6
    by_half = seq.drift
    assert [d.block for d in by_half] == [f"block {i // 2}" for i in range(6)]
    # The halves of block 2 come back first, up to rounding.
    for drift in by_half[4:]:
        assert int(drift.max_ulp) < 1000 and float(drift.max_rel) < 1e-5
        assert int(drift.non_finite) == 0
    wrong = by_half[3]
    assert 0.05 < float(wrong.max_rel) < 0.6 and int(wrong.max_ulp) > 1000
    assert not bool(wrong.hash_match)
    assert "block 1: " in str(wrong) and "bits differ" in str(wrong)


@engines
@pytest.mark.parametrize("exact", ["grid", "sidecar"])
def test_exact_modes_have_no_drift(engine, exact):
    seq = couplings(4, exact=exact, monitor=DriftMonitor("raise", 0), engine=engine)
    x = streams_of(seq)
    step(seq, seq, x)
    assert len(seq.drift) == 8
    for drift in seq.drift:
        assert int(drift.max_ulp) == 0 and bool(drift.hash_match)
        assert "0 ulp, 0 relative" in str(drift)


def test_the_table_of_drift():
    """Depth and dtype as in the documentation, within a factor of ten."""
    torch.manual_seed(0)
    for dtype, depth, want in (
        (torch.float32, 8, 9.5e-7),
        (torch.float32, 32, 2.2e-6),
        (torch.bfloat16, 8, 3.1e-2),
        (torch.bfloat16, 32, 8.6e-2),
    ):
        seq = couplings(depth, lambda: mlp(64), allow_drift=True).to(dtype)
        x = streams_of(seq, 16, 64, dtype=dtype, requires_grad=False)
        with torch.no_grad():
            y = seq(*x)
            back = seq.inverse(*y)
        error = max((a - b).abs().max().item() for a, b in zip(back, x, strict=True))
        assert want / 10 < error < 10 * want


@engines
def test_policy_warn(engine):
    seq, function = twisted(0.5, monitor=DriftMonitor(), engine=engine)
    x = streams_of(seq)
    with pytest.warns(
        RuntimeWarning, match=r"within 0\.001 relative.*block 1: \d+ ulp"
    ):
        drifted(seq, function, x)
    assert all(t.grad is not None for t in [*x, *seq.parameters()])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(seq, seq, x)
        seq, function = twisted(0.5, monitor=DriftMonitor(max_rel=10), engine=engine)
        drifted(seq, function, x)


@engines
def test_policy_raise_at_the_end_of_the_pass(engine):
    seq, function = twisted(0.5, monitor=DriftMonitor("raise"), engine=engine)
    x = streams_of(seq)
    with pytest.raises(DriftError, match=r"block 1: .*relative"):
        drifted(seq, function, x)
    # All gradients had arrived.
    assert all(t.grad is not None for t in [*x, *seq.parameters()])
    assert issubclass(DriftError, RuntimeError)
    step(seq, seq, x)  # the next step is none the worse


@engines
def test_policy_fallback(engine):
    seq, function = twisted(0.5, monitor=DriftMonitor("fallback"), engine=engine)
    x = streams_of(seq)
    with pytest.warns(RuntimeWarning, match="block 1"):
        drifted(seq, function, x)
    plans = [entry.plan for entry in seq.plan_report]
    # What came after the wrong stream went wrong with it.
    assert plans[1:] == ["checkpoint", "reversible"]
    assert seq.plan_report[1].reason == "drift was measured"
    assert seq.stats.fallbacks["block 1"] == 1 and "block 2" not in seq.stats.fallbacks
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drifted(seq, function, x)
    assert float(seq.drift[3].max_rel) == 0


@engines
def test_values_that_are_lost_exceed_every_limit(engine):
    monitor = DriftMonitor("raise", max_rel=math.inf)
    seq, function = twisted(math.inf, monitor=monitor, engine=engine)
    with pytest.raises(DriftError, match="not finite"):
        drifted(seq, function, streams_of(seq))
    # A stream that was not finite to begin with is no drift.
    seq = couplings(1, lambda: nn.Linear(8, 8), monitor=monitor, engine=engine)
    x = streams_of(seq, requires_grad=False)
    x[0][:] = x[1][:] = math.nan
    step(seq, seq, x)


@engines
def test_limit_in_units_of_the_last_place(engine):
    seq, function = twisted(
        0.5, monitor=DriftMonitor("raise", math.inf, max_ulp=1000), engine=engine
    )
    x = streams_of(seq)
    with pytest.raises(DriftError):
        drifted(seq, function, x)


@engines
def test_every_nth_call(engine):
    reports = []
    monitor = DriftMonitor(every=3, on_report=reports.append)
    seq, counts = couplings(2, monitor=monitor, engine=engine), []
    x = streams_of(seq)
    for _ in range(7):
        with torch.no_grad():
            seq(*x)  # no call that could be monitored
        step(seq, seq, x)
        counts.append(len(reports))
    assert counts == [1, 1, 1, 2, 2, 2, 3]


def test_a_second_pass_over_one_call_reports_anew():
    seq = couplings(2, monitor=DriftMonitor())
    loss = loss_of(seq(*streams_of(seq)))
    for retain in (True, False):
        loss.backward(retain_graph=retain)
        assert len(seq.drift) == 4


def test_nodes_out_of_order_report_once():
    blocks = [HalfResidual(mlp()), Select([2, 3, 0, 1]), HalfResidual(mlp())]
    seq = ReversibleSequence(*blocks, engine="node", monitor=DriftMonitor())
    y = seq(*[torch.randn(4, 8, requires_grad=True) for _ in range(4)])
    y[2].grad_fn._set_sequence_nr(y[0].grad_fn._sequence_nr() + 1)
    torch.autograd.backward([y[0].sum(), y[2].sin().sum()])
    assert [drift.block for drift in seq.drift] == ["block 0", "block 2"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_sample_takes_few_bytes(dtype):
    def live(monitor):
        seq = couplings(4, lambda: mlp(32), monitor=monitor).to(dtype)
        x = torch.randn(64, 32, dtype=dtype)
        loss_of(seq(x, x)).backward()
        with memory_meter() as meter:
            y = seq(x, x)
        del y
        return meter.live

    width = {torch.float64: 8, torch.float32: 4, torch.bfloat16: 2}[dtype]
    more = live(DriftMonitor(max_rel=math.inf)) - live(None)
    assert 0 < more <= 8 * (64 * width + 16)


def test_small_and_empty_streams():
    seq = couplings(2, monitor=DriftMonitor("raise"))
    for rows, count in ((1, 4), (0, 0)):
        x = torch.randn(rows, 8, requires_grad=True)
        loss_of(seq(x, x)).backward()
        assert len(seq.drift) == count


@engines
def test_reversible_row_14_the_monitor_reports_growth(engine):
    """Linear layers, default weights: magnitudes grow, and with them the errors."""
    seq = couplings(12, lambda: nn.Linear(8, 8), monitor=DriftMonitor(), engine=engine)
    x = streams_of(seq)
    (y, _), _ = step(seq, seq, x)
    growth = float(y.abs().max() / x[0].detach().abs().max())
    assert growth > 5
    assert 0 < max(float(drift.max_rel) for drift in seq.drift) < 1e-4
    with torch.no_grad():
        for p in seq.parameters():
            p.mul_(3)
    seq.monitor = DriftMonitor("raise")
    with pytest.raises(DriftError, match="block 0: "):
        step(seq, seq, x)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"policy": "ignore"}, r"warn, raise, fallback, but got 'ignore'"),
        ({"every": 0}, r"at least 1, but got 0 \(argument 'every'\)"),
        ({"sample": 0}, r"at least 1, but got 0 \(argument 'sample'\)"),
        ({"max_rel": -1.0}, r"at least 0, but got -1.0 \(argument 'max_rel'\)"),
        ({"max_rel": math.nan}, r"but got nan"),
        ({"max_ulp": -1}, r"at least 0, but got -1 \(argument 'max_ulp'\)"),
    ],
)
def test_wrong_settings_of_the_monitor(options, text):
    with pytest.raises(ValueError, match=text):
        DriftMonitor(**options)
