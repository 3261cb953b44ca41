# SPDX-License-Identifier: Apache-2.0
"""Every planned kind against one process, routes, and runs that repeat in all bits."""

from __future__ import annotations

import pytest
from helpers import pipeline_ranks_kinds as ranks_kinds
from helpers.pool import Pools


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_kind_has_the_bits_of_one_process(pools: Pools, ranks: int) -> None:
    assert pools(ranks).run(ranks_kinds.all_kinds) == [[]] * ranks


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_pipeline_row_07_values_that_skip_stages(pools: Pools, ranks: int) -> None:
    assert pools(ranks).run(ranks_kinds.routed) == [[]] * ranks


def test_a_route_without_its_key_is_named(pools: Pools) -> None:
    first, second = pools(2).run(ranks_kinds.lacking_route)
    assert first == second
    assert "0F0: ValueError" in first and "a dict with key 'other'" in first


@pytest.mark.parametrize("ranks", [2, 4])
def test_encoder_and_decoder(pools: Pools, ranks: int) -> None:
    assert pools(ranks).run(ranks_kinds.encoder_decoder) == [[]] * ranks
    assert pools(ranks).run(ranks_kinds.chained_encoder) == [[]] * ranks


def test_a_route_of_the_schedule_that_no_stage_has(pools: Pools) -> None:
    texts = pools(4).run(ranks_kinds.undeclared_route)
    assert len(set(texts)) == 1
    assert "with the routes [[1, 3]] of the schedule, but got []" in texts[0]


def test_random_numbers_do_not_depend_on_the_schedule(pools: Pools) -> None:
    runs = [
        pools(1).run(ranks_kinds.deterministic, [("none", None)]),
        pools(2).run(
            ranks_kinds.deterministic,
            [("interleaved", 2), ("looped_bfs", 2), ("zbv", None), ("v_min", None)],
        ),
        pools(4).run(
            ranks_kinds.deterministic,
            [("gpipe", None), ("1f1b", None), ("zb_h1", None)],
        ),
    ]
    wanted = runs[0][0][0]
    for answers in runs:
        for number in range(len(answers[0])):
            merged = {}
            for answer in answers:
                merged.update(answer[number][0])
                assert answer[number][1] == wanted[1]
            assert merged == wanted[0]


def test_one_parameter_in_two_stages_of_a_rank(pools: Pools) -> None:
    assert pools(1).run(ranks_kinds.shared_parameter) == [True]
