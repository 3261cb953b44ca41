# SPDX-License-Identifier: Apache-2.0
"""Data of a step: placements, lists, iterators and arguments of stages."""

from __future__ import annotations

import pytest
from helpers import pipeline_ranks_data as ranks_data
from helpers.pool import Pools


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_any_placement_has_the_bits_of_one_process(pools: Pools, ranks: int) -> None:
    assert pools(ranks).run(ranks_data.placements) == [[]] * ranks


@pytest.mark.parametrize("ranks", [2, 3])
def test_pipeline_row_04_sequences_of_other_lengths(pools: Pools, ranks: int) -> None:
    assert pools(ranks).run(ranks_data.sequences) == [[]] * ranks


@pytest.mark.parametrize("ranks", [2, 3])
def test_steps_and_evals_have_microbatches_of_their_own(
    pools: Pools, ranks: int
) -> None:
    assert pools(ranks).run(ranks_data.ragged) == [[]] * ranks


def test_pipeline_row_23_one_iterator_for_all_chunks_of_a_rank(pools: Pools) -> None:
    # Rank 0 has stages 0 and 3 and calls next once for each microbatch; rank 1 never.
    assert pools(3).run(ranks_data.iterated, 2) == [([], 4), ([], 0), ([], 4)]
    assert pools(1).run(ranks_data.iterated, 2) == [([], 4)]
    assert pools(2).run(ranks_data.iterated, 1) == [([], 4), ([], 4)]


def test_pipeline_row_27_an_iterator_that_ends_in_a_step(pools: Pools) -> None:
    message = (
        "expected 8 microbatches, but the iterator ended after 5 (argument 'iterator')"
    )
    wanted = (0, "0F5", "DataExhausted", message, [])
    assert pools(3).run(ranks_data.exhausted) == [wanted] * 3


@pytest.mark.parametrize("ranks", [1, 2])
def test_keyword_arguments_are_cut_like_inputs(pools: Pools, ranks: int) -> None:
    assert pools(ranks).run(ranks_data.keywords) == [[]] * ranks


def test_data_that_does_not_fit_is_named_on_all_ranks(pools: Pools) -> None:
    first, second = pools(2).run(ranks_data.wrong_data)
    assert first == second
    for text, part in zip(
        first,
        [
            "expected 4 microbatches, but got 3 (argument 'microbatches')",
            "expected 4 microbatches, but got 2 (argument 'targets')",
            "expected a target for loss_fn, but got None (argument 'target')",
            "expected either inputs or microbatches, but got both",
            "expected either target or targets, but got both",
            "expected no inputs beside an iterator, but got tuple",
            "expected a list with an item for each microbatch, but got list_iterator",
            "expected 3 microbatches as on the rank of stage 0, but got 4",
            "TypeError step: expected pairs of stage input and target, but got Tensor",
        ],
        strict=True,
    ):
        assert part in text, text


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_samples_of_an_iterator_count_alike(pools: Pools, ranks: int) -> None:
    assert pools(ranks).run(ranks_data.sampled) == [[]] * ranks
