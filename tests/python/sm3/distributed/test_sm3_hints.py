# SPDX-License-Identifier: Apache-2.0
"""Parameters that are flat ranges of a shape, on several ranks."""

from __future__ import annotations

import warnings

import pytest
import torch
from helpers.sm3_ranks import assert_fine

from torch_sm3 import SM3

Outcome = dict[str, str]


@pytest.mark.parametrize(
    "name", ["hints_outlive_copies", "hints_skip_together", "hints_that_do_not_fit"]
)
def test_on_three_ranks(name: str, three_ranks: Outcome) -> None:
    assert_fine(three_ranks, name)


def test_sm3_row_26_flat_shards_are_exact_with_a_hint(three_ranks: Outcome) -> None:
    assert_fine(three_ranks, "hints_that_cut_rows")


def test_sm3_row_26_flat_shards_without_a_hint_are_warned_of() -> None:
    def flat() -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.zeros(2**20))

    shard = flat()
    optimizer = SM3([shard, flat()])
    with pytest.warns(UserWarning, match=r"fully_shard.*set_shape_hint") as caught:
        optimizer.init_state()
        optimizer.step()
    assert len(caught) == 1
    marked = torch.nn.Parameter(torch.zeros(8))
    marked.ds_id = 0  # type: ignore[attr-defined]
    with pytest.warns(UserWarning, match="FSDP2"):
        SM3([marked]).init_state()
    hinted = SM3([shard])
    hinted.set_shape_hint(shard, (2**11, 2**10))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hinted.init_state()
    assert hinted.state_bytes(detail=True) == {
        "accumulator": 4 * (2**11 + 2**10),
        "momentum": 0,
        "scale": 0,
        "compensation": 0,
        "step": 8,
    }
