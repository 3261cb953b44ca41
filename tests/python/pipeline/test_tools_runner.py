# SPDX-License-Identifier: Apache-2.0
"""Traces and reports of steps that really ran."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.pipeline_chain import WIDTH, batches, chain, runner_of
from helpers.scenarios import Scenarios
from torch import nn

from torch_sm3.pipeline import Costs, PipelineError, plan, plot, simulate
from torch_sm3.pipeline.trace import Trace, load_trace

two_ranks, three_ranks = Scenarios(2), Scenarios(3)
M, NAP = 4, 0.02


class _Nap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        time.sleep(2 * ctx.seconds)
        return grad, None


class Sleepy(nn.Module):
    """Takes a time of its own for the forward and twice that for the backward."""

    def __init__(self, body: nn.Module, seconds: float) -> None:
        super().__init__()
        self.body = body
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Nap.apply(self.body(x), self.seconds)


@two_ranks
def traced(rank: int, ranks: int) -> dict[str, Any]:
    modules = [Sleepy(x, NAP * (1 + i)) for i, x in enumerate(chain(ranks))]
    schedule = plan("1f1b", ranks, M)
    runner = runner_of(modules, schedule, rank, trace=True)
    x, y = batches([3] * M)
    for _ in range(3):
        runner.step(microbatches=x, targets=y)
    runner.eval(microbatches=x, targets=y)
    said = runner.report()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        runner.save_trace(path)
        runner.step(microbatches=x, targets=y)  # the links are as they were
        found: dict[str, Any] = {"report": said.to_dict(), "text": str(said)}
        if rank == 0:
            trace = Trace.load(path)
            found["events"] = json.loads(path.read_text())["traceEvents"]
            found["costs"] = load_trace(path)
            found["steps"] = [len(own) for own in trace.steps]
            found["schedule"] = trace.schedule.text
            found["svg"] = plot(trace).svg()
            found["errors"] = trace.errors
        else:
            found["written"] = path.exists()
    runner.close()
    return found


def test_a_step_is_reported_alike_on_all_ranks() -> None:
    first, second = two_ranks.answers(traced)
    assert first["report"] == second["report"] and first["text"] == second["text"]
    said = first["report"]
    for rank, figures in enumerate(said["measured"]):
        # A sleep is never shorter than asked for.
        assert figures["busy"] >= M * 3 * NAP * (1 + rank)
        assert figures["busy"] + figures["bubble"] == pytest.approx(said["makespan"])
        assert 0 <= figures["waiting"] <= figures["bubble"] + 1e-3
    assert said["largest_stage"] == 1
    assert any("stage 1 is the largest" in hint for hint in said["hints"])
    # Rank 0 has half of the work and waits for the rest.
    assert said["measured"][0]["waiting"] > M * 3 * NAP / 2
    assert said["predicted_makespan"] == pytest.approx(said["makespan"], rel=0.2)


def test_a_step_is_traced_with_measured_costs() -> None:
    found, other = two_ranks.answers(traced)
    assert other["written"] is False
    assert found["steps"] == [3, 3]
    assert found["schedule"] == plan("1f1b", 2, M).lower().text
    costs: Costs = found["costs"]
    for stage in range(2):
        assert NAP * (1 + stage) <= costs.F[stage] < NAP * (1 + stage) + 0.5 * NAP
        assert 2 * NAP * (1 + stage) <= costs.B[stage] < 2 * NAP * (1 + stage) + NAP
    # All clocks are set by that of the last stage's rank.
    assert found["errors"][1] == 0 and 0 < found["errors"][0] < 50_000_000
    spans = [x for x in found["events"] if x["ph"] == "X"]
    assert {x["name"] for x in spans} >= {"torch_sm3.pipeline 1B3"}
    # On one clock no message is used before it was sent.
    starts = {x["id"]: x["ts"] for x in found["events"] if x["ph"] == "s"}
    ends = {x["id"]: x["ts"] for x in found["events"] if x["ph"] == "f"}
    slack = found["errors"][0] / 1000
    assert starts and all(ends[key] >= starts[key] - slack for key in starts)
    assert found["svg"].count('class="box B"') == 2 * 2 * M


def test_a_traced_step_can_be_planned_anew() -> None:
    costs = two_ranks.answers(traced)[0]["costs"]
    schedule = plan("zb_h1", 2, M, costs=costs)
    assert 0 < simulate(schedule, costs).makespan < 1


@three_ranks
def gathered(rank: int, ranks: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    # The last stage is on the last rank, then on the first.
    for kind, chunks in (("1f1b", 1), ("zbv", 2)):
        schedule = plan(kind, ranks, M)
        runner = runner_of(chain(chunks * ranks), schedule, rank, trace=True)
        x, y = batches([3] * M)
        runner.step(microbatches=x, targets=y)
        said = runner.report()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            runner.save_trace(path)
            trace = Trace.load(path) if path.exists() else None
        found[kind] = str(said), trace and (trace.errors, len(trace.steps))
        runner.close()
    return found


@pytest.mark.parametrize(("kind", "hub"), [("1f1b", 2), ("zbv", 0)])
def test_more_than_two_ranks_are_gathered(kind: str, hub: int) -> None:
    first, *others = [answer[kind] for answer in three_ranks.answers(gathered)]
    assert all(text == first[0] and trace is None for text, trace in others)
    errors, ranks = first[1]
    assert ranks == 3
    assert [rank for rank, error in enumerate(errors) if error == 0] == [hub]


@two_ranks
def untraced(rank: int, ranks: int) -> list[str]:
    runner = runner_of(chain(ranks), plan("1f1b", ranks, M), rank)
    said = []
    for call in (runner.report, lambda: runner.save_trace("never.json")):
        try:
            call()
        except RuntimeError as error:
            said.append(str(error))
    runner.close()
    return said


def test_without_trace_there_is_nothing_to_report() -> None:
    for said in two_ranks.answers(untraced):
        assert len(said) == 2
        assert all("expected trace=True for reports and traces" in x for x in said)


@two_ranks
def broken(rank: int, ranks: int) -> tuple[int, str]:
    class Breaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0
            self.body = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls == M + 2:
                raise KeyError("no")
            return self.body(x)

    modules = chain(ranks)
    modules[1] = Breaks()
    runner = runner_of(modules, plan("1f1b", ranks, M), rank, trace=True)
    x, y = batches([3] * M)
    runner.step(microbatches=x, targets=y)
    with pytest.raises(PipelineError):
        runner.step(microbatches=x, targets=y)
    said = runner.report()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        runner.save_trace(path)
        count = len(Trace.load(path).steps[0]) if rank == 0 else 2
    runner.close()
    return count, said.kind


def test_a_failed_step_stays_in_the_trace_and_the_one_before_is_reported() -> None:
    assert two_ranks.answers(broken) == [(2, "1f1b")] * 2


def test_one_rank_is_traced() -> None:
    runner = runner_of(chain(1), plan("none", 1, 2), 0, trace=True)
    x, y = batches([3, 2])
    runner.step(microbatches=x, targets=y)
    said = runner.report()
    assert said.measured[0].busy > 0 and said.largest_stage == 0
    runner.close()


def test_before_a_step_there_is_nothing_to_report() -> None:
    runner = runner_of(chain(1), plan("none", 1, 1), 0, trace=True)
    with pytest.raises(ValueError, match="expected a complete step, but got none"):
        runner.report()
    runner.close()
