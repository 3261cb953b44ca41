# SPDX-License-Identifier: Apache-2.0
"""Inputs that broke other implementations: rows of section 14 that hold already.

A test is named after the number of its row in the table.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.scenarios import Scenarios
from reference.pipeline_models import loss_fn, make_batch, make_stages, single_process
from torch import nn
from torch.nn import functional

from torch_sm3.pipeline import PipelineError, PipelineRunner, Schedule, Stage, plan

two_ranks, three_ranks, four_ranks = Scenarios(2), Scenarios(3), Scenarios(4)


def equal(module: nn.Module, reference: nn.Module) -> bool:
    pairs = zip(module.parameters(), reference.parameters(), strict=True)
    return all(
        (a.grad is None and b.grad is None)
        or (a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad))
        for a, b in pairs
    )


@four_ranks
def one_microbatch(rank: int, ranks: int) -> bool:
    tokens, target = make_batch(4)
    mine, whole = make_stages(ranks), make_stages(ranks)
    good = []
    for kind in ("1f1b", "gpipe"):
        for m in range(1, ranks):
            runner = PipelineRunner(
                [Stage(mine[rank], rank)], plan(kind, ranks, m), loss_fn=loss_fn
            )
            result = runner.step(tokens, target=target)
            loss, _ = single_process(whole, tokens, target, m)
            good += [torch.equal(result.loss, loss), equal(mine[rank], whole[rank])]
            runner.close()
            for module in (mine[rank], *whole):
                module.zero_grad()
    return all(good)


def test_pipeline_row_1_and_2_fewer_microbatches_than_ranks() -> None:
    assert four_ranks.answers(one_microbatch) == [True] * 4


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


def test_pipeline_row_3_batch_of_8_in_3_microbatches() -> None:
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


@two_ranks
def absent_gradients(rank: int, ranks: int) -> Any:
    torch.manual_seed(1)
    mine = [Sometimes(), EvenOnly()]
    torch.manual_seed(1)
    whole = [Sometimes(), EvenOnly()]
    x, y = torch.randn(6, 4), torch.randn(6, 1)
    runner = PipelineRunner(
        [Stage(mine[rank], rank)],
        plan("1f1b", ranks, 3),
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
        [Stage(mine[rank], rank)], plan("1f1b", ranks, 1), loss_fn=functional.mse_loss
    )
    runner.step(x, target=y)
    runner.close()
    return good, rank == 1 or mine[0].b.weight.grad is None


def test_pipeline_row_5_absent_gradients_stay_absent() -> None:
    assert two_ranks.answers(absent_gradients) == [(True, True)] * 2


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


def test_pipeline_row_6_values_that_are_no_tensors_arrive_equal() -> None:
    two_ranks.answers(mixed_values)


@four_ranks
def twenty_steps(rank: int, ranks: int) -> bool:
    tokens, target = make_batch(8)
    mine, whole = make_stages(ranks), make_stages(ranks)
    runner = PipelineRunner(
        [Stage(mine[rank], rank)], plan("1f1b", ranks, 8), loss_fn=loss_fn
    )
    for _ in range(20):
        result = runner.step(tokens, target=target)
        loss, _ = single_process(whole, tokens, target, 8)
        if not torch.equal(result.loss, loss) or not equal(mine[rank], whole[rank]):
            return False
        with torch.no_grad():
            for parameter in [
                *mine[rank].parameters(),
                *nn.ModuleList(whole).parameters(),
            ]:
                parameter -= 0.05 * parameter.grad
                parameter.grad = None
    runner.close()
    return True


def test_pipeline_row_8_and_25_twenty_steps_of_four_ranks() -> None:
    assert four_ranks.answers(twenty_steps) == [True] * 4


@two_ranks
def eval_step_eval(rank: int, ranks: int) -> bool:
    tokens, target = make_batch(8)
    mine = make_stages(ranks)[rank]
    runner = PipelineRunner(
        [Stage(mine, rank)], plan("1f1b", ranks, 4), loss_fn=loss_fn
    )
    runner.step(tokens, target=target)
    alone = [p.grad.clone() for p in mine.parameters()]
    mine.zero_grad()
    first = runner.eval(tokens, target=target, return_outputs=True)
    runner.step(tokens, target=target)
    second = runner.eval(tokens, target=target)
    bare = runner.eval(tokens, return_outputs=True)
    runner.close()
    assert bare.loss is None and (bare.outputs is None) == (rank == 0)
    if rank == 1:
        assert not any(output.requires_grad for output in first.outputs)
    return torch.equal(first.loss, second.loss) and all(
        torch.equal(a, p.grad) for a, p in zip(alone, mine.parameters(), strict=True)
    )


def test_pipeline_row_12_eval_leaves_no_trace() -> None:
    assert two_ranks.answers(eval_step_eval) == [True] * 2


INTERLEAVED = """
schedule 1 kind=interleaved ranks=2 stages=4 microbatches=4 placement=loop
rank 0: 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
rank 1: 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3
"""


@two_ranks
def two_links_to_one_peer(rank: int, ranks: int) -> bool:
    tokens, target = make_batch(8)
    mine, whole = make_stages(4), make_stages(4)
    own = [rank, rank + 2]
    runner = PipelineRunner(
        [Stage(mine[s], s) for s in own], Schedule.parse(INTERLEAVED), loss_fn=loss_fn
    )
    result = runner.step(tokens, target=target)
    again = runner.eval(tokens, target=target)
    loss, _ = single_process(whole, tokens, target, 4)
    runner.close()
    return (
        torch.equal(result.loss, loss)
        and torch.equal(again.loss, loss)
        and all(equal(mine[s], whole[s]) for s in own)
    )


def test_pipeline_row_17_two_chunks_on_each_of_two_ranks() -> None:
    assert two_ranks.answers(two_links_to_one_peer) == [True] * 2


class ViewOut(nn.Module):
    """Return views of one tensor, and the input itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        both = self.linear(x)
        return both[:, :4], both[:, 4:].t(), both, x


class ViewIn(nn.Module):
    def forward(self, a: Any, b: Any, both: Any, x: Any) -> torch.Tensor:
        return (a * b.t()).sum(1) + both.mean(1) + x.sum(1)


@two_ranks
def views(rank: int, ranks: int) -> bool:
    torch.manual_seed(2)
    mine = [ViewOut(), ViewIn()]
    torch.manual_seed(2)
    whole = [ViewOut(), ViewIn()]
    x, y = torch.randn(4, 4), torch.randn(4)
    runner = PipelineRunner(
        [Stage(mine[rank], rank)],
        plan("1f1b", 2, 2),
        loss_fn=functional.mse_loss,
        loss_reduction="sum",
    )
    runner.step(x, target=y)
    runner.close()
    for part, wanted in zip(x.split(2), y.split(2), strict=True):
        functional.mse_loss(whole[1](*whole[0](part)), wanted).backward()
    return rank == 1 or torch.allclose(
        mine[0].linear.weight.grad, whole[0].linear.weight.grad
    )


def test_pipeline_row_20_outputs_that_are_views() -> None:
    assert two_ranks.answers(views) == [True] * 2


@three_ranks
def stage_1_raises(rank: int, ranks: int) -> Any:
    class Raises(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if rank == 1 and self.calls == 3:
                raise LookupError("third")
            return self.linear(x)

    runner = PipelineRunner(
        [Stage(Raises(), rank)], plan("1f1b", ranks, 4), loss_fn=functional.mse_loss
    )
    with pytest.raises(PipelineError) as info:
        runner.step(torch.randn(4, 4), target=torch.randn(4, 4))
    runner.step(torch.randn(4, 4), target=torch.randn(4, 4))
    runner.close()
    return info.value.stage, info.value.microbatch, str(info.value)


def test_pipeline_row_28_stage_1_raises_at_microbatch_2() -> None:
    text = "pipeline: rank 1 at 1F2: LookupError: third"
    assert three_ranks.answers(stage_1_raises) == [(1, 2, text)] * 3


@four_ranks
def loss_everywhere(rank: int, ranks: int) -> tuple[float, list[float]]:
    tokens, target = make_batch(8)
    # Two pipelines side by side: each runner has the ranks of its own group.
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    stage = rank % 2
    runner = PipelineRunner(
        [Stage(make_stages(2)[stage], stage)],
        plan("1f1b", 2, 4),
        group=groups[rank // 2],
        loss_fn=loss_fn,
    )
    half = slice(0, 4) if rank < 2 else slice(4, 8)
    result = runner.step(tokens[half], target=target[half])
    runner.close()
    return result.loss.item(), result.losses.tolist()


def test_pipeline_row_29_the_loss_is_on_every_rank_of_its_group() -> None:
    a, b, c, d = four_ranks.answers(loss_everywhere)
    assert a == b and c == d and a != c
    assert a[0] == pytest.approx(sum(a[1]) / 4)
