# SPDX-License-Identifier: Apache-2.0
"""Inputs that broke other implementations: links, views, failures, losses.

A test is named after the number of its row in the table of section 14.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import pipeline_ranks_rows as ranks_rows
from helpers.pipeline_chain import accumulate, batches, chain, differing, runner_of
from helpers.pool import Pools
from helpers.scenarios import Scenarios
from reference.pipeline_models import loss_fn, make_batch, make_stages, single_process
from torch import nn
from torch.nn import functional

from torch_sm3.pipeline import (
    Costs,
    PipelineError,
    PipelineRunner,
    Schedule,
    Stage,
    plan,
    simulate,
)

two_ranks, three_ranks, four_ranks = Scenarios(2), Scenarios(3), Scenarios(4)


def equal(module: nn.Module, reference: nn.Module) -> bool:
    pairs = zip(module.parameters(), reference.parameters(), strict=True)
    return all(torch.equal(a.grad, b.grad) for a, b in pairs)


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


class Raises(nn.Module):
    """Raise in one call of all."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.calls_left = -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls_left -= 1
        if self.calls_left == 0:
            raise LookupError("third")
        return self.module(x)


@three_ranks
def stage_1_raises(rank: int, ranks: int) -> Any:
    m = 4
    mine, whole = [Raises(module) for module in chain(ranks)], chain(ranks)
    optimizer = torch.optim.SGD(mine[rank].parameters(), lr=0.1, momentum=0.9)
    items, targets = batches([2] * m)
    runner = runner_of(mine, plan("1f1b", ranks, m), rank)
    # What was accumulated before is gone as well, which the error says.
    runner.step(microbatches=items, targets=targets)
    mine[rank].calls_left = 3 if rank == 1 else -1
    before = [p.detach().clone() for p in mine[rank].parameters()]
    with pytest.raises(PipelineError) as info:
        runner.step(microbatches=items, targets=targets)
    error = info.value
    assert isinstance(error.__cause__, LookupError) == (rank == 1)
    assert all(p.grad is None for p in mine[rank].parameters())
    pairs = zip(before, mine[rank].parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs) and not optimizer.state
    # The links are clean: the next step is that of a run without the failure.
    result = runner.step(microbatches=items, targets=targets)
    runner.close()
    losses = accumulate(whole, items, targets, [1 / m] * m)
    wrong = differing([x.module for x in mine], whole, [rank])
    if not torch.equal(result.losses, torch.stack(losses)):
        wrong.append("losses")
    fields = error.rank, error.stage, error.microbatch, error.action
    return (*fields, error.error_type, error.message), str(error), wrong


def test_pipeline_row_28_stage_1_raises_at_microbatch_2() -> None:
    fields = 1, 1, 2, "1F2", "LookupError", "third"
    for seen, text, wrong in three_ranks.answers(stage_1_raises):
        assert seen == fields and wrong == []
        assert text.startswith("pipeline: rank 1 at 1F2: LookupError: third")
        assert "lost" in text


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


def test_pipeline_row_19_messages_travel_while_ranks_compute(pools: Pools) -> None:
    sent, received = pools(2).run(ranks_rows.slow_link)
    # Rank 0 has run its whole warm-up before its first message is there.
    assert max(sent) < min(received)


def test_pipeline_row_19_a_longer_warm_up_hides_slow_links_on_paper() -> None:
    costs = Costs(F=1, I=1, W=1, latency=0.5)
    spans = [
        simulate(plan("1f1b", 4, 8, warmup=factor, link_cost=0.5), costs).makespan
        for factor in (1, "auto")
    ]
    assert spans[0] / spans[1] == pytest.approx(1.139, abs=1e-3)


def test_pipeline_row_21_an_argument_reaches_only_stages_that_name_it(
    pools: Pools,
) -> None:
    """As where only some microbatches and stages are checkpointed."""
    assert pools(2).run(ranks_rows.partly_checkpointed) == [
        ([], [True, False, True, False]),
        ([], []),
    ]
