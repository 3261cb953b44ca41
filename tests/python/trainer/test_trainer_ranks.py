# SPDX-License-Identifier: Apache-2.0
"""Trainers on several ranks over Gloo."""

import pytest
import torch
from helpers.processes import run_ranks
from helpers.trainer_models import make
from helpers.trainer_ranks import on_ranks

CHECKS = ["equality", "mean", "overflow", "unused", "uneven"]


@pytest.fixture(scope="module")
def two():
    return run_ranks(2, on_ranks, CHECKS)


@pytest.fixture(scope="module")
def four():
    return run_ranks(4, on_ranks, ["equality", "mean", "subgroup"])


ALL = ["two", pytest.param("four", marks=pytest.mark.slow)]


@pytest.mark.parametrize("ranks", ALL)
def test_trainers_agree_and_ranks_hold_equal_weights(ranks, request):
    found = [answer["equality"] for answer in request.getfixturevalue(ranks)]
    assert isinstance(found[0], list), found[0]
    assert all(hashes == found[0] for hashes in found), found
    for reversible, store in zip(found[0][::2], found[0][1::2], strict=True):
        assert reversible == store
    # Adasum is not the mean.
    assert found[0][0] != found[0][4]


@pytest.mark.parametrize("ranks", ALL)
def test_loss_and_gradients_are_means_over_ranks(ranks, request):
    found = [answer["mean"] for answer in request.getfixturevalue(ranks)]
    assert isinstance(found[0], float), found[0]
    assert len(set(found)) == 1


def test_an_overflow_on_one_rank_skips_the_step_of_all(two):
    assert [answer["overflow"] for answer in two] == [[False, True] * 2] * 2


def test_a_weight_that_one_rank_uses_is_updated_on_all(two):
    (used, first, never), adasum = two[0]["unused"][:3], two[0]["unused"][3:]
    assert two[0]["unused"] == two[1]["unused"]
    # Weight decay of half, and the mean of gradients 1 and 1, and of 1 and 0.
    assert (used, first, never) == (-0.5, 0.0, 1.0)
    assert adasum[2] == 1.0 and adasum[1] == -0.5


@pytest.mark.slow
def test_a_trainer_on_some_ranks(four):
    assert "process group that contains rank 0" in four[0]["subgroup"]
    hashes = {answer["subgroup"] for answer in four[1:]}
    assert len(hashes) == 1 and len(hashes.pop()) == 64


def test_a_global_batch_that_cannot_be_shared(two):
    text = "expected a batch that 2 ranks divide equally, but got 5 examples"
    assert all(text in answer["uneven"] for answer in two)


def test_ranks_without_a_process_group():
    with pytest.raises(RuntimeError, match="to be initialised, but got"):
        make("reversible", process_group=[0, 1])
    assert not torch.distributed.is_initialized()
