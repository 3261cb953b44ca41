# SPDX-License-Identifier: Apache-2.0
"""FunctionalSM3: gradients are handed over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.sm3_models import equal_states, parameters
from helpers.sm3_ranks import assert_fine
from torch.distributed.optim.utils import as_functional_optim, functional_optim_map

from torch_sm3 import SM3
from torch_sm3.distributed import FunctionalSM3


@pytest.mark.parametrize(
    "name",
    [
        "ddp_with_the_step_in_its_hook",
        "distributed_optimizer",
        "adasum_still_has_its_names",
    ],
)
def test_on_two_ranks(name: str, two_ranks: dict[str, str]) -> None:
    assert_fine(two_ranks, name)


def test_it_is_registered() -> None:
    assert functional_optim_map[SM3] is FunctionalSM3
    made = as_functional_optim(SM3, lr=0.3, momentum=0.5)
    assert isinstance(made, FunctionalSM3)
    assert made.param_group["lr"] == 0.3
    assert made.param_group["params"] == []


@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": 0.9, "beta2": 0.9}, {"variant": "I"}, {"fused": False}],
    ids=str,
)
@pytest.mark.parametrize("one_by_one", [False, True])
def test_same_bits_as_sm3(options: dict[str, Any], one_by_one: bool) -> None:
    params = parameters((6, 4), (5,), (3, 2, 2))
    others = [torch.nn.Parameter(p.detach().clone()) for p in params]
    one = SM3(params, **options)
    known = [] if one_by_one else others
    two = FunctionalSM3(known, **options, _allow_empty_param_list=True)
    for step in range(4):
        grads = [torch.randn(p.shape) for p in params]
        if step == 2:
            grads[1] = None
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad
        one.step()
        if one_by_one:
            for q, grad in zip(others, grads, strict=True):
                two.step_param(q, grad)
        else:
            two.step(grads)
    assert all(map(torch.equal, params, others))
    assert all(q.grad is None for q in others)
    assert equal_states(one, two)


def test_errors() -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        FunctionalSM3([])
    functional = FunctionalSM3(parameters((2, 2)))
    with pytest.raises(ValueError, match="expected 1 gradients, but got 2"):
        functional.step([None, None])
