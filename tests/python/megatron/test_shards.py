# SPDX-License-Identifier: Apache-2.0
"""SM3 on tensor-parallel parameters has the bits that it has on whole ones."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import megatron_ranks_shards as ranks_shards
from helpers.pool import Pools


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9, "beta2": 0.9},
        {"variant": "I"},
        {"weight_decay": 0.1, "cover": "diagonal"},
        {"foreach": True},
        {"fused": False},
    ],
    ids=str,
)
def test_parts_have_the_bits_of_wholes(
    pools: Pools, ranks: int, options: dict[str, Any]
) -> None:
    assert pools(ranks).run(ranks_shards.like_whole, options) == [[]] * ranks


def test_a_cover_of_a_view_is_refused(pools: Pools) -> None:
    for text in pools(2).run(ranks_shards.refused):
        assert "expected a cover of a tensor-parallel parameter as it is" in text
        assert "(argument 'cover')" in text
