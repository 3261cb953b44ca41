# SPDX-License-Identifier: Apache-2.0
"""Adasum when ranks die, sleep, skip or leave in disorder."""

import re

import pytest
from helpers import adasum_ranks_failures as ranks
from helpers.adasum_expect import assert_adasum
from helpers.pool import Pool
from helpers.processes import free_port

# A rank must know of a failure within the timeout of its state and 5 s.
WITHIN = ranks.SHORT.total_seconds() + 5

# Where an exchange may stand when a peer is lost.
PHASES = "header|data|(sums of )?inner products|(largest )?exponents|weights|result"


def assert_names_all(failure, rank, size, bucket=r"0 of .*('4.weight'|\[7, 150\]).*"):
    """Check what the error of a lost peer says, and when."""
    name, text, seconds = failure
    assert name == "DistBackendError"
    # Operation, bucket, parameters, phase, peer, place.
    assert re.match(
        rf"adasum_hook: bucket {bucket}, ({PHASES})[^:]*: expected rank \d",
        text,
    ), text
    assert f"[rank {rank} of {size}, group" in text
    assert seconds < WITHIN


def assert_lost(results, lost):
    for rank, failures in enumerate(results):
        if rank == lost:
            continue
        first, *again, closing = failures
        assert_names_all(first, rank, len(results))
        # Out of step for good: later calls fail at once, and nothing hangs.
        for name, _, seconds in again:
            assert name == "DistBackendError" and seconds < 1
        assert closing[0] == "nothing" and closing[2] < WITHIN


@pytest.mark.parametrize(("size", "who"), [(2, 1), (3, 0), (3, 2)])
def test_killed_process(pools, size, who):
    # Rank 0 is where the ranks met; its store dies with it.
    results = pools(size).run(ranks.lose_a_peer, "killed", who, lost=(who,))
    assert_lost(results, who)


@pytest.mark.parametrize("size", [2, 3])
def test_stopped_process(pools, size):
    who = size - 1
    results = pools(size).run(ranks.lose_a_peer, "stopped", who, lost=(who,))
    assert_lost(results, who)


@pytest.mark.parametrize(("size", "algorithm"), [(2, "vhdd"), (2, "gram"), (3, "gram")])
def test_rank_that_never_calls(pools, size, algorithm):
    who = size - 1
    results = pools(size).run(ranks.lose_a_peer, "silent", who, algorithm)
    assert_lost(results, who)


@pytest.mark.parametrize("size", [2, 3])
def test_process_killed_within_a_backward(pools, size):
    results = pools(size).run(ranks.lose_a_peer_within_a_backward, lost=(size - 1,))
    # Bucket 0 was under way; it may be through before the process is gone.
    buckets = r"(0 of .*\[7, 150\]|1 of .*\[200, 16\]).*"
    for rank, failure in enumerate(results[:-1]):
        assert_names_all(failure, rank, size, buckets)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("step", "error"),
    [
        # The headers of the first iterations tell all ranks at once; after that the
        # tags of the messages keep ranks that are out of step apart.
        (1, "RuntimeError"),
        (4, "DistBackendError"),
    ],
)
def test_rank_that_skips_a_bucket(pools, size, step, error):
    results = pools(size).run(ranks.skip_a_bucket, step)
    for failures, _, _ in results:
        assert [name for name, *_ in failures[:step]] == ["nothing"] * step
        name, text, seconds = failures[step]
        assert name == error and seconds < WITHIN
        assert "adasum_hook: bucket" in text
    assert_adasum([after for *_, after in results], [leaf for _, leaf, _ in results])


@pytest.mark.parametrize("size", [2, 3])
def test_close_ends_a_wait(pools, size):
    closing, *waits, later = pools(size).run(ranks.close_while_waiting)[0]
    assert closing[0] == "nothing" and closing[2] < 5
    for name, text, _ in (*waits, later):
        assert name == "RuntimeError" and "close" in text


def test_close_from_two_threads(pools):
    for found in pools(2).run(ranks.close_from_two_threads):
        assert sorted(name for name, *_ in found)[:2] == [
            "RuntimeError",
            "nothing",
        ] or [name for name, *_ in found] == ["nothing", "nothing"]


@pytest.mark.parametrize("in_flight", [False, True])
def test_ranks_that_leave_in_any_order(in_flight):
    pool = Pool(4, "spawn")
    assert all(pool.run(ranks.leave_in_disorder, in_flight))
    assert pool.leave() == [0, 0, 0, 0]


def test_default_group_destroyed_and_made_again():
    pool = Pool(2, "spawn")
    results = pool.run(ranks.default_group_comes_back, free_port())
    assert results == [[1.5, 1.5], [1.5, 1.5]]
    assert pool.leave() == [0, 0]
