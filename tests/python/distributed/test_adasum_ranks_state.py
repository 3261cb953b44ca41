# SPDX-License-Identifier: Apache-2.0
"""The life of Adasum's state over Gloo processes: groups, checkpoints, sharing."""

import pytest
from helpers import adasum_ranks_state as ranks
from helpers.adasum_expect import assert_adasum, assert_same, sides


@pytest.mark.parametrize("options", [{}, {"mode": "psum", "scale": 0.5}])
def test_adasum_row_10_resumed_training_has_the_bits_of_undisturbed_training(
    pool, options
):
    results = pool.run(ranks.resume, options)
    for rank in results:
        assert len(rank) == 4
        for end in rank:
            assert_same(end, results[0][0])


def test_adasum_row_20_replicas_are_equal_after_100_steps(pool):
    want, *others = pool.run(ranks.train_100_steps)
    for replica in others:
        assert_same(replica, want)


def test_two_models_with_a_state_each_and_with_one(pool):
    results = pool.run(ranks.two_modules)
    for name in results[0]:
        before, after = sides([rank[name] for rank in results])
        assert_adasum(after, before)


@pytest.mark.parametrize("size", [2, 3])
def test_shared_state_in_another_order_is_a_header_error(pools, size):
    for name, text, _ in pools(size).run(ranks.shared_state_out_of_order):
        assert name == "RuntimeError"
        assert "expected the same call on all ranks" in text
        assert "number of elements" in text and "25" in text and "20" in text


def test_a_closed_state_says_so_and_rebinds(pool):
    results = pool.run(ranks.close_and_rebind)
    for texts, _ in results:
        assert all("got one after close()" in text for text in texts)
    for k in range(2):
        before, after = sides([found[k] for _, found in results])
        assert_adasum(after, before)


def test_adasum_row_8_groups_of_some_ranks_in_any_order(pool):
    results = pool.run(ranks.subgroups)
    leaves = [rank["leaf"] for rank in results]
    members = sorted({0, pool.size - 1})
    backwards = [[found["backwards"]] for found in results]
    assert_adasum(backwards, [[leaf] for leaf in leaves[::-1]])
    some = [[leaves[member]] for member in members]
    for rank, found in enumerate(results):
        if rank not in members:
            for call in ("outside", "outside call"):
                name, text, _ = found[call]
                assert name == "ValueError" and f"contains rank {rank}" in text
            continue
        for name in ("some", "loaded", "by group"):
            assert_adasum([[found[name]]], some)
        name, text, _ = found["unbound"]
        if len(members) == pool.size and name == "nothing":
            continue
        assert name == "RuntimeError" and "rebind(process_group)" in text


def test_rebind_to_fewer_and_to_more_ranks(pool):
    results = pool.run(ranks.smaller_and_larger)
    for k in range(3):
        before, after = sides([found[k] for found in results if found[k]])
        assert len(before) == max(1, pool.size - 1) or k != 1
        assert_adasum(after, before)


def test_a_second_hook_meets_the_error_of_ddp(pools):
    for names in pools(2).run(ranks.second_registration):
        assert names[0] == "RuntimeError"
