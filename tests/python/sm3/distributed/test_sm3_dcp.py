# SPDX-License-Identifier: Apache-2.0
"""SM3 under torch.distributed.checkpoint: primed, saved by n ranks, loaded by m."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.sm3_dcp_checks import OPTIONS, _compare, _model, _optimizer, _path, _run
from helpers.sm3_ranks import assert_fine
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

Outcome = dict[str, str]


@pytest.mark.parametrize(
    "name",
    [
        "priming_changes_nothing",
        "whole_state_to_and_from_one_rank",
        "flattened_by_name",
        "saved_by_two",
    ],
)
def test_on_two_ranks(name: str, two_ranks: Outcome) -> None:
    assert_fine(two_ranks, name)


def test_three_ranks_go_on_where_two_stopped(three_ranks: Outcome) -> None:
    assert_fine(three_ranks, "loaded_by_three")


@pytest.mark.parametrize("name", OPTIONS)
def test_one_process_goes_on_where_two_stopped(
    name: str, two_ranks: Outcome, shared_folder: Path
) -> None:
    assert_fine(two_ranks, "saved_by_two")
    plain, model = _model(name), _model(name)
    one, two = _optimizer(name, plain), _optimizer(name, model)
    _run(plain, one, range(3))
    state, optim = get_state_dict(model, two)
    full: dict[str, Any] = {"model": state, "optimizer": optim}
    dcp.load(full, checkpoint_id=_path(str(shared_folder), name), no_dist=True)
    set_state_dict(
        model,
        two,
        model_state_dict=full["model"],
        optim_state_dict=full["optimizer"],
    )
    _run(plain, one, range(3, 5))
    _run(model, two, range(3, 5))
    _compare(name, plain, one, model, two)


def test_sm3_row_18_load_in_place_then_step(two_ranks: Outcome) -> None:
    assert_fine(two_ranks, "row_18")


def test_sm3_row_21_group_without_parameters(
    two_ranks: Outcome, three_ranks: Outcome, shared_folder: Path
) -> None:
    # Every optimizer of these checks has one, with options of its own.
    assert_fine(two_ranks, "saved_by_two")
    assert_fine(three_ranks, "loaded_by_three")
    groups = _optimizer("default", _model("default")).state_dict()["param_groups"]
    assert groups[-1]["params"] == []
    assert groups[-1].keys() == groups[0].keys()


def test_sm3_row_22_gradients_of_another_dtype(two_ranks: Outcome) -> None:
    assert_fine(two_ranks, "priming_with_grad_dtype")


def test_sm3_row_33_gathers_of_several_optimizers(two_ranks: Outcome) -> None:
    assert_fine(two_ranks, "row_33")


def test_a_wrong_bit_is_found() -> None:
    plain, model = _model("default"), _model("default")
    one, two = _optimizer("default", plain), _optimizer("default", model)
    _run(plain, one, range(1))
    _run(model, two, range(1))
    _compare("same", plain, one, model, two)
    next(iter(two.state.values()))["accumulator_1"][3] += 1
    with pytest.raises(AssertionError, match="accumulator_1"):
        _compare("other", plain, one, model, two)
    assert torch.equal(*(next(m.parameters()) for m in (plain, model)))
