# SPDX-License-Identifier: Apache-2.0
"""Distributed checkpoints of one process: they prime the optimizer, then load it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.sm3_models import equal, snapshot
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from torch_sm3 import SM3, Cover

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

OPTIONS = [
    {},
    {"momentum": 0.9, "weight_decay": 0.1, "momentum_dtype": torch.bfloat16},
    {"cover": Cover(axes=((0,),)), "variant": "I", "beta2": 0.9},
    {"momentum": 0.5, "momentum_dtype": torch.int8, "lr": torch.tensor(0.1)},
    {"skip_nonfinite": True, "fused": True},
    {"foreach": True, "compat": "trax", "weight_decay": 0.1},
    {"dtype": torch.bfloat16, "kahan": True, "weight_decay": 0.1},
    {"dtype": torch.bfloat16, "stochastic_rounding": True, "momentum": 0.9},
]


def make(options) -> tuple[torch.nn.Module, SM3]:
    options = dict(options)
    dtype = options.pop("dtype", torch.float32)
    layers = [
        torch.nn.Linear(8, 600, dtype=dtype),
        torch.nn.Linear(600, 4, dtype=dtype),
    ]
    model = torch.nn.Sequential(*layers)
    return model, SM3(model.parameters(), **copy.deepcopy(options))


def backward(model) -> None:
    dtype = model[0].weight.dtype
    model(torch.ones(2, 8, dtype=dtype)).float().square().sum().backward()


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_priming_changes_no_parameter_and_loading_no_bit(
    options, flat, tmp_path
) -> None:
    form = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer = make(options)
    backward(model)
    optimizer.step()
    saved = {"optimizer": get_optimizer_state_dict(model, optimizer, options=form)}
    dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
    other, fresh = make(options)
    other.load_state_dict(model.state_dict())
    state = {"optimizer": get_optimizer_state_dict(other, fresh, options=form)}
    assert len(fresh.state) == 4
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    set_optimizer_state_dict(other, fresh, state["optimizer"], options=form)
    assert equal(snapshot(fresh), snapshot(optimizer))
    for m, o in ((model, optimizer), (other, fresh)):
        o.zero_grad()
        backward(m)
        o.step()
    assert equal(snapshot(fresh), snapshot(optimizer))


def test_a_load_into_the_tensors_in_place_is_seen(tmp_path) -> None:
    model, optimizer = make({"momentum": 0.9})
    for _ in range(2):
        backward(model)
        optimizer.step()
    dcp.save({"o": optimizer.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    saved = copy.deepcopy(model.state_dict())
    optimizer.step()
    expected = snapshot(optimizer)
    # DCP writes into the very tensors that state_dict() returns.
    model.load_state_dict(saved)
    dcp.load({"o": optimizer.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    assert not equal(snapshot(optimizer), expected)
    optimizer.step()
    assert equal(snapshot(optimizer), expected)


def test_sm3_row_21_a_group_without_parameters_is_saved_and_loaded(tmp_path) -> None:
    model, _ = make({})
    groups = [{"params": [*model.parameters()]}, {"params": [], "lr": 0.5}]
    optimizer = SM3(groups)
    backward(model)
    optimizer.step()
    saved = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
    fresh = SM3([{"params": [*model.parameters()]}, {"params": []}])
    model.zero_grad()
    state = {"optimizer": get_optimizer_state_dict(model, fresh)}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    set_optimizer_state_dict(model, fresh, state["optimizer"])
    assert fresh.param_groups[1]["lr"] == 0.5
    assert equal(snapshot(fresh), snapshot(optimizer))


def test_sm3_row_22_priming_with_gradients_of_another_dtype() -> None:
    model = torch.nn.Linear(8, 6)
    for param in model.parameters():
        param.grad_dtype = torch.bfloat16
    optimizer = SM3(model.parameters())
    before = [param.detach().clone() for param in model.parameters()]
    try:
        get_optimizer_state_dict(model, optimizer)
    except RuntimeError as error:
        # Priming is torch's own code; where it cannot, the class still can.
        assert "dtype" in str(error)
        optimizer.init_state()
    assert len(optimizer.state) == 2
    assert equal([param.detach() for param in model.parameters()], before)
