# SPDX-License-Identifier: Apache-2.0
"""Bytes: what the ranks count is what the verifier says, action by action."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.memory_meter import memory_meter
from helpers.pipeline_chain import squared
from helpers.pipeline_ranks_stashed import (
    MODELS,
    ROWS,
    UNIT,
    WIDTH,
    Checkpointed,
    Reversible,
    Twice,
    all_kinds,
    counted,
    linear,
)
from helpers.scenarios import Scenarios
from torch import nn
from torch.utils.checkpoint import checkpoint

from torch_sm3 import reversible
from torch_sm3.pipeline import (
    PipelineRunner,
    Schedule,
    Stage,
    live_bytes,
    plan,
    profile,
    verify,
)
from torch_sm3.pipeline.trace import Trace, load_trace

two_ranks = Scenarios(2)
four_ranks = Scenarios(4)


@two_ranks
def small(rank: int, ranks: int) -> list[str]:
    wrong = all_kinds(rank, ranks, ["tanh", "pairs"])
    schedule = plan("zb_h1", ranks, 3)
    for model in ("checkpoint", "reversible", "twice"):
        wrong += counted(model, schedule, rank)
    return wrong + counted("relu", plan("1f1b", ranks, 4), rank, max_pending=1)


def test_pipeline_row_13_live_bytes_are_the_verifiers() -> None:
    for wrong in two_ranks.answers(small):
        assert not wrong, "\n".join(wrong[:20])


@four_ranks
def large(rank: int, ranks: int) -> list[str]:
    return all_kinds(rank, ranks, list(MODELS))


@pytest.mark.slow
def test_pipeline_row_13_live_bytes_of_four_ranks() -> None:
    for wrong in four_ranks.answers(large):
        assert not wrong, "\n".join(wrong[:20])


@pytest.mark.parametrize("model", ["relu", "checkpoint", "reversible", "pairs"])
def test_what_goes_to_a_stage_of_the_same_rank_is_counted_once(model: str) -> None:
    # The output of a custom Function, as of a reentrant checkpoint, cannot be freed:
    # it is gone as soon as nobody holds it.
    schedule = Schedule.parse(
        "schedule 1 kind=x ranks=1 stages=4 microbatches=2 placement=0,0,0,0\n"
        "rank 0: 0F0 1F0 2F0 3F0 0F1 1F1 3B0 2F1 2B0 1B0 3F1 0B0 3B1 2B1 1B1 0B1\n"
    )
    assert counted(model, schedule, 0) == []


@two_ranks
def unequal(rank: int, ranks: int) -> dict[str, Any]:
    """Let stage 1 keep six times as much as stage 0."""
    torch.manual_seed(0)
    modules = [
        nn.Sequential(linear(), nn.Tanh()),
        nn.Sequential(*(nn.Sequential(linear(), nn.Tanh()) for _ in range(6))),
    ]
    stages = [Stage(module, s) for s, module in enumerate(modules)]
    items = [torch.randn(ROWS, WIDTH) for _ in range(6)]
    costs = profile(
        stages, items[0], target=items[1], loss_fn=nn.functional.mse_loss, repeats=1
    )
    roomy = verify(plan("gpipe", ranks, 6), memory=costs, max_pending=2).peak_bytes
    tight = verify(plan("1f1b", ranks, 6), memory=costs, max_pending=2).peak_bytes
    # Rank 0 has room for everything, rank 1 for one microbatch.
    limit = [roomy[0], tight[1]]
    schedule = plan("auto", ranks, 6, costs=costs, memory_limit=limit)
    runner = PipelineRunner(
        [stages[rank]], schedule, loss_fn=nn.functional.mse_loss, trace=True
    )
    for _ in range(2):
        runner.step(microbatches=items, targets=items)
    said = runner.report()
    runner.close()
    static = costs.static_bytes
    assert isinstance(static, tuple)
    return {
        "peaks": [x.peak_bytes for x in said.measured],
        "predicted": [x.peak_bytes for x in said.predicted],
        "limit": [a - b for a, b in zip(limit, static, strict=True)],
        "text": str(said),
    }


def test_pipeline_row_26_stages_of_unequal_memory() -> None:
    first, second = two_ranks.answers(unequal)
    assert first == second
    peaks, limit = first["peaks"], first["limit"]
    # Each rank has a peak of its own, shown beside the predicted one, and keeps to a
    # limit of its own.
    assert 0 < peaks[0] != peaks[1] > 0
    assert all(a <= b for a, b in zip(peaks, limit, strict=True)), (peaks, limit)
    assert all(a <= b for a, b in zip(peaks, first["predicted"], strict=True))
    assert first["text"].count("KiB") >= 4


MODULES: dict[str, tuple[Any, list[float]]] = {
    # Activation, released at I, shared with the output, in tensors of ROWS x WIDTH.
    "a Linear keeps its input, and its gradient": (linear, [1, -1, 0]),
    "Tanh's result is the output": (nn.Tanh, [1, 1, 1]),
    "ReLU's result is the output": (
        lambda: nn.Sequential(linear(), nn.ReLU()),
        [2, 0, 1],
    ),
    "adding keeps nothing": (nn.Identity, [0, 0, 0]),
    "two layers": (
        lambda: nn.Sequential(linear(), nn.Tanh(), linear()),
        [2, -2, 0],
    ),
    "one weight twice": (Twice, [2, -2, 0]),
    "checkpoint": (lambda: Checkpointed(False), [1, 1, 0]),
    "reentrant checkpoint": (lambda: Checkpointed(True), [1, 1, 0]),
    "frozen": (lambda: linear().requires_grad_(False), [0, 0, 0]),
    "whole": (lambda: linear(), [1, 1, 0]),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_profile_counts_what_a_stage_keeps(name: str) -> None:
    make, wanted = MODULES[name]
    stages = [
        Stage(linear(), 0),
        Stage(make(), 1, split=name != "whole" and "auto"),
        Stage(linear(), 2),
    ]
    costs = profile(stages, torch.randn(ROWS, WIDTH), repeats=1, warmup=0)
    found = [
        getattr(costs, field)[1] / UNIT
        for field in ("activation_bytes", "released_at_input", "shared_bytes")
    ]
    assert found == wanted
    assert costs.boundary_bytes == (UNIT, UNIT, 0)


def test_a_reversible_stage_keeps_its_last_pair_whatever_its_depth() -> None:
    stages = [Stage(linear(), 0), Stage(Reversible(), 1), Stage(linear(), 2)]
    costs = profile(stages, torch.randn(ROWS, WIDTH), repeats=1)
    # The pair is joined to one tensor, so the output is another one.
    assert costs.activation_bytes[1] == UNIT and costs.shared_bytes[1] == 0


SCHEDULE = Schedule.parse(
    "schedule 1 kind=x ranks=1 stages=2 microbatches=3 placement=0,0\n"
    "rank 0: 0F0 0F1 1F0 1F1 0F2 1F2 1B2 1I0 0I0 1W0 0W0 1B1 0B1 0B2\n"
)


def traced() -> tuple[Trace, int]:
    """Run both stages here; return the trace and the allocator's peak."""
    torch.manual_seed(0)
    items = [torch.randn(ROWS, WIDTH) for _ in range(3)]
    stages = [
        Stage(nn.Sequential(linear(), nn.Tanh()), 0),
        Stage(nn.Sequential(linear(), nn.Tanh(), linear()), 1),
    ]
    runner = PipelineRunner(stages, SCHEDULE, loss_fn=squared, trace=True)
    for _ in range(2):
        runner.step(microbatches=items, targets=items)
    with memory_meter() as meter:
        runner.step(microbatches=items, targets=items)
    trace = runner._session.trace(everywhere=True)
    runner.close()
    assert isinstance(trace, Trace)
    return trace, meter.peak


def test_the_count_is_near_what_the_allocator_says() -> None:
    trace, allocated = traced()
    counted_peak = max(trace.steps[0][-1].peak)
    # The losses, the factors of their gradients, and what operators make inside.
    assert counted_peak <= allocated <= counted_peak + UNIT / 8
    assert max(trace.steps[0][-1].live) <= counted_peak


def test_a_trace_tells_the_bytes_that_it_counted(tmp_path: Any) -> None:
    trace, _ = traced()
    trace.save(tmp_path / "t.json")
    costs = load_trace(tmp_path / "t.json")
    for stamps in trace.steps[0]:
        assert list(stamps.live) == live_bytes(trace.schedule, 0, costs)
        assert stamps.live[-1] == 0
    peak = verify(trace.schedule, memory=costs).peak_bytes[0]
    assert peak >= max(trace.steps[0][-1].peak)
    assert Trace.load(tmp_path / "t.json").max_pending == 2


# --- what stays in flight --------------------------------------------------

RANKS, MICROBATCHES = 4, 8


class Chain(nn.Module):
    """Eight couplings or MLPs: stored, checkpointed as a whole, or reversible."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.blocks = nn.ModuleList(
            reversible.AdditiveCoupling(mlp(), mlp()) for _ in range(8)
        )
        self.sequence = reversible.ReversibleSequence(*self.blocks)

    def stored(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for block in self.blocks:
            a, b = block(a, b)
        return a, b

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> Any:
        if self.way == "reversible":
            return tuple(self.sequence(a, b))
        if self.way == "checkpoint":
            return checkpoint(self.stored, a, b, use_reentrant=False)
        return self.stored(a, b)


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, 4 * WIDTH),
        nn.GELU(),
        nn.Linear(4 * WIDTH, WIDTH),
    )


def peaks_of(way: str) -> tuple[list[float], Any]:
    """Return the peak of each rank under 1f1b, static bytes aside, and the costs."""
    rows = 32 * ROWS
    costs = profile(
        [Stage(Chain(way), s) for s in range(RANKS)],
        tuple(torch.randn(2, rows, WIDTH)),
        target=torch.randn(rows, WIDTH),
        loss_fn=lambda pair, y: squared(pair[0] + pair[1], y),
        repeats=1,
        warmup=0,
    )
    peaks = verify(plan("1f1b", RANKS, MICROBATCHES), memory=costs).peak_bytes
    static = costs.static_bytes
    assert isinstance(static, tuple)
    return [a - b for a, b in zip(peaks, static, strict=True)], costs


def test_recomputing_stages_keep_boundaries_and_one_stage_or_block() -> None:
    torch.manual_seed(0)
    stored, plain = peaks_of("stored")
    pair = plain.boundary_bytes[0]
    stage = plain.activation_bytes[0]
    for way, once in (("checkpoint", stage), ("reversible", stage / 8)):
        peaks, costs = peaks_of(way)
        assert costs.activation_bytes[1] == pair, way
        assert peaks[0] <= 0.5 * stored[0], way
        for rank in range(RANKS):
            # Beside the microbatches in flight: one message each way that waits, and
            # what comes and goes.
            boundaries = RANKS - rank + 3
            assert peaks[rank] <= pair * boundaries + 1.2 * once, (way, rank)
