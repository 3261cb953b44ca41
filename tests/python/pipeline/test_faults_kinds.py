# SPDX-License-Identifier: Apache-2.0
"""Failures at every kind of action, under every kind of schedule, and in user code."""

from __future__ import annotations

import pytest
from helpers import pipeline_ranks_faults as ranks_faults
from helpers.pool import Pools


@pytest.mark.parametrize(
    "kind", ["gpipe", "1f1b", "interleaved", "zb_h1", "zbv", "v_min", "dualpipe_v"]
)
def test_a_raise_at_every_operation_reaches_all_ranks(pools: Pools, kind: str) -> None:
    assert pools(2).run(ranks_faults.everywhere, kind) == [[]] * 2


@pytest.mark.parametrize("kind", ["zb_h2", "zbv"])
def test_a_raise_reaches_three_ranks(pools: Pools, kind: str) -> None:
    assert pools(3).run(ranks_faults.everywhere, kind) == [[]] * 3


def test_a_raise_in_data_loss_or_iterator(pools: Pools) -> None:
    wanted = [
        (0, "0F0", "LookupError", "no data"),
        True,
        (2, "2F0", "LookupError", "no loss"),
        True,
        (0, "0F2", "LookupError", "no item"),
        True,
    ]
    assert pools(3).run(ranks_faults.in_user_code) == [wanted] * 3


@pytest.mark.parametrize("late", [False, True])
def test_a_raise_in_a_hook_reaches_all_replicas(pools: Pools, late: bool) -> None:
    action = "REDUCE_GRAD" if late else "1REDUCE_GRAD"
    wanted = [(1, action, "LookupError", 1), True]
    assert pools(4).run(ranks_faults.in_hook, late) == [wanted] * 4


def test_pipeline_row_22_interleaved_with_fewer_microbatches_than_ranks(
    pools: Pools,
) -> None:
    assert pools(6).run(ranks_faults.many_ranks) == [True] * 6


@pytest.mark.parametrize("victim", [0, 3])
@pytest.mark.parametrize("where", ["W", "hook", "OPTIM"])
def test_a_process_that_ends_has_one_name_in_all_replicas(
    pools: Pools, victim: int, where: str
) -> None:
    answers = pools(4).run(ranks_faults.replica_ends, victim, where, lost=(victim,))
    # A rank is told by its place in its pipeline, and by the replica.
    stage, replica = victim % 2, victim // 2
    text = f"rank {stage} ended or left the pipeline"
    wanted = ((stage, stage, 0, "", "PeerLost", text, replica), True, True)
    expected = [wanted] * 4
    expected[victim] = None
    assert answers == expected


def test_silence_in_one_replica_has_one_name_and_holds_up_no_close(
    pools: Pools,
) -> None:
    answers = pools(4).run(ranks_faults.replica_silent)
    assert answers == [answers[0]] * 4
    (*_, error_type, _, _), soon = answers[0]
    assert (error_type, soon) == ("TimeoutError", True)
