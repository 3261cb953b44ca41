# SPDX-License-Identifier: Apache-2.0
"""SM3 on DTensor parameters: the bits of the run on whole tensors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from helpers.sm3_ranks import assert_fine, checks_of

Outcome = dict[str, str]


@pytest.mark.parametrize(
    "name",
    [
        "sharded_on_dim_0",
        "sharded_on_dim_1",
        "covers_on_a_sharded_dim",
        "covers_across_boundaries",
        "low_precision",
        "int8_blocks_on_two_ranks",
        "replicated",
        "float64_is_reduced_in_float64",
        "gradients_of_another_dtype",
        "other_placements_of_gradients",
        "versions_rise",
        "grad_scaler",
        "parameters_that_are_sums",
        "differentiable",
        "missing_gradient_on_one_rank",
        "skip_on_one_rank_only",
        "found_inf_without_skip_nonfinite",
        "one_message_in_every_step",
        "copies_and_state_of_whole_tensors",
        "nobody_waits_for_ever",
    ],
)
def test_on_two_ranks(name: str, two_ranks: Outcome) -> None:
    assert_fine(two_ranks, name)


@pytest.mark.parametrize(
    "name",
    [
        "sharded_on_dim_0",
        "sharded_on_dim_1",
        "covers_on_a_sharded_dim",
        "low_precision",
        "uneven_and_empty_shards",
        "shapes_without_elements",
    ],
)
def test_on_three_ranks(name: str, three_ranks: Outcome) -> None:
    assert_fine(three_ranks, name)


@pytest.mark.parametrize(
    "name",
    [
        "two_dims",
        "two_dims_in_low_precision",
        "one_message_for_each_dim",
        "skip_on_one_of_four_ranks",
        "models_that_torch_shards",
        "loaded_by_another_layout",
        "spread_matches_torch",
    ],
)
def test_on_four_ranks(name: str, four_ranks: Outcome) -> None:
    assert_fine(four_ranks, name)


def test_sm3_row_15_matrix_sharded_on_dim_0(two_ranks: Outcome) -> None:
    assert_fine(two_ranks, "row_15")


def test_sm3_row_19_state_of_a_dtensor_is_dtensors(two_ranks: Outcome) -> None:
    assert_fine(two_ranks, "row_19")


def test_sm3_row_20_optimizer_older_than_the_sharding(four_ranks: Outcome) -> None:
    assert_fine(four_ranks, "row_20")


def test_sm3_row_32_lists_that_mix_tensors_and_dtensors(two_ranks: Outcome) -> None:
    assert_fine(two_ranks, "row_32")


def test_importing_torch_sm3_imports_no_dtensor() -> None:
    script = (
        "import sys, torch_sm3; torch_sm3.SM3; assert not"
        " {'torch.distributed.tensor', 'torch.distributed.optim'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_check_is_asked_for(ranks: int) -> None:
    texts = "".join(p.read_text() for p in Path(__file__).parent.glob("test_*.py"))
    missing = [name for name in checks_of(ranks) if f'"{name}"' not in texts]
    assert not missing
