# SPDX-License-Identifier: Apache-2.0
"""State dicts of SM3: plain data, bit-exact, and refused where they do not fit."""

from __future__ import annotations

import copy
import io

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
from memory import LiveTensors

from torch_sm3 import SM3, Cover

FLAGS = pytest.mark.parametrize("flags", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)


@FLAGS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_resume_is_bit_equal(dtype, momentum, flags) -> None:
    one = small_model(dtype)
    first = SM3(one.parameters(), momentum=momentum, weight_decay=0.01, **flags)
    train(one, first, 3)
    file = io.BytesIO()
    torch.save({"model": one.state_dict(), "optimizer": first.state_dict()}, file)
    train(one, first, 2)
    other = small_model(dtype)
    second = SM3(other.parameters(), lr=0.7)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    groups = copy.deepcopy(saved["optimizer"]["param_groups"])
    tensors = [t for s in saved["optimizer"]["state"].values() for t in s.values()]
    values = [t.clone() for t in tensors]
    other.load_state_dict(saved["model"])
    second.load_state_dict(saved["optimizer"])
    train(other, second, 2)
    assert saved["optimizer"]["param_groups"] == groups, "the argument is not modified"
    assert equal(tensors, values), "the argument is not aliased"
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
    assert equal_states(first, second)
    assert second.param_groups[0]["lr"] == 0.1


def test_an_optimizer_may_load_what_it_holds() -> None:
    (first, second) = parameters((3, 4), (3, 4))
    optimizer = SM3([first, second])
    optimizer.step()
    before = snapshot(optimizer)
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    assert equal(snapshot(optimizer), before)
    saved["state"][0], saved["state"][1] = saved["state"][1], saved["state"][0]
    optimizer.load_state_dict(saved)
    assert torch.equal(optimizer.state[second]["accumulator_0"], before[3])
    optimizer.step()
    assert torch.equal(saved["state"][1]["accumulator_0"], before[3])


def test_an_earlier_state_dict_outlives_a_load() -> None:
    (param,) = parameters((3, 4))
    optimizer = SM3([param])
    optimizer.step()
    best = optimizer.state_dict()
    values = {key: value.clone() for key, value in best["state"][0].items()}
    other = SM3([param])
    other.init_state()
    optimizer.load_state_dict(other.state_dict())
    assert best["state"][0].keys() == values.keys()
    assert all(torch.equal(best["state"][0][key], values[key]) for key in values)


def test_hooks_see_the_full_state_and_then_the_loaded_one() -> None:
    model = small_model()
    optimizer = SM3(model.parameters())
    train(model, optimizer, 1)
    saved = optimizer.state_dict()
    fresh = SM3(model.parameters())
    seen = []

    def before(_, state_dict):
        seen.append(len(state_dict["state"]))

    fresh.register_load_state_dict_pre_hook(before)
    fresh.register_load_state_dict_post_hook(lambda o: seen.append(len(o.state)))
    fresh.load_state_dict(saved)
    fresh.load_state_dict(saved)
    assert seen == [4, 4, 4, 4]


def test_a_hook_may_replace_the_state() -> None:
    (param,) = parameters((2,))
    optimizer = SM3([param])
    optimizer.step()

    def scale(_, state_dict):
        state = {**state_dict["state"][0], "accumulator_0": torch.full((2,), 7.0)}
        return {**state_dict, "state": {0: state}}

    optimizer.register_load_state_dict_pre_hook(scale)
    optimizer.load_state_dict(optimizer.state_dict())
    assert torch.equal(optimizer.state[param]["accumulator_0"], torch.full((2,), 7.0))


def test_a_hook_that_fails_after_the_load_leaves_the_loaded_state() -> None:
    (param,) = parameters((3, 4))
    optimizer = SM3([param])
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    expected = snapshot(optimizer)

    def fail(_):
        raise RuntimeError("mine")

    optimizer.register_load_state_dict_post_hook(fail)
    with pytest.raises(RuntimeError, match="mine"):
        optimizer.load_state_dict(saved)
    assert equal(snapshot(optimizer), expected)


def test_missing_options_get_their_defaults() -> None:
    model = small_model()
    saved = SM3(model.parameters()).state_dict()
    group = saved["param_groups"][0]
    saved["param_groups"][0] = {"params": group["params"], "variant": "I"}
    fresh = SM3(model.parameters(), maximize=True, momentum=0.9)
    fresh.load_state_dict(saved)
    assert fresh.param_groups[0]["maximize"] is False
    assert fresh.param_groups[0]["momentum"] == 0.0
    assert fresh.param_groups[0]["variant"] == "I"
    assert fresh.param_groups[0].keys() == group.keys()


@pytest.mark.parametrize("step", [7, 7.0, torch.tensor(7.0), torch.tensor([7])])
def test_steps_of_any_number_type_are_converted(step) -> None:
    (param,) = parameters((2,))
    optimizer = SM3([param])
    optimizer.init_state()
    saved = optimizer.state_dict()
    saved["state"][0]["step"] = step
    optimizer.load_state_dict(saved)
    loaded = optimizer.state[param]["step"]
    assert loaded.dtype == torch.int64 and loaded.shape == () and loaded == 7


@FLAGS
def test_the_same_keys_from_every_implementation(flags) -> None:
    model = small_model()
    optimizer = SM3(model.parameters(), momentum=0.9, **flags)
    train(model, optimizer, 1)
    saved = optimizer.state_dict()
    keys = ["step", "accumulator_0", "accumulator_1", "momentum_buffer"]
    assert list(saved["state"][0]) == keys
    assert list(saved["state"][1]) == [keys[0], keys[1], keys[3]]


def is_plain(value: object) -> bool:
    if isinstance(value, (dict, list, tuple)):
        parts = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        return all(is_plain(part) for part in parts)
    kinds = (torch.Tensor, int, float, bool, str)
    return value is None or isinstance(value, kinds)


def test_a_state_dict_is_plain_data() -> None:
    weight = torch.nn.Parameter(torch.zeros(8, 4, 3, 3))
    cover = Cover.merge((0,), (1, 2, 3))
    optimizer = SM3([weight], cover=cover, momentum_dtype=torch.bfloat16)
    assert is_plain(optimizer.state_dict())
    optimizer.param_groups[0]["cover"] = Cover.heads(0, 2)
    optimizer.param_groups[0]["momentum_dtype"] = torch.int8
    saved = optimizer.state_dict()
    assert is_plain(saved)
    assert saved["param_groups"][0]["momentum_dtype"] == "int8"
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    fresh = SM3([weight])
    fresh.load_state_dict(torch.load(file, weights_only=True))
    fresh.init_state()
    assert fresh.state[weight]["accumulator_0"].shape == (2, 4)


def test_sm3_row_01_bfloat16_parameter_keeps_float32_accumulators() -> None:
    param = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    optimizer = SM3([param])
    optimizer.init_state()
    optimizer.state[param]["accumulator_0"].fill_(1.0001)
    fresh = SM3([param])
    fresh.load_state_dict(optimizer.state_dict())
    loaded = fresh.state[param]["accumulator_0"]
    assert loaded.dtype == torch.float32
    assert torch.equal(loaded, torch.full((2,), 1.0001))


def test_sm3_row_02_no_state_tensor_is_cast_on_load() -> None:
    param = torch.nn.Parameter(torch.zeros(2, dtype=torch.float16))
    optimizer = SM3([param])
    optimizer.init_state()
    optimizer.state[param]["count"] = torch.tensor([2**40 + 1])
    optimizer.state[param]["scale"] = torch.tensor([1e-30], dtype=torch.float64)
    fresh = SM3([param])
    fresh.load_state_dict(optimizer.state_dict())
    assert torch.equal(fresh.state[param]["count"], torch.tensor([2**40 + 1]))
    assert fresh.state[param]["scale"].dtype == torch.float64
    assert fresh.state[param]["scale"].item() == 1e-30


def test_sm3_row_03_int8_momentum_keeps_its_bits() -> None:
    (param,) = parameters((70, 300))
    optimizer = SM3([param], momentum=0.9, momentum_dtype=torch.int8)
    optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    fresh = SM3([param])
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert fresh.state[param]["momentum_buffer"].dtype == torch.int8
    assert fresh.state[param]["momentum_scale"].dtype == torch.float32
    assert equal(snapshot(optimizer), snapshot(fresh))
    assert fresh.state[param]["momentum_buffer"].count_nonzero() > 0


def test_sm3_row_04_load_needs_one_tensor_more_than_the_state() -> None:
    params = parameters(*[(64, 64)] * 8)
    source = SM3(params, momentum=0.9)
    source.step()
    saved = copy.deepcopy(source.state_dict())
    optimizer = SM3(params, momentum=0.9)
    known = [t for state in saved["state"].values() for t in state.values()]
    with LiveTensors([*params, *known]) as live:
        optimizer.init_state()
        live.peak = 0
        optimizer.load_state_dict(saved)
        # Buffers of 16 KiB are the largest; steps are made twice by conversion.
        assert live.peak <= source.state_bytes() + 64 * 64 * 4 + 16
        assert live.live_bytes() == source.state_bytes()
    assert equal(snapshot(optimizer), snapshot(source))


def test_sm3_row_05_no_hook_is_needed_to_keep_precision() -> None:
    (param,) = parameters((3, 4), dtype=torch.bfloat16)
    optimizer = SM3([param], momentum=0.9, momentum_dtype=torch.float32)
    for _ in range(3):
        optimizer.step()
    fresh = SM3([param])
    seen = []
    fresh.register_load_state_dict_post_hook(
        lambda o: seen.extend(t.dtype for t in o.state[param].values())
    )
    fresh.load_state_dict(optimizer.state_dict())
    assert seen == [torch.int64, torch.float32, torch.float32, torch.float32]
    assert equal(snapshot(fresh), snapshot(optimizer))


@pytest.mark.parametrize(
    ("mine", "theirs", "options", "text"),
    [
        ((4, 5), (3, 4), {}, r"\[\(4,\), \(5,\)\].*\[\(3,\), \(4,\)\]"),
        ((4, 5), (20,), {}, r"\[\(4,\), \(5,\)\].*\[\(20,\)\]"),
        ((2, 4), (4, 2), {}, r"\[\(2,\), \(4,\)\].*\[\(4,\), \(2,\)\]"),
        ((5, 1), (1, 5), {"momentum": 0.9}, r"momentum_buffer.*\(5, 1\).*\(1, 5\)"),
    ],
    ids=str,
)
def test_sm3_row_17_state_of_another_shape_is_refused(
    mine, theirs, options, text
) -> None:
    one = SM3([torch.nn.Parameter(torch.zeros(theirs))], **options)
    one.init_state()
    other = SM3([torch.nn.Parameter(torch.zeros(mine))], lr=0.7)
    with pytest.raises(ValueError, match=text):
        other.load_state_dict(one.state_dict())
    assert not other.state
    assert other.param_groups[0]["lr"] == 0.7, "the optimizer is unchanged"


def test_int8_momentum_without_its_scales_is_refused() -> None:
    (param,) = parameters((70, 300))
    optimizer = SM3([param], momentum=0.9, momentum_dtype=torch.int8)
    optimizer.init_state()
    saved = optimizer.state_dict()
    saved["state"][0] = {**saved["state"][0], "momentum_scale": torch.zeros(70, 3)}
    with pytest.raises(ValueError, match=r"momentum_scale.*\(70, 2\).*\(70, 3\)"):
        optimizer.load_state_dict(saved)
    del saved["state"][0]["momentum_scale"]
    with pytest.raises(ValueError, match=r"momentum_scale.*\(70, 2\).*None"):
        optimizer.load_state_dict(saved)


def test_sm3_row_21_a_group_without_parameters_is_saved_and_loaded() -> None:
    (param,) = parameters((3, 4))
    optimizer = SM3([{"params": [param]}, {"params": [], "lr": 0.5}])
    optimizer.step()
    fresh = SM3([{"params": [param]}, {"params": []}])
    fresh.load_state_dict(optimizer.state_dict())
    assert fresh.param_groups[1]["lr"] == 0.5
    assert equal(snapshot(fresh), snapshot(optimizer))


def test_sm3_row_27_state_dict_loads_with_weights_only() -> None:
    model = small_model()
    optimizer = SM3(model.parameters(), momentum=0.9, momentum_dtype=torch.bfloat16)
    train(model, optimizer, 1)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["state"].keys() == {0, 1, 2, 3}
