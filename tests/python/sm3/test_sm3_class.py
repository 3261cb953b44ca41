# SPDX-License-Identifier: Apache-2.0
"""The optimizer class: state, checkpoints, bad input, and the spec's rows."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

import torch_sm3
from torch_sm3 import SM3


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    generator = torch.Generator().manual_seed(steps)
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.randn(16, 8, generator=generator).to(dtype)
        model(x).square().mean().backward()
        optimizer.step()


def small_model(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(1)
    layers = [torch.nn.Linear(8, 12), torch.nn.Tanh(), torch.nn.Linear(12, 4)]
    return torch.nn.Sequential(*layers).to(dtype)


def equal_states(one: SM3, other: SM3) -> bool:
    states = zip(one.state.values(), other.state.values(), strict=True)
    return all(
        a.keys() == b.keys()
        and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)
        for a, b in states
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_resume_is_bit_equal(dtype, momentum) -> None:
    one = small_model(dtype)
    first = SM3(one.parameters(), momentum=momentum, weight_decay=0.01)
    train(one, first, 3)
    file = io.BytesIO()
    torch.save({"model": one.state_dict(), "optimizer": first.state_dict()}, file)
    train(one, first, 2)
    other = small_model(dtype)
    second = SM3(other.parameters(), lr=0.7)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    keys = copy.deepcopy(saved["optimizer"]["param_groups"])
    other.load_state_dict(saved["model"])
    second.load_state_dict(saved["optimizer"])
    assert saved["optimizer"]["param_groups"] == keys, "the argument is not modified"
    train(other, second, 2)
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
    assert equal_states(first, second)
    assert second.param_groups[0]["lr"] == 0.1


def test_copies_are_independent() -> None:
    model = small_model()
    optimizer = SM3(model.parameters(), momentum=0.9)
    train(model, optimizer, 2)
    both = copy.deepcopy({"model": model, "optimizer": optimizer})
    restored = pickle.loads(pickle.dumps(both))
    train(model, optimizer, 1)
    for copied in (both, restored):
        state = next(iter(copied["optimizer"].state.values()))
        assert state["step"] == 2
        train(copied["model"], copied["optimizer"], 1)
        assert equal_states(copied["optimizer"], optimizer)


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
    assert seen == [4, 4]


def test_missing_options_get_their_defaults() -> None:
    model = small_model()
    saved = SM3(model.parameters()).state_dict()
    del saved["param_groups"][0]["maximize"], saved["param_groups"][0]["beta2"]
    fresh = SM3(model.parameters(), maximize=True)
    fresh.load_state_dict(saved)
    assert fresh.param_groups[0]["maximize"] is False
    assert fresh.param_groups[0]["beta2"] is None


def test_state_bytes_predicts_and_counts() -> None:
    for dtype, momentum in [(torch.float32, 0.9), (torch.bfloat16, 0.9), (None, 0.0)]:
        model = small_model(dtype or torch.float32)
        optimizer = SM3(model.parameters(), momentum=momentum)
        predicted = optimizer.state_bytes(detail=True)
        assert not optimizer.state, "a prediction allocates nothing"
        train(model, optimizer, 1)
        counted = sum(
            t.numel() * t.element_size()
            for state in optimizer.state.values()
            for t in state.values()
        )
        assert optimizer.state_bytes(detail=True) == predicted
        assert optimizer.state_bytes() == counted == sum(predicted.values())


@pytest.mark.parametrize(
    ("shape", "floats"), [((11008, 4096), 15104), ((512, 512, 3, 3), 1030)]
)
def test_state_bytes_of_known_layers(shape, floats) -> None:
    weight = torch.nn.Parameter(torch.empty(shape, device="meta"))
    assert SM3([weight]).state_bytes(detail=True)["accumulator"] == 4 * floats


def test_closure_runs_with_gradients_and_its_value_returns() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = SM3([param])

    def closure():
        optimizer.zero_grad()
        loss = (param * param).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3.0
    assert not torch.equal(param.detach(), torch.ones(3))


def test_versions_rise_with_each_update() -> None:
    param = torch.nn.Parameter(torch.ones(3, 4))
    optimizer = SM3([param])
    optimizer.init_state()
    versions = [param._version, optimizer.state[param]["accumulator_0"]._version]
    param.grad = torch.ones(3, 4)
    optimizer.step()
    assert param._version > versions[0]
    assert optimizer.state[param]["accumulator_0"]._version > versions[1]


def test_state_is_made_for_parameters_without_gradient() -> None:
    used, unused = (torch.nn.Parameter(torch.ones(2, 3)) for _ in range(2))
    frozen = torch.nn.Parameter(torch.ones(2, 3), requires_grad=False)
    optimizer = SM3([used, unused, frozen])
    used.grad = torch.ones(2, 3)
    optimizer.step()
    assert set(optimizer.state_dict()["state"]) == {0, 1}
    assert optimizer.state[unused]["step"] == 0
    assert torch.equal(unused.detach(), torch.ones(2, 3))


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group")
def test_a_parameter_listed_twice_is_updated_once() -> None:
    param = torch.nn.Parameter(torch.zeros(2))
    optimizer = SM3([param, param], lr=1.0)
    param.grad = torch.ones(2)
    optimizer.step()
    assert torch.equal(param.detach(), -torch.ones(2))


BAD = [
    ({"lr": -1.0}, ValueError, "'lr'"),
    ({"lr": float("nan")}, ValueError, "nan"),
    ({"lr": torch.ones(2)}, ValueError, "Tensor lr must be 1-element"),
    ({"momentum": 1.0}, ValueError, r"0 <= momentum < 1, but got 1.0"),
    ({"momentum": -0.1}, ValueError, "'momentum'"),
    ({"beta2": 0.0}, ValueError, "pass None"),
    ({"beta2": 1.5}, ValueError, "'beta2'"),
    ({"eps": -1e-8}, ValueError, "'eps'"),
    ({"weight_decay": -1}, ValueError, "'weight_decay'"),
]


@pytest.mark.parametrize(("options", "error", "text"), BAD, ids=str)
def test_bad_options_name_the_argument(options, error, text) -> None:
    param = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(error, match=text):
        SM3([param], **options)
    optimizer = SM3([param])
    with pytest.raises(error, match=text):
        optimizer.add_param_group(
            {"params": [torch.nn.Parameter(torch.ones(1))], **options}
        )
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    "param",
    [
        torch.ones(2, dtype=torch.complex64),
        torch.ones(2, dtype=torch.int64),
        torch.eye(2).to_sparse(),
    ],
    ids=lambda p: str(p.dtype) + str(p.layout),
)
def test_bad_parameters_are_refused(param) -> None:
    with pytest.raises(ValueError, match="'params'"):
        SM3([param])


def test_sparse_gradients_are_refused_and_nothing_is_written() -> None:
    embedding = torch.nn.Embedding(5, 3, sparse=True)
    before = embedding.weight.detach().clone()
    optimizer = SM3(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="SM3 does not support sparse gradients"):
        optimizer.step()
    assert torch.equal(embedding.weight.detach(), before)


# --- rows of the spec's section 8 ---------------------------------------------


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


def test_sm3_row_06_float16_zero_gradients_change_nothing() -> None:
    param = torch.nn.Parameter(torch.randn(4, 5).half())
    before = param.detach().clone()
    optimizer = SM3([param])
    for _ in range(3):
        param.grad = torch.zeros(4, 5).half()
        optimizer.step()
    assert torch.equal(param.detach(), before)


def test_sm3_row_07_float16_tracks_the_float32_run() -> None:
    weight = torch.randn(8, 6)
    half = torch.nn.Parameter(weight.half())
    full = torch.nn.Parameter(weight.half().float())
    optimizers = SM3([half]), SM3([full])
    for _ in range(20):
        grad = torch.randn(8, 6).half() * 1e-3
        half.grad, full.grad = grad, grad.float()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(half.float(), full, rtol=0, atol=2e-2)


def test_sm3_row_08_layer_unfrozen_later_starts_from_zero_state() -> None:
    model = small_model()
    model[0].requires_grad_(False)
    optimizer = SM3(model.parameters())
    train(model, optimizer, 2)
    assert model[0].weight not in optimizer.state
    model[0].requires_grad_(True)
    train(model, optimizer, 1)
    assert optimizer.state[model[0].weight]["step"] == 1
    assert optimizer.state[model[2].weight]["step"] == 3


def test_sm3_row_09_empty_parameters_stop_no_other() -> None:
    params = [torch.nn.Parameter(torch.ones(n)) for n in (1, 1, 0, 1, 0)]
    optimizer = SM3(params, lr=1.0)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert all((param == 0).all() for param in params)
    assert all(optimizer.state[param]["step"] == 1 for param in params)


def test_sm3_row_13_strides_of_a_bmm_gradient() -> None:
    grad = torch.empty_strided((1, 100, 2), (2, 1, 100)).copy_(torch.randn(1, 100, 2))
    results = []
    for g in (grad, grad.contiguous()):
        param = torch.nn.Parameter(torch.zeros(1, 100, 2))
        optimizer = SM3([param])
        param.grad = g
        optimizer.step()
        results.append(param.detach())
    assert torch.equal(*results)


def test_sm3_row_14_expanded_parameter_is_refused() -> None:
    base = torch.zeros(1, 3)
    with pytest.raises(ValueError, match="share memory"):
        SM3([base.expand(4, 3).requires_grad_()])
    state = torch_sm3._ops.sm3_accumulators(torch.zeros(4, 3))
    step = torch.zeros((), dtype=torch.int64)
    with pytest.raises(RuntimeError, match="share memory"):
        torch_sm3.sm3(
            [base.expand(4, 3)], [torch.ones(4, 3)], [state], [], [step], lr=0.1
        )
    assert torch.equal(base, torch.zeros(1, 3)) and step == 0


def test_sm3_row_17_state_of_another_shape_is_refused() -> None:
    one = SM3([torch.nn.Parameter(torch.zeros(3, 4))])
    one.init_state()
    other = SM3([torch.nn.Parameter(torch.zeros(4, 5))])
    with pytest.raises(ValueError, match=r"\[\(4,\), \(5,\)\].*\[\(3,\), \(4,\)\]"):
        other.load_state_dict(one.state_dict())
    assert not other.state


def test_sm3_row_23_found_inf_leaves_everything_bit_identical() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    param = torch.nn.Parameter(torch.ones(2, 3))
    optimizer = SM3([param], lr=0.5)
    scaler.scale((param * torch.inf).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(param.detach(), torch.ones(2, 3))
    optimizer.zero_grad()
    scaler.scale(param.sum()).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_([param], 1e9)
    scaler.step(optimizer)
    assert torch.equal(param.detach(), torch.full((2, 3), 0.5))


def test_sm3_row_27_state_dict_loads_with_weights_only() -> None:
    model = small_model()
    optimizer = SM3(model.parameters(), momentum=0.9)
    train(model, optimizer, 1)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["state"].keys() == {0, 1, 2, 3}


def test_sm3_row_29_learning_rate_kinds() -> None:
    param = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(TypeError, match="LambdaLR"):
        SM3([param], lr=lambda step: 0.1)
    for lr in (torch.tensor(0.5), torch.tensor([0.5])):
        param = torch.nn.Parameter(torch.zeros(2))
        optimizer = SM3([param], lr=lr)
        param.grad = torch.ones(2)
        optimizer.step()
        assert torch.equal(param.detach(), torch.full((2,), -0.5))
        assert optimizer.param_groups[0]["lr"] is lr


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e20])
@pytest.mark.parametrize("shape", [(6,), (5, 7), (3, 4, 5)], ids=str)
def test_sm3_row_30_one_bad_element_spreads_to_no_other(bad, shape) -> None:
    clean, dirty = (torch.nn.Parameter(torch.zeros(shape)) for _ in range(2))
    first, second = SM3([clean], momentum=0.9), SM3([dirty], momentum=0.9)
    grad = torch.randn(shape)
    where = tuple(n // 2 for n in shape)
    other = torch.ones(shape, dtype=torch.bool)
    other[where] = False
    clean.grad = grad.clone()
    clean.grad[where] = 0.0
    dirty.grad = grad.clone()
    dirty.grad[where] = bad
    first.step()
    second.step()
    assert torch.equal(clean[other], dirty[other])
    for key, value in second.state[dirty].items():
        if key.startswith("accumulator"):
            assert torch.isfinite(value).all()
            if abs(bad) != 1e20:
                assert torch.equal(value, first.state[clean][key])
    expected = abs(bad) == 1e20
    assert torch.isfinite(dirty[where]).item() is expected
    for _ in range(3):
        dirty.grad = torch.randn(shape)
        second.step()
    assert torch.isfinite(dirty[other]).all()
