# SPDX-License-Identifier: Apache-2.0
"""Adasum when ranks die, sleep, disagree or leave in disorder."""

import pytest
from helpers import adasum_ranks
from helpers.processes import free_port, run_ranks

# The timeout of the state is 4 s; a rank must know of a failure 5 s later.
WITHIN = adasum_ranks.SHORT.total_seconds() + 5


@pytest.mark.parametrize("how", ["killed", "stopped", "silent"])
@pytest.mark.parametrize("world", [2, 3])
def test_lost_peer_is_an_error_on_every_live_rank(world, how):
    last = (world - 1,)
    results = run_ranks(
        world, adasum_ranks.lose_a_peer, how, timeout=90, group_timeout=30, may_die=last
    )
    for rank, (failure, again, closing) in enumerate(results[:-1]):
        name, text, seconds = failure
        assert name == "DistBackendError"
        assert "adasum_hook: bucket" in text and "expected rank" in text
        assert f"[rank {rank} of {world}, group" in text
        assert seconds < WITHIN
        # Out of step for good: later calls fail at once, and nothing hangs.
        assert again[0] == "DistBackendError" and again[2] < 1
        assert closing[0] == "nothing" and closing[2] < WITHIN


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_disagree_all_raise(world):
    for rank, (failures, good) in enumerate(
        run_ranks(world, adasum_ranks.disagree, timeout=90)
    ):
        for name, text, _ in failures:
            assert name == "RuntimeError"
            assert "expected the same call on all ranks" in text
            assert "on rank 1" in text and f"[rank {rank} of {world}" in text
        assert good.tolist() == [(1.0 + world) / 2] * 3


def test_close_ends_a_wait():
    results = run_ranks(2, adasum_ranks.close_while_waiting, timeout=60)
    closing, first, second = results[0]
    assert closing[0] == "nothing" and closing[2] < 5
    assert first[0] == second[0] == "RuntimeError"
    assert "closed" in first[1]


def test_end_in_disorder():
    assert run_ranks(2, adasum_ranks.end_in_disorder, timeout=60) == [True, True]


def test_default_group_destroyed_and_made_again():
    results = run_ranks(2, adasum_ranks.default_group_comes_back, free_port())
    assert results == [[1.5, 1.5], [1.5, 1.5]]
