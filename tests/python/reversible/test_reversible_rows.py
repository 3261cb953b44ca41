# SPDX-License-Identifier: Apache-2.0
"""Inputs that broke other implementations and that no other file is about."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import types
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from helpers.memory_meter import memory_meter
from helpers.reversible_models import couplings, loss_of, mlp
from helpers.reversible_scripted import MLP, can_script
from torch import Tensor, nn

import torch_sm3.reversible
from torch_sm3.reversible import AdditiveCoupling, ReversibleSequence, inverse
from torch_sm3.reversible._inventory import Inventory, Learned
from torch_sm3.reversible._replay import Replay

ROOT = Path(__file__).parents[3]


def test_reversible_row_04_twenty_steps(engine):
    seq = couplings(4, lambda: mlp(dropout=0.3))
    optimizer = torch.optim.SGD(seq.parameters(), lr=1e-3, momentum=0.9)
    x, lives = torch.randn(16, 8), []
    gc.collect()
    gc.disable()
    try:
        for _ in range(20):
            with memory_meter() as used:
                loss_of(seq(x, x)).backward()
                optimizer.step()
                optimizer.zero_grad()
            lives.append(used.live)
    finally:
        gc.enable()
    # The first step makes the momentum.
    assert lives[1:] == [0] * 19


@pytest.mark.parametrize("exact", ["none", "grid"])
def test_reversible_row_05_depth_4_against_64(engine, exact):
    """Peak of a step, weights and gradients subtracted."""
    x, peaks = torch.randn(512, 8), {}
    for depth in (4, 64):
        seq = couplings(depth, exact=exact)
        for _ in range(2):  # the first call learns
            for p in seq.parameters():
                p.grad = torch.zeros_like(p)
            with memory_meter() as used:
                loss_of(seq(x, x)).backward()
        peaks[depth] = used.peak
    functions = 2 * (64 - 4)
    # A plain run keeps several tensors of this size for each function.
    assert peaks[64] - peaks[4] < 0.01 * functions * 5 * x.nbytes


class Counts(nn.Module):
    """An F with a trivial inverse; counts its runs and those of its backward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.runs = []

    def forward(self, x):
        y = self.linear(x)
        self.runs.append("run")
        if y.requires_grad:
            y.register_hook(lambda grad: self.runs.append("back"))
        return y


def test_reversible_row_06_a_function_runs_twice_in_a_step(engine):
    seq, x = couplings(3, Counts), torch.randn(4, 8)
    for _ in range(2):
        loss_of(seq(x, x)).backward()
        for block in seq:
            for function in (block.F, block.G):
                assert sorted(function.runs) == ["back", "run", "run"]
                function.runs.clear()


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def test_reversible_row_16_the_user_can_verify_the_maths():
    for name in ("inverse", "check_reversible"):
        assert name in torch_sm3.reversible.__all__
        assert name in read("README.md") and name in read("docs/reversible.md")
    # The README's examples are the quickstart's.
    assert "README.md" in read("docs/quickstart.md")
    page = read("docs/reversible.md")
    derivation = page[page.index("## The mathematics") :]
    for row in ("Half-residual", "Additive", "Affine", "Momentum", "Group", "own"):
        assert re.search(rf"\*\*[^*]*{row}[^*]*\*\*", derivation, re.IGNORECASE), row


def test_reversible_row_17_which_bytes_are_reported():
    meter = read("benchmarks/_meter.py")
    assert "reset_peak_memory_stats" in meter and "max_memory_allocated" in meter
    page = read("docs/reversible.md")
    for word in ("max_memory_allocated", "reset_peak_memory_stats", "reserved"):
        assert word in page


def test_reversible_row_21_typed_storages_are_not_touched():
    """In a process of its own, where every warning is an error from the start."""
    script = """
import warnings, torch
warnings.simplefilter("error")
from torch_sm3.reversible import AdditiveCoupling, ReversibleSequence
for engine in ("node", "graph"):
    for exact in ("none", "grid", "sidecar"):
        make = lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
        blocks = [AdditiveCoupling(make(), make()) for _ in range(2)]
        seq = ReversibleSequence(*blocks, engine=engine, exact=exact)
        x = torch.randn(3, 4, requires_grad=True)
        sum(y.sum() for y in seq(x, x)).backward()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("first_run", ["draws", "does not", "in eval mode", "none"])
def test_reversible_row_22_random_numbers_under_graph_capture(first_run, monkeypatch):
    """The decision alone, which needs no GPU: what is known of F at a capture."""
    layer, learned = nn.Dropout(0.5), Learned()
    on_device = types.SimpleNamespace(
        is_cuda=True, device=torch.device("cuda", 0), _version=0
    )
    state = [torch.zeros(16, dtype=torch.uint8)]
    generator = Mock(device=on_device.device, get_state=lambda: state[0])
    capturing = [False]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(torch.cuda, "default_generators", [generator])

    def run(draw):
        def call():
            if draw:
                state[0] = state[0] + 1

        layer.train(first_run != "in eval mode" or capturing[0])
        replay = Replay("block 3", [layer], Inventory([layer]), learned)
        replay.first(call, [on_device], {})

    if first_run != "none":
        run(first_run == "draws")
    capturing[0] = True
    if first_run == "does not":
        run(False)
        return
    what = "that does" if first_run == "draws" else "that has not run before"
    with pytest.raises(RuntimeError, match=f"F of block 3 .*{what}.*CounterDropout"):
        run(False)


class Two(nn.Module):
    """Takes two streams and side context."""

    def __init__(self):
        super().__init__()
        self.mlp = MLP(3)

    def forward(self, x: Tensor, y: Tensor, memory: Tensor | None) -> Tensor:
        assert memory is not None
        return self.mlp(x * torch.sigmoid(y)) * memory


@pytest.mark.skipif(not can_script(), reason="this torch has no TorchScript")
def test_reversible_row_23_every_element_of_a_tensor_list():
    """The C++ node takes lists of streams, side context and parameters."""
    functions = [torch.jit.script(Two().double()) for _ in range(2)]
    inputs = [
        torch.randn(2, 3, dtype=torch.double, requires_grad=True) for _ in range(4)
    ]
    parameters = [p for function in functions for p in function.parameters()]
    assert len(parameters) == 12
    weights = [torch.randn(2, 3, dtype=torch.double) for _ in range(3)]
    ops = torch.ops.torch_sm3

    def call(a, b, c, memory, *_):
        record = ops.reversible_begin([a, b, c], "")
        f, g = (function._c for function in functions)
        a = ops.reversible_half_residual(record, f, a, [b, c], [memory])
        b = ops.reversible_half_residual(record, g, b, [c, a], [memory])
        streams = ops.reversible_end(record, [a, b, c])
        return sum((w * y.sin()).sum() for w, y in zip(weights, streams, strict=True))

    assert all(
        grad is not None
        for grad in torch.autograd.grad(call(*inputs), [*inputs, *parameters])
    )
    assert torch.autograd.gradcheck(call, [*inputs, *parameters])


def test_inverse_of_what_a_sequence_returned(engine):
    blocks = [AdditiveCoupling(mlp(), mlp()) for _ in range(3)]
    seq, x = ReversibleSequence(*blocks).double(), torch.randn(4, 8).double()
    for got in inverse(seq, *seq(x, x)):
        torch.testing.assert_close(got, x)
