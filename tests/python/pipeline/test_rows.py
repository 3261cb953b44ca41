# SPDX-License-Identifier: Apache-2.0
"""Inputs that broke other implementations: values, microbatches, evals, many steps.

A test is named after the number of its row in the table of section 14.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.pipeline_chain import batches, chain, differing, runner_of
from helpers.pool import Pools
from helpers.scenarios import Scenarios
from reference.pipeline_models import loss_fn, make_batch, make_stages, single_process
from torch import nn
from torch.nn import functional

from torch_sm3.pipeline import Costs, PipelineRunner, Stage, plan, simulate

two_ranks, four_ranks = Scenarios(2), Scenarios(4)


def equal(module: nn.Module, reference: nn.Module) -> bool:
    pairs = zip(module.parameters(), reference.parameters(), strict=True)
    return all(
        (a.grad is None and b.grad is None)
        or (a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad))
        for a, b in pairs
    )


@two_ranks
@four_ranks
def few_microbatches(rank: int, ranks: int) -> dict[str, bool]:
    """Run fewer microbatches than ranks; return which cases are as one process."""
    good = {}
    for kind in ("1f1b", "gpipe"):
        for m in range(1, ranks):
            # A context so long that a microbatch is one sequence.
            tokens, target = make_batch(m, length=512)
            mine, whole = make_stages(ranks), make_stages(ranks)
            runner = PipelineRunner(
                [Stage(mine[rank], rank)], plan(kind, ranks, m), loss_fn=loss_fn
            )
            result = runner.step(tokens, target=target)
            loss, _ = single_process(whole, tokens, target, m)
            same = torch.equal(result.loss, loss) and equal(mine[rank], whole[rank])
            good[f"{kind} {m}"] = same
            runner.close()
    return good


def bubble(kind: str, ranks: int, m: int) -> float:
    """Return the time beyond the work of a rank at F = I = W = 1."""
    return simulate(plan(kind, ranks, m), Costs(F=1, I=1, W=1)).makespan - 3 * m


@pytest.mark.parametrize("scenarios", [two_ranks, four_ranks])
def test_pipeline_row_01_one_microbatch_under_1f1b(scenarios: Scenarios) -> None:
    for good in scenarios.answers(few_microbatches):
        assert good["1f1b 1"]
    assert bubble("1f1b", scenarios.ranks, 1) == 3 * (scenarios.ranks - 1)


def test_pipeline_row_02_gpipe_with_fewer_microbatches_than_ranks() -> None:
    for good in four_ranks.answers(few_microbatches):
        assert good["gpipe 1"] and good["gpipe 2"] and good["gpipe 3"]
        assert all(good.values())
    assert [bubble("gpipe", 4, m) for m in (1, 2, 3)] == [9] * 3


@two_ranks
def ragged(rank: int, ranks: int) -> Any:
    tokens, target = make_batch(8)
    mine, whole = make_stages(ranks), make_stages(ranks)
    runner = PipelineRunner(
        [Stage(mine[rank], rank)],
        plan("1f1b", ranks, 3),
        loss_fn=loss_fn,
        loss_reduction="samples",
    )
    result = runner.step(tokens, target=target, return_outputs=True)
    loss, _ = single_process(whole, tokens, target, 3, [3 / 8, 3 / 8, 2 / 8])
    good = torch.equal(result.loss, loss) and equal(mine[rank], whole[rank])
    # The mean over all samples at once, up to rounding.
    one, _ = single_process(make_stages(ranks), tokens, target, 1)
    torch.testing.assert_close(result.loss, one)
    sizes = [len(output) for output in result.outputs or []]
    runner.close()
    return good, sizes


def test_pipeline_row_03_batch_of_8_in_3_microbatches() -> None:
    assert two_ranks.answers(ragged) == [(True, []), (True, [3, 3, 2])]


class Sometimes(nn.Module):
    """Return a second value, used by the next stage for some microbatches only."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.a(x), self.b(x)


class EvenOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.out = nn.Linear(4, 1)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.out(a + b if self.calls % 2 == 0 else a)


def absent_gradients(rank: int, ranks: int, kind: str) -> Any:
    torch.manual_seed(1)
    mine = [Sometimes(), EvenOnly()]
    torch.manual_seed(1)
    whole = [Sometimes(), EvenOnly()]
    x, y = torch.randn(6, 4), torch.randn(6, 1)
    runner = PipelineRunner(
        [Stage(mine[rank], rank)],
        plan(kind, ranks, 3),
        loss_fn=functional.mse_loss,
        loss_reduction="sum",
    )
    runner.step(x, target=y)
    for part, wanted in zip(x.split(2), y.split(2), strict=True):
        functional.mse_loss(whole[1](*whole[0](part)), wanted).backward()
    good = equal(mine[rank], whole[rank])
    # With one microbatch the second value has no gradient at all.
    mine[rank].zero_grad()
    runner.close()
    mine[1].calls = 0
    runner = PipelineRunner(
        [Stage(mine[rank], rank)], plan(kind, ranks, 1), loss_fn=functional.mse_loss
    )
    runner.step(x, target=y)
    runner.close()
    return good, rank == 1 or mine[0].b.weight.grad is None


@pytest.mark.parametrize("kind", ["1f1b", "zb_h1"])
def test_pipeline_row_05_absent_gradients_stay_absent(pools: Pools, kind: str) -> None:
    assert pools(2).run(absent_gradients, kind) == [(True, True)] * 2


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"x": self.linear(x), "none": None, "three": 3, "list": [True, 0.5, "s"]}


class Checks(nn.Module):
    def forward(self, value: dict[str, Any]) -> torch.Tensor:
        assert list(value) == ["x", "none", "three", "list"]
        assert value["none"] is None and value["list"] == [True, 0.5, "s"]
        assert type(value["three"]) is int and value["three"] == 3
        return value["x"]


@two_ranks
def mixed_values(rank: int, ranks: int) -> None:
    stage = Stage([Mixed(), Checks()][rank], rank)
    runner = PipelineRunner([stage], plan("1f1b", 2, 2), loss_fn=functional.mse_loss)
    runner.step(torch.randn(4, 4), target=torch.randn(4, 4))
    runner.close()


def test_pipeline_row_06_values_that_are_no_tensors_arrive_equal() -> None:
    two_ranks.answers(mixed_values)


@four_ranks
def twenty_steps(rank: int, ranks: int) -> list[float] | None:
    """Train for 20 steps; return the losses if all is as in one process."""
    tokens, target = make_batch(8)
    mine, whole = make_stages(ranks), make_stages(ranks)
    runner = PipelineRunner(
        [Stage(mine[rank], rank)], plan("1f1b", ranks, 8), loss_fn=loss_fn
    )
    losses = []
    for _ in range(20):
        result = runner.step(tokens, target=target)
        loss, _ = single_process(whole, tokens, target, 8)
        if not torch.equal(result.loss, loss) or not equal(mine[rank], whole[rank]):
            return None
        losses.append(result.loss.item())
        with torch.no_grad():
            for parameter in [
                *mine[rank].parameters(),
                *nn.ModuleList(whole).parameters(),
            ]:
                parameter -= 0.05 * parameter.grad
                parameter.grad = None
    runner.close()
    return losses


def test_pipeline_row_08_twenty_steps_of_four_ranks() -> None:
    losses = four_ranks.answers(twenty_steps)
    assert all(own is not None and len(own) == 20 for own in losses)
    assert losses == [losses[0]] * 4


def alone(rank: int, ranks: int) -> list[float]:
    """Train the same model for 20 steps with a runner of one rank."""
    tokens, target = make_batch(8)
    whole = nn.ModuleList(make_stages(4))
    stage = Stage(Chained(whole), 0)
    runner = PipelineRunner([stage], plan("none", 1, 8), loss_fn=loss_fn)
    losses = []
    for _ in range(20):
        losses.append(runner.step(tokens, target=target).loss.item())
        with torch.no_grad():
            for parameter in whole.parameters():
                parameter -= 0.05 * parameter.grad
                parameter.grad = None
    runner.close()
    return losses


class Chained(nn.Module):
    """Run stages one after the other in one process."""

    def __init__(self, stages: nn.ModuleList) -> None:
        super().__init__()
        self.stages = stages

    def forward(self, *value: torch.Tensor) -> Any:
        for stage in self.stages:
            value = stage(*value)
        return value


def test_pipeline_row_25_losses_of_one_and_of_four_ranks_have_the_same_bits() -> None:
    one = alone(0, 1)
    assert all(math.isfinite(loss) for loss in one)
    assert four_ranks.answers(twenty_steps) == [one] * 4


def eval_step_eval(rank: int, ranks: int, deterministic: bool) -> list[str]:
    """Step between evals of other sizes, with dropout; return what they changed."""
    m, wrong = 4, []
    items, targets = batches([2] * m)
    whole = torch.cat(items), torch.cat(targets)
    mine = [chain(ranks, dropout=0.5) for _ in range(2)]
    schedule, options = plan("1f1b", ranks, m), {"deterministic": deterministic}

    def twice(modules: list[nn.Module], evals: bool) -> list[Any]:
        torch.manual_seed(rank)
        runner = runner_of(modules, schedule, rank, **options)
        steps = []
        for _ in range(2):
            if evals:
                runner.eval(whole[0], target=whole[1])
                bare = runner.eval(microbatches=items * 2, return_outputs=True)
                if bare.loss is not None or (bare.outputs is None) == (rank == 1):
                    wrong.append("an eval without a target")
                if any(output.requires_grad for output in bare.outputs or []):
                    wrong.append("outputs with a graph")
            steps.append(runner.step(whole[0], target=whole[1]).losses)
        if evals:
            runner.eval(microbatches=items[:1], targets=targets[:1])
        runner.close()
        return steps

    alone, between = (twice(mine[k], evals=k == 1) for k in range(2))
    if not all(map(torch.equal, alone, between)) or torch.equal(*alone):
        wrong.append("losses")
    return wrong + differing(mine[1], mine[0], [rank])


@pytest.mark.parametrize("deterministic", [False, True])
def test_pipeline_row_12_eval_leaves_no_trace(
    pools: Pools, deterministic: bool
) -> None:
    assert pools(2).run(eval_step_eval, deterministic) == [[]] * 2
