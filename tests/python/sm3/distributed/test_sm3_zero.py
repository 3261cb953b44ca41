# SPDX-License-Identifier: Apache-2.0
"""SM3 in ZeroRedundancyOptimizer."""

from __future__ import annotations

from helpers.sm3_ranks import assert_fine


def test_equal_to_the_plain_run_also_where_a_rank_owns_nothing(
    three_ranks: dict[str, str],
) -> None:
    assert_fine(three_ranks, "zero")


def test_overlap_with_ddp_takes_sm3(two_ranks: dict[str, str]) -> None:
    assert_fine(two_ranks, "zero_that_overlaps_with_ddp")
