# SPDX-License-Identifier: Apache-2.0
"""Values, gradients and losses of all shapes and strides between stages."""

from __future__ import annotations

import pytest
from helpers import pipeline_ranks_shapes as ranks_shapes
from helpers.pool import Pools


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_small_batches_and_all_losses(pools: Pools, ranks: int) -> None:
    kinds = ["gpipe", "1f1b", "zb_h1", "interleaved"] if ranks > 1 else ["none"]
    assert pools(ranks).run(ranks_shapes.sizes, kinds) == [[]] * ranks


@pytest.mark.parametrize(
    ("ranks", "kind"), [(2, "1f1b"), (2, "zbv"), (3, "zb_h1"), (1, "zbv")]
)
def test_values_of_every_form(pools: Pools, ranks: int, kind: str) -> None:
    assert pools(ranks).run(ranks_shapes.forms, kind) == [[]] * ranks


def test_no_memory_for_a_message_is_the_senders_error(pools: Pools) -> None:
    wanted = [0, "0SEND_F0", "RuntimeError", True, []]
    assert pools(3).run(ranks_shapes.without_memory) == [wanted] * 3
