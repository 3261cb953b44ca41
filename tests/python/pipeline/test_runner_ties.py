# SPDX-License-Identifier: Apache-2.0
"""Weights that several stages share."""

from __future__ import annotations

import pytest
from helpers import pipeline_ranks_ties as ranks_ties
from helpers.pool import Pools


@pytest.mark.parametrize(
    ("placement", "kind"),
    [
        ([0, 0, 0, 0], None),
        ([0, 1, 0, 1], None),
        ([0, 1, 1, 0], None),
        ([0, 0, 1, 0], None),
        ([0, 1, 2, 3], "1f1b"),
        ([0, 1, 2, 3], "zb_h1"),
    ],
)
def test_tied_weights_are_summed_in_stage_order(
    pools: Pools, placement: list[int], kind: str | None
) -> None:
    ranks = max(placement) + 1
    answers = pools(ranks).run(ranks_ties.tied, placement, kind)
    assert [wrong for wrong, _ in answers] == [[]] * ranks
    assert len({norm for _, norm in answers}) == 1


@pytest.mark.parametrize("later", [False, True])
def test_tied_weights_are_summed_before_adasum(pools: Pools, later: bool) -> None:
    assert pools(4).run(ranks_ties.tied_adasum, later) == [[]] * 4


def test_tied_weights_of_unlike_shapes_are_refused(pools: Pools) -> None:
    first, second = pools(2).run(ranks_ties.tied_badly)
    assert first == second
    assert "of shape (6,) and torch.float32 as in stage 0, but got (6, 6)" in first


def test_a_failure_on_the_rank_of_a_tied_weight(pools: Pools) -> None:
    assert pools(2).run(ranks_ties.tied_failure) == [[]] * 2


@pytest.mark.parametrize(("ranks", "victim"), [(2, 0), (2, 1), (3, 0), (3, 2)])
def test_ctrl_c_among_the_members_of_a_tied_weight_leaves_clean_links(
    pools: Pools, ranks: int, victim: int
) -> None:
    answers = pools(ranks).run(ranks_ties.interrupted, victim)
    wanted = [[], (True, victim), ("TIE_REDUCE0", "KeyboardInterrupt"), []]
    assert answers == [wanted] * ranks
