# SPDX-License-Identifier: Apache-2.0
"""Split backwards and recomputation in a pipeline, and what a step leaves behind."""

from __future__ import annotations

import pytest
from helpers import pipeline_ranks_backward as ranks_backward
from helpers.pool import Pools


def test_pipeline_row_09_a_weight_used_twice_in_a_row(pools: Pools) -> None:
    assert pools(2).run(ranks_backward.twice) == [[]] * 2


def test_pipeline_row_10_a_block_is_recomputed_once(pools: Pools) -> None:
    assert pools(2).run(ranks_backward.recomputed) == [[]] * 2


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "zb_h1", "zbv"])
def test_outputs_are_gone_once_they_are_sent(pools: Pools, kind: str) -> None:
    for most, after_step, after_eval in pools(2).run(ranks_backward.leftovers, kind):
        # Of six microbatches: the one that is being sent, and one that waits for it.
        assert most <= 2
        assert after_step == after_eval == 0


@pytest.mark.parametrize("everything", [False, True])
def test_fifty_steps_leave_nothing_behind(pools: Pools, everything: bool) -> None:
    assert pools(2).run(ranks_backward.fifty_steps, everything) == [[]] * 2
