# SPDX-License-Identifier: Apache-2.0
"""State of SM3: when it is made, what it holds, how it moves and what it costs."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from helpers.sm3_models import (
    IMPLEMENTATIONS,
    equal,
    equal_states,
    parameters,
    small_model,
    snapshot,
    train,
)

from torch_sm3 import SM3

FLAGS = pytest.mark.parametrize("flags", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)


@pytest.mark.parametrize(
    ("shape", "options", "expected"),
    [
        ((), {}, {"accumulator_0": ((1,), torch.float32)}),
        ((7,), {}, {"accumulator_0": ((7,), torch.float32)}),
        ((2, 2), {}, {"accumulator_0": ((2, 2), torch.float32)}),
        (
            (3, 1, 5),
            {},
            {
                "accumulator_0": ((3,), torch.float32),
                "accumulator_1": ((5,), torch.float32),
            },
        ),
        ((0, 3), {}, {"accumulator_0": ((0, 3), torch.float32)}),
        (
            (70, 300),
            {"momentum": 0.9, "momentum_dtype": torch.int8},
            {
                "accumulator_0": ((70,), torch.float32),
                "accumulator_1": ((300,), torch.float32),
                "momentum_buffer": ((70, 300), torch.int8),
                "momentum_scale": ((70, 2), torch.float32),
            },
        ),
        (
            (8, 8),
            {"momentum": 0.9, "momentum_dtype": torch.int8},
            {
                "accumulator_0": ((8,), torch.float32),
                "accumulator_1": ((8,), torch.float32),
                "momentum_buffer": ((8, 8), torch.float32),
            },
        ),
        (
            (5000,),
            {"momentum": 0.9, "momentum_dtype": torch.int8},
            {
                "accumulator_0": ((5000,), torch.float32),
                "momentum_buffer": ((5000,), torch.float32),
            },
        ),
    ],
    ids=str,
)
@FLAGS
def test_keys_shapes_and_dtypes(shape, options, expected, flags) -> None:
    (param,) = parameters(shape)
    optimizer = SM3([param], **options, **flags)
    optimizer.step()
    state = optimizer.state[param]
    step = state.pop("step")
    assert step.dtype == torch.int64 and step.shape == () and step == 1
    assert {k: (tuple(v.shape), v.dtype) for k, v in state.items()} == expected


@pytest.mark.parametrize(
    ("dtype", "options", "expected"),
    [
        (torch.float64, {}, [torch.float64, torch.float64]),
        (torch.bfloat16, {}, [torch.float32, torch.bfloat16]),
        (torch.float16, {"kahan": True}, [torch.float32, torch.float16, torch.float16]),
        (
            torch.bfloat16,
            {"kahan": True, "momentum_dtype": torch.float32},
            [torch.float32, torch.float32, torch.bfloat16],
        ),
        (torch.float32, {"kahan": True}, [torch.float32, torch.float32]),
        (
            torch.float64,
            {"momentum_dtype": torch.float32},
            [torch.float64, torch.float32],
        ),
    ],
    ids=str,
)
def test_dtypes_follow_the_parameter(dtype, options, expected) -> None:
    (param,) = parameters((3,), dtype=dtype)
    optimizer = SM3([param], momentum=0.9, **options)
    optimizer.init_state()
    keys = ["step", "accumulator_0", "momentum_buffer", "compensation"]
    assert list(optimizer.state[param]) == keys[: len(expected) + 1]
    assert [t.dtype for t in optimizer.state[param].values()][1:] == expected


def test_buffers_have_the_strides_of_their_parameter() -> None:
    param = torch.nn.Parameter(torch.zeros(3, 4, 5).permute(2, 0, 1))
    optimizer = SM3([param], momentum=0.9)
    optimizer.init_state()
    assert optimizer.state[param]["momentum_buffer"].stride() == param.stride()


@FLAGS
def test_state_is_made_for_parameters_without_gradient(flags) -> None:
    used, unused = (torch.nn.Parameter(torch.ones(2, 3)) for _ in range(2))
    frozen = torch.nn.Parameter(torch.ones(2, 3), requires_grad=False)
    optimizer = SM3([used, unused, frozen], momentum=0.9, **flags)
    used.grad = torch.ones(2, 3)
    optimizer.step()
    assert set(optimizer.state_dict()["state"]) == {0, 1}
    assert optimizer.state[unused].keys() == optimizer.state[used].keys()
    assert optimizer.state[unused]["step"] == 0
    assert torch.equal(unused.detach(), torch.ones(2, 3))


@FLAGS
def test_momentum_waits_for_a_dense_gradient(flags) -> None:
    embedding = torch.nn.Embedding(5, 3, sparse=True)
    optimizer = SM3(embedding.parameters(), momentum=0.9, **flags)
    embedding(torch.tensor([1])).sum().backward()
    optimizer.step()
    state = optimizer.state[embedding.weight]
    assert "momentum_buffer" not in state
    embedding.weight.grad = torch.ones(5, 3)
    optimizer.step()
    assert optimizer.state[embedding.weight]["momentum_buffer"].shape == (5, 3)
    assert optimizer.state[embedding.weight]["step"] == 2


def test_step_lives_where_the_step_is_decided() -> None:
    weight = torch.nn.Parameter(torch.zeros(2, device="meta"))
    for options, device in [
        ({}, "cpu"),
        ({"fused": True}, "meta"),
        ({"capturable": True}, "meta"),
        ({"skip_nonfinite": True}, "meta"),
        ({"foreach": True}, "cpu"),
    ]:
        optimizer = SM3([weight], **options)
        optimizer.init_state()
        assert optimizer.state[weight]["step"].device.type == device, options


@FLAGS
def test_closure_runs_with_gradients_and_its_value_returns(flags) -> None:
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = SM3([param], **flags)

    def closure():
        optimizer.zero_grad()
        loss = (param * param).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        assert optimizer.step(closure).item() == 3.0
    assert not torch.equal(param.detach(), torch.ones(3))
    assert optimizer.step() is None


@FLAGS
def test_versions_rise_with_each_update(flags) -> None:
    param = torch.nn.Parameter(torch.ones(3, 4))
    optimizer = SM3([param], momentum=0.9, **flags)
    optimizer.init_state()
    tensors = [param, *optimizer.state[param].values()]
    param.grad = torch.ones(3, 4)
    for _ in range(2):
        versions = [tensor._version for tensor in tensors]
        optimizer.step()
        raised = zip(tensors, versions, strict=True)
        assert all(tensor._version > before for tensor, before in raised)


@FLAGS
def test_the_step_is_a_no_op_without_a_gradient(flags) -> None:
    params = parameters((3, 4), (5,))
    optimizer = SM3(params, **flags)
    optimizer.step()
    params[0].grad = None
    before = snapshot(optimizer)
    optimizer.step()
    after = snapshot(optimizer)
    assert torch.equal(before[0], after[0]) and not torch.equal(before[1], after[1])
    assert optimizer.state[params[0]]["step"] == 1
    assert optimizer.state[params[1]]["step"] == 2
    params[1].grad = None
    before = snapshot(optimizer)
    optimizer.step()
    assert equal(snapshot(optimizer), before)


def test_copies_are_independent() -> None:
    model = small_model()
    optimizer = SM3(model.parameters(), momentum=0.9, lr=torch.tensor(0.1))
    optimizer.skipped_steps  # noqa: B018
    train(model, optimizer, 2)
    both = copy.deepcopy({"model": model, "optimizer": optimizer})
    restored = pickle.loads(pickle.dumps(both))
    train(model, optimizer, 1)
    for copied in (both, restored):
        state = next(iter(copied["optimizer"].state.values()))
        assert state["step"] == 2
        assert (
            copied["optimizer"].param_groups[0]["lr"]
            is not (optimizer.param_groups[0]["lr"])
        )
        train(copied["model"], copied["optimizer"], 1)
        assert equal_states(copied["optimizer"], optimizer)


def test_copies_keep_what_is_not_in_a_state_dict() -> None:
    param = torch.nn.Parameter(torch.zeros(6))
    optimizer = SM3([param], skip_nonfinite=True)
    optimizer.set_shape_hint(param, (4, 3), offset=6)
    param.grad = torch.full((6,), torch.nan)
    optimizer.step()
    copied = pickle.loads(pickle.dumps(optimizer))
    (twin,) = copied.param_groups[0]["params"]
    assert copied.skipped_steps == 1
    twin.grad = torch.full((6,), torch.inf)
    copied.step()
    assert (copied.skipped_steps, optimizer.skipped_steps) == (2, 1)
    assert copied.state[twin]["accumulator_0"].shape == (4,)


def test_a_new_tensor_in_the_state_is_used() -> None:
    (param,) = parameters((3, 4))
    optimizer = SM3([param], lr=1.0)
    optimizer.step()
    optimizer.state[param]["accumulator_0"] = torch.full((3,), 1e30)
    optimizer.state[param]["accumulator_1"] = torch.full((4,), 1e30)
    before = param.detach().clone()
    optimizer.step()
    assert (param.detach() - before).abs().max() < 1e-10
    optimizer.state[param]["step"] = 41.0
    optimizer.step()
    assert optimizer.state[param]["step"] == 42
    assert optimizer.state[param]["step"].dtype == torch.int64


def test_an_in_place_write_to_the_state_is_used() -> None:
    (param,) = parameters((3, 4))
    optimizer = SM3([param], lr=1.0)
    optimizer.step()
    for value in optimizer.state[param].values():
        value.fill_(10**9)
    before = param.detach().clone()
    optimizer.step()
    assert (param.detach() - before).abs().max() < 1e-3


def test_accumulators_that_do_not_fit_the_cover_are_refused() -> None:
    (param,) = parameters((3, 4))
    optimizer = SM3([param])
    optimizer.step()
    optimizer.param_groups[0]["cover"] = "diagonal"
    with pytest.raises(ValueError, match=r"\[\(3, 4\)\].*\[\(3,\), \(4,\)\]"):
        optimizer.step()


def test_state_follows_a_parameter_to_another_device() -> None:
    (param,) = parameters((3, 4))
    optimizer = SM3([param], momentum=0.9, fused=False)
    optimizer.step()
    param.grad = None
    # As Module.to does with swap_module_params_on_conversion.
    torch.utils.swap_tensors(param, torch.nn.Parameter(param.detach().to("meta")))
    param.grad = torch.zeros(3, 4, device="meta")
    optimizer.step()
    state = optimizer.state[param]
    assert state["momentum_buffer"].device.type == "meta"
    assert state["accumulator_1"].device.type == "meta"
    assert state["step"].device.type == "cpu" and state["step"] == 2


def test_a_parameter_that_leaves_takes_its_state_along() -> None:
    kept, left = parameters((3, 4), (5,))
    optimizer = SM3([kept, left])
    optimizer.step()
    optimizer.state["note"] = {"of": "the user"}
    optimizer.param_groups[0]["params"] = [kept]
    with pytest.warns(UserWarning, match="dropped the state of 1 parameter") as caught:
        optimizer.step()
    assert len(caught) == 1
    assert set(optimizer.state) == {kept, "note"}
    assert optimizer.state_dict()["state"].keys() == {0, "note"}


def test_sm3_row_08_layer_unfrozen_later_starts_from_zero_state() -> None:
    for flags in IMPLEMENTATIONS.values():
        model = small_model()
        model[0].requires_grad_(False)
        optimizer = SM3(model.parameters(), **flags)
        train(model, optimizer, 2)
        assert model[0].weight not in optimizer.state
        model[0].requires_grad_(True)
        train(model, optimizer, 1)
        assert optimizer.state[model[0].weight]["step"] == 1
        assert optimizer.state[model[2].weight]["step"] == 3


@FLAGS
def test_sm3_row_09_empty_parameters_stop_no_other(flags) -> None:
    params = [torch.nn.Parameter(torch.ones(n)) for n in (1, 1, 0, 1, 0)]
    optimizer = SM3(params, lr=1.0, **flags)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert all((param == 0).all() for param in params)
    assert all(optimizer.state[param]["step"] == 1 for param in params)


def test_sm3_row_20_replaced_parameters_leave_no_state_alive() -> None:
    model = small_model()
    optimizer = SM3(model.parameters(), lr=0.1)
    train(model, optimizer, 1)
    # What fully_shard does: other objects stand in the modules and in the groups.
    old = weakref.ref(optimizer.state[model[0].weight]["accumulator_0"])
    twin = small_model()
    twin.load_state_dict(model.state_dict())
    optimizer.param_groups[0]["params"] = list(twin.parameters())
    del model
    with pytest.warns(UserWarning, match="dropped the state of 4 parameter"):
        saved = optimizer.state_dict()
    gc.collect()
    assert old() is None and saved["state"] == {}
    fresh = small_model()
    fresh.load_state_dict(twin.state_dict())
    expected = SM3(fresh.parameters(), lr=0.1)
    train(twin, optimizer, 2)
    train(fresh, expected, 2)
    assert equal(snapshot(optimizer), snapshot(expected))


@FLAGS
@pytest.mark.parametrize(
    ("dtype", "grad_dtype"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)],
    ids=str,
)
def test_sm3_row_22_gradients_of_another_dtype(dtype, grad_dtype, flags) -> None:
    grad = torch.randn(5, 6).to(torch.bfloat16)
    params = [torch.nn.Parameter(torch.ones(5, 6, dtype=dtype)) for _ in range(2)]
    for param, its in zip(params, (grad_dtype, dtype), strict=True):
        param.grad_dtype = its
        param.grad = grad.to(its)
        SM3([param], **flags).step()
    assert torch.equal(*params)
    assert params[0].grad.dtype == grad_dtype and torch.equal(
        params[0].grad, grad.to(grad_dtype)
    )
