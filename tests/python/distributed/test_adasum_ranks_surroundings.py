# SPDX-License-Identifier: Apache-2.0
"""Adasum over Gloo processes beside scalers, compilers, threads, other messages."""

import pytest
import torch
from helpers import adasum_ranks_surroundings as ranks
from helpers.adasum_expect import assert_adasum, assert_same, sides


def test_adasum_row_7_scales_of_two_and_clipping_change_no_bit(pool):
    results = pool.run(ranks.scaled)
    want, *others = results[0].values()
    for result in (*others, *(end for rank in results for end in rank.values())):
        assert_same(result, want)


def test_adasum_row_7_an_overflow_on_one_rank_skips_the_step_of_all(pool):
    for rank in pool.run(ranks.overflow):
        scales, moved, finite = zip(*rank, strict=True)
        assert scales == (1024.0, 512.0, 512.0, 512.0)
        assert moved == (True, False, True, True)
        assert all(finite)


def test_what_is_not_finite_on_one_rank_spoils_that_layer_on_all(pool):
    before, after = sides(pool.run(ranks.nan_on_one_rank))
    for result in after:
        if pool.size == 1:
            torch.testing.assert_close(result, before[0], equal_nan=True)
            continue
        assert bool(result[0].isnan().all()) and bool(result[2].isnan().all())
    if pool.size > 1:
        assert_adasum([r[1::2] for r in after], [b[1::2] for b in before])


def test_compression_hooks_around_the_hook(pool):
    results = pool.run(ranks.compressed)
    for name in results[0]:
        before, after = sides([rank[name] for rank in results])
        assert_adasum(after, before)


def test_adasum_row_13_messages_without_futures(pools):
    for refusals, value in pools(2).run(ranks.no_futures):
        # Gloo has no futures of messages, so who asks for one meets an error.
        assert refusals == ["RuntimeError", "RuntimeError"]
        assert value == 1.5


def test_adasum_row_22_worker_needs_no_python(pool):
    assert all(pool.run(ranks.held_lock))


def test_many_small_buckets_while_python_is_busy(pool):
    before, after = sides(pool.run(ranks.busy_interpreter))
    assert_adasum(after, before)


def test_adasum_row_18_collectives_and_messages_of_the_user_in_flight(pool):
    results = pool.run(ranks.others_in_flight)
    assert all(right for *_, right in results)
    before, after = sides(results)
    assert_adasum(after, before)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "optimize",
    [
        "ddp_optimizer",
        "no_optimization",
    ],
)
def test_adasum_row_21_compiled_ddp_gives_the_same_bits(pools, size, optimize):
    results = pools(size).run(ranks.compiled, optimize)
    for step in range(3):
        before, after = sides([rank[step] for rank in results])
        assert_adasum(after, before)


def test_ranks_with_different_numbers_of_threads(pool):
    before, after = sides(pool.run(ranks.another_thread_count))
    assert_adasum(after, before)
