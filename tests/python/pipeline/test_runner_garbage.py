# SPDX-License-Identifier: Apache-2.0
"""A step's data, outputs and losses end with it, without a garbage collection."""

from __future__ import annotations

import pytest
from helpers import pipeline_ranks_garbage as ranks_garbage
from helpers.pool import Pools

CASES = [
    "lists", "whole", "iterator", "outputs", "samples", "tokens", "scaler", "split",
    "deterministic", "trace", "later", "eval", "raise", "arguments",
]  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_nothing_of_a_step_waits_for_the_garbage_collector(
    pools: Pools, ranks: int, case: str
) -> None:
    assert pools(ranks).run(ranks_garbage.left_behind, case) == [[]] * ranks
