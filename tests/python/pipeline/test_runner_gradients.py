# SPDX-License-Identifier: Apache-2.0
"""Losses over tokens, data-parallel replicas, hooks and tied weights."""

from __future__ import annotations

import pytest
from helpers import pipeline_ranks_gradients as ranks_gradients
from helpers import pipeline_ranks_replicas as ranks_replicas
from helpers.pool import Pools


def test_pipeline_row_15_tokens_are_counted_over_the_step(pools: Pools) -> None:
    counts = [3, 0, 7, 1]
    ((wrong, alone),) = pools(1).run(ranks_gradients.tokens, counts)
    (first, a), (second, b) = pools(2).run(ranks_gradients.tokens, counts)
    assert wrong == first == second == []
    wanted = alone[0]
    pairs = zip(wanted, [*a, *b], strict=True)
    assert all(one.equal(other) for one, other in pairs)


@pytest.mark.parametrize("counts", [[0, 5], [0, 0, 0]])
def test_pipeline_row_24_masked_microbatches(pools: Pools, counts: list[int]) -> None:
    for wrong, _ in pools(2).run(ranks_gradients.tokens, counts):
        assert wrong == []


def test_pipeline_row_16_gradients_are_scaled_once(pools: Pools) -> None:
    assert pools(2).run(ranks_gradients.same_scale) == [[]] * 2


def test_losses_may_stay_on_the_last_rank(pools: Pools) -> None:
    assert pools(3).run(ranks_gradients.quiet) == [[]] * 3


def test_a_loss_without_its_count_is_named(pools: Pools) -> None:
    first, second = pools(2).run(ranks_gradients.wrong_loss)
    assert first == second
    assert first.startswith("1F0 TypeError") and "(sum, count)" in first


@pytest.mark.parametrize("kind", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("reduce", ["mean", "sum", "adasum", None])
def test_replicas_reduce_once_per_step(
    pools: Pools, reduce: str | None, kind: str
) -> None:
    assert pools(4).run(ranks_replicas.replicated, reduce, kind) == [[]] * 4


@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_tokens_are_counted_over_all_replicas(pools: Pools, reduce: str) -> None:
    assert pools(4).run(ranks_gradients.replicated_tokens, reduce) == [[]] * 4


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("adasum", [False, True])
def test_pipeline_row_11_hooks_are_called_once_per_bucket_and_step(
    pools: Pools, adasum: bool, wrap: bool
) -> None:
    for seen, wrong in pools(4).run(ranks_replicas.hooked, "zb_h1", adasum, wrap):
        assert wrong == []
        assert seen == [(0, True, True)] * 2


def test_a_stage_may_be_left_out_of_the_reduction(pools: Pools) -> None:
    assert pools(4).run(ranks_replicas.unreduced_stage) == [[]] * 4


def test_shared_and_thawed_parameters_are_reduced_once(pools: Pools) -> None:
    assert pools(4).run(ranks_replicas.shared_and_thawed) == [[]] * 4


def test_sparse_gradients_of_replicas_are_refused(pools: Pools) -> None:
    answers = pools(4).run(ranks_replicas.sparse)
    assert len(set(answers)) == 1
    assert answers[0][0].startswith(
        "0REDUCE_GRAD NotImplementedError REDUCE_GRAD: expected dense gradients, but "
        "got a sparse one of shape (5, 6)"
    )


def test_a_failure_in_one_replica_is_raised_in_all(pools: Pools) -> None:
    answers = pools(4).run(ranks_replicas.failing_replica)
    wanted = [
        (
            origin % 2,
            origin % 2,
            i,
            f"{origin % 2}{op}{i}",
            "ArithmeticError",
            origin // 2,
        )
        for origin in range(4)
        for op, i in (("F", 1), ("B", 3))
    ]
    assert answers == [(wanted, [])] * 4


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_of_earlier_steps_are_added_to_and_left_unscaled(
    pools: Pools, ranks: int
) -> None:
    assert pools(ranks).run(ranks_gradients.added_up) == [[]] * ranks


def test_an_error_tells_that_earlier_gradients_were_lost(pools: Pools) -> None:
    first, second = pools(2).run(ranks_gradients.lost)
    assert first == second
    alone, after = first
    assert alone.startswith("pipeline: rank 1 at 1F1: ") and "lost" not in alone
    assert after == alone + "; gradients of earlier steps were lost with those of " + (
        "this one"
    )


@pytest.mark.parametrize("kind", ["1f1b", "zb_h1"])
def test_frozen_stages_send_that_there_is_no_gradient(pools: Pools, kind: str) -> None:
    assert pools(3).run(ranks_gradients.frozen, kind) == [[]] * 3


def test_a_stage_may_insist_on_a_split(pools: Pools) -> None:
    first, second = pools(2).run(ranks_gradients.insists)
    assert first == second
    fine, refused = first
    assert fine == "fine"
    assert refused.startswith("1I0 ValueError: ")
    assert "expected a stage whose backward can be split" in refused
