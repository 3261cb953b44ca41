# SPDX-License-Identifier: Apache-2.0
"""Steps that end without waiting for the other ranks, while optimizers step first."""

from __future__ import annotations

import pytest
from helpers import pipeline_ranks_late as late
from helpers.pool import Pools


@pytest.mark.parametrize("kind", ["1f1b", "zb_h2"])
def test_a_rank_begins_its_next_step_while_others_are_in_the_last(
    pools: Pools, kind: str
) -> None:
    # It would hang if a step, or its optimizer step, waited for all ranks.
    losses = pools(3).run(late.does_not_wait, kind)
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("where", ["F", "B", "W"])
@pytest.mark.parametrize("origin", [0, 2])
def test_a_failure_is_raised_by_all_ranks_in_the_same_call(
    pools: Pools, origin: int, where: str, scaled: bool
) -> None:
    answers = pools(3).run(late.failing, "zb_h1", origin, where, scaled)
    assert all(answer == answers[0] for answer in answers[1:]), answers
    raised, differ = answers[0]
    # What the losses do not show is heard in the step after.
    step = late.BAD if where == "F" else late.BAD + 1
    op = {"F": "F", "B": "I", "W": "W"}[where]
    fields = origin, origin, late.M - 1, f"{origin}{op}{late.M - 1}"
    wanted = (*fields, "ArithmeticError", f"in {where}", 0)
    assert raised == [(step, "step", wanted, True)]
    assert differ == []


@pytest.mark.parametrize("where", ["F", "W"])
def test_a_failure_in_one_replica_is_heard_by_all(pools: Pools, where: str) -> None:
    answers = pools(4).run(late.failing_replica, where)
    assert all(answer == answers[0] for answer in answers[1:]), answers
    (raised,), equal = answers[0]
    assert equal
    step, fields = raised
    assert step == late.BAD + (where == "W")
    assert fields[0] == fields[1] == 1 and fields[-1] == 1


@pytest.mark.parametrize("call", ["step", "optimizer_step", "flush", "eval"])
def test_any_other_call_hears_the_other_ranks(pools: Pools, call: str) -> None:
    text = f"pipeline: rank 1 at 1B{late.M - 1}: ArithmeticError: in W"
    assert pools(2).run(late.ended_by, call) == [(text, "0 more steps", True)] * 2


@pytest.mark.parametrize("kind", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("where", "name"), [(0, "inputs"), (1, "target")])
def test_wrong_data_is_named_at_once(
    pools: Pools, where: int, name: str, kind: str
) -> None:
    text = (
        f"step: expected a batch of at least {late.M} samples, one for each "
        f"microbatch, but got 1 (argument '{name}')"
    )
    assert pools(2).run(late.wrong_arguments, kind, where) == [(text, True)] * 2


def test_losses_of_any_reduction_are_the_same(pools: Pools) -> None:
    assert pools(2).run(late.reductions) == [[]] * 2


def test_tokens_of_replicas_are_counted_early(pools: Pools) -> None:
    # 8 tokens in one replica and 9 in the other.
    assert pools(4).run(late.replicated_tokens) == [[]] * 4


def test_optimizer_steps_may_be_validated_later_or_not(pools: Pools) -> None:
    assert pools(3).run(late.alternates) == [[]] * 3
