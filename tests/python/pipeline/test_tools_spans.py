# SPDX-License-Identifier: Apache-2.0
"""Spans of the actions in torch's profiler."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from helpers.pipeline_chain import batches, chain, runner_of
from helpers.scenarios import Scenarios
from torch import nn
from torch.profiler import ProfilerActivity, profile

from torch_sm3.pipeline import PipelineError, plan

PREFIX = "torch_sm3.pipeline "
M = 3
two_ranks = Scenarios(2)


def spans_of(profiler: Any) -> list[Any]:
    return [x for x in profiler.events() if x.name.startswith(PREFIX)]


@two_ranks
def profiled(rank: int, ranks: int) -> tuple[list[str], list[str], bool]:
    schedule = plan("zb_h1", ranks, M)
    runner = runner_of(chain(ranks), schedule, rank)
    x, y = batches([3] * M)
    runner.step(microbatches=x, targets=y)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        runner.step(microbatches=x, targets=y)
    runner.step(microbatches=x, targets=y)
    runner.close()
    found, events = spans_of(seen), seen.events()
    # No message that was under way when the profiler ended may write to its memory.
    del seen
    gc.collect()
    wanted = [PREFIX + a.text for a in schedule.lower().actions(rank) if a.op != "."]
    # The forward's operators ran inside its span, the backward's inside its own.
    linear = [x for x in events if x.name == "aten::linear"]
    forwards = [
        x for x in found if x.name.endswith(tuple(f"{rank}F{i}" for i in range(M)))
    ]
    inside = all(
        any(
            f.time_range.start <= x.time_range.start
            and x.time_range.end <= f.time_range.end
            for f in forwards
        )
        for x in linear
    )
    ordered = sorted(found, key=lambda x: x.time_range.start)
    return [x.name for x in ordered], wanted, inside and len(linear) == M


def test_every_action_is_a_span_in_order() -> None:
    for names, wanted, inside in two_ranks.answers(profiled):
        assert names == wanted
        assert inside


class Breaks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise KeyError("no")


def test_a_span_ends_with_its_step_even_if_that_fails() -> None:
    modules = [chain(1)[0], Breaks()]
    runner = runner_of(modules[:1], plan("none", 1, M), 0)
    broken = runner_of(modules[1:], plan("none", 1, M), 0)
    x, y = batches([3] * M)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        with pytest.raises((PipelineError, KeyError)):
            broken.step(microbatches=x, targets=y)
        runner.step(microbatches=x, targets=y)
    names = [x.name for x in sorted(spans_of(seen), key=lambda x: x.time_range.start)]
    row = [PREFIX + a.text for a in plan("none", 1, M).lower().actions(0)]
    assert names[-len(row) :] == row
    assert names.count(row[0]) == 2
    for one in (runner, broken):
        one.close()


def test_nothing_is_noted_while_no_profiler_runs() -> None:
    runner = runner_of(chain(1), plan("none", 1, M), 0)
    x, y = batches([3] * M)
    runner.step(microbatches=x, targets=y)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        torch.ones(1)
    assert spans_of(seen) == []
    runner.close()
