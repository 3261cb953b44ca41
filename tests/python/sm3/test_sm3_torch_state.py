# SPDX-License-Identifier: Apache-2.0
"""What torch's optimizer suite asks of state dicts, hooks and copies, in our words."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.sm3_torch_suite import configurations, loss_of, model
from torch.nn import Parameter
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.testing import assert_close

from torch_sm3 import SM3


def parametrized(options: list) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "kwargs", [pytest.param(kwargs, id=name) for name, kwargs in options]
    )


EVERY = parametrized(configurations())
PLAIN = parametrized(configurations("differentiable"))


def named(params: list[Parameter], names: bool) -> list:
    return [(f"name{i}", p) for i, p in enumerate(params)] if names else params


def without_names(state_dict: dict) -> dict:
    result = copy.deepcopy(state_dict)
    for group in result["param_groups"]:
        group.pop("param_names", None)
    return result


@pytest.mark.parametrize("names", [(False, False), (True, False), (True, True)])
@PLAIN
def test_state_dict_deterministic(kwargs, names) -> None:
    weight, bias, x = model()
    optimizer = SM3(named([weight, bias], names[0]), **kwargs)
    for _ in range(10):
        loss_of(optimizer, weight, bias, x)
        optimizer.step()
    twins = [Parameter(p.detach().clone()) for p in (weight, bias)]
    other = SM3(named(twins, names[1]), **kwargs)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(10):
        loss_of(optimizer, weight, bias, x)
        loss_of(other, *twins, x)
        optimizer.step()
        other.step()
    assert torch.equal(weight, twins[0]) and torch.equal(bias, twins[1])
    one, two = (without_names(o.state_dict()) for o in (optimizer, other))
    assert_close(one["state"], two["state"], rtol=0, atol=0)
    assert str(one["param_groups"]) == str(two["param_groups"])
    # Repeated parameters have one representation.
    other.param_groups.extend(other.param_groups)
    last = without_names(other.state_dict())["param_groups"][-1]
    assert last["params"] == one["param_groups"][-1]["params"]


@PLAIN
def test_can_load_older_state_dict(kwargs) -> None:
    weight, bias, x = model()
    optimizer = SM3([weight, bias], **kwargs)
    for _ in range(3):
        loss_of(optimizer, weight, bias, x)
        optimizer.step()
    old = copy.deepcopy(optimizer.state_dict())
    for group in old["param_groups"]:
        for flag in ("foreach", "fused", "differentiable", "maximize", "capturable"):
            group.pop(flag)
    optimizer.load_state_dict(old)
    loss_of(optimizer, weight, bias, x)
    optimizer.step()
    assert optimizer.state[weight]["step"] == 4


@pytest.mark.parametrize("names", [(False, True), (True, False), (True, True)])
@PLAIN
def test_can_load_from_to_named_state_dict(kwargs, names) -> None:
    weight, bias, x = model()
    optimizer = SM3(named([weight, bias], names[0]), **kwargs)
    loss_of(optimizer, weight, bias, x)
    optimizer.step()
    other = SM3(named([weight, bias], names[1]), **kwargs)
    other.load_state_dict(optimizer.state_dict())
    other.step()
    assert other.state_dict()["param_groups"][0]["param_names"] == ["name0", "name1"]


@PLAIN
def test_save_load_equality_with_weights_only(kwargs, tmp_path) -> None:
    weight, bias, x = model()
    optimizer = SM3([("w", weight), ("b", bias)], **kwargs)
    for _ in range(3):
        optimizer.step(lambda: loss_of(optimizer, weight, bias, x))
    saved = optimizer.state_dict()
    torch.save(saved, tmp_path / "state.pt")
    for weights_only in (False, True):
        loaded = torch.load(tmp_path / "state.pt", weights_only=weights_only)
        assert_close(loaded["state"], saved["state"], rtol=0, atol=0)
        assert str(loaded["param_groups"]) == str(saved["param_groups"])


@PLAIN
def test_load_nontensor_step(kwargs) -> None:
    params = [Parameter(torch.randn(2, 3)) for _ in range(2)]
    for param in params:
        param.grad = torch.rand_like(param)
    optimizer = SM3(params, **kwargs)
    for _ in range(3):
        optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state["step"] = state["step"].item()
    optimizer.load_state_dict(saved)
    optimizer.step()
    assert all(optimizer.state[param]["step"] == 4 for param in params)


@EVERY
def test_state_dict_pre_post_hook(kwargs) -> None:
    optimizer = SM3([torch.rand(2, 3, requires_grad=True)], **kwargs)

    def before(optimizer):
        optimizer.state["test"] = 1

    def after(optimizer, state_dict):
        state_dict["ran"] = state_dict["state"].pop("test", None) == 1
        return state_dict

    handle = optimizer.register_state_dict_post_hook(after)
    assert optimizer.state_dict()["ran"] is False
    optimizer.register_state_dict_pre_hook(before)
    assert optimizer.state_dict()["ran"] is True
    handle.remove()
    assert optimizer.state_dict()["state"]["test"] == 1


@EVERY
def test_load_state_dict_pre_post_hook(kwargs) -> None:
    optimizer = SM3([torch.rand(2, 3, requires_grad=True)], **kwargs)
    saved = optimizer.state_dict()

    def first(optimizer, state_dict):
        state_dict["param_groups"][0]["lr"] = 0.002

    def second(optimizer, state_dict):
        state_dict = copy.deepcopy(state_dict)
        state_dict["param_groups"][0]["lr"] = 0.003
        return state_dict

    def after(optimizer):
        optimizer.state["lr"] = optimizer.param_groups[0]["lr"]

    optimizer.register_load_state_dict_pre_hook(first)
    optimizer.register_load_state_dict_post_hook(after)
    optimizer.load_state_dict(saved)
    assert optimizer.state["lr"] == 0.002
    handle = optimizer.register_load_state_dict_pre_hook(second, prepend=True)
    optimizer.load_state_dict(saved)
    assert optimizer.state["lr"] == 0.002
    handle.remove()
    optimizer.register_load_state_dict_pre_hook(second)
    optimizer.load_state_dict(saved)
    assert optimizer.state["lr"] == 0.003


@EVERY
def test_step_all_hooks(kwargs) -> None:
    seen: list[int] = []

    def hook(number):
        return lambda optimizer, args, kwargs: seen.append(number)

    optimizer = SM3([torch.ones(2)], **kwargs)
    handles = [
        register_optimizer_step_pre_hook(hook(0)),
        register_optimizer_step_post_hook(hook(5)),
        optimizer.register_step_pre_hook(hook(1)),
        optimizer.register_step_post_hook(hook(2)),
    ]
    optimizer.step()
    for handle in handles:
        handle.remove()
    optimizer.step()
    assert seen == [0, 1, 2, 5]


@PLAIN
def test_deepcopy_copies_all_public_attrs(kwargs) -> None:
    params = [Parameter(torch.randn(2, 3)) for _ in range(2)]
    for param in params:
        param.grad = torch.rand_like(param)
    optimizer = SM3(params, **kwargs)
    for _ in range(3):
        optimizer.step()

    def public(optimizer):
        return {name for name in vars(optimizer) if not name.startswith("_")}

    assert public(optimizer) == public(copy.deepcopy(optimizer))


@PLAIN
def test_non_empty_state(kwargs) -> None:
    weight, bias, x = model()
    optimizer = SM3([weight, bias], **kwargs)
    loss_of(optimizer, weight, bias, x)
    optimizer.step()
    assert all(len(state) > 0 for state in optimizer.state.values())
