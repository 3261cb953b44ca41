# SPDX-License-Identifier: Apache-2.0
"""torch's optimizer suite: its own file where one is given, and tests of its names.

``TORCH_SM3_TORCH_TESTS=<pytorch>/test/test_optim.py`` of the installed version runs
torch's file on SM3. The tests below have the names of torch's and ask the same in our
words, so that they run everywhere.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.sm3_torch_suite import (
    configurations,
    loss_of,
    model,
    optim_error_inputs,
    optim_inputs,
    register,
)
from torch import Tensor
from torch.nn import Parameter
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.testing import assert_close
from torch.testing._internal.common_optimizers import (
    OptimizerErrorEnum,
)

import torch_sm3.optim._sm3 as module
from torch_sm3 import SM3

INFO = register()
TESTS = Path(__file__).parents[2]


def parametrized(options: list) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "kwargs", [pytest.param(kwargs, id=name) for name, kwargs in options]
    )


EVERY = parametrized(configurations())
PLAIN = parametrized(configurations("differentiable"))
OPTIONS = parametrized([(one.desc, one.kwargs) for one in optim_inputs("cpu")])


def run_file(path: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "helpers.sm3_torch_suite"]
    command += ["-p", "no:cacheprovider", "-k", "_SM3_", str(path)]
    paths = [str(TESTS), str(path.parent), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        cwd=path.parent,
        capture_output=True,
        text=True,
    )


def test_the_suite_of_the_installed_torch() -> None:
    path = os.environ.get("TORCH_SM3_TORCH_TESTS")
    if not path:
        pytest.skip("TORCH_SM3_TORCH_TESTS names no test_optim.py")
    result = run_file(Path(path).resolve())
    assert result.returncode == 0, result.stdout[-10000:] + result.stderr[-2000:]
    assert " passed" in result.stdout


SUITE = """
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_optimizers import optim_db, optims
from torch.testing._internal.common_utils import TestCase

class TestOptimRenewed(TestCase):
    @optims(optim_db)
    def test_errors(self, device, dtype, optim_info):
        self.assertEqual(optim_info.name, "SM3")

    @optims([o for o in optim_db if o.supports_complex])
    def test_complex(self, device, dtype, optim_info):
        self.fail()

    @optims(optim_db)
    def test_peak_memory_foreach(self, device, dtype, optim_info):
        self.fail()

instantiate_device_type_tests(TestOptimRenewed, globals(), only_for="cpu")
"""


def test_a_suite_file_sees_the_entry_of_sm3(tmp_path) -> None:
    path = tmp_path / "test_optim.py"
    path.write_text(SUITE)
    result = run_file(path)
    assert "1 passed, 1 skipped" in result.stdout, result.stdout + result.stderr


def test_torchs_test_of_older_state_dicts_has_options_to_leave_out() -> None:
    left_out = set(INFO.not_og_supported_flags)
    options = SM3([Parameter(torch.zeros(2))]).param_groups[0]
    assert {"maximize", "capturable"} <= left_out <= set(options)


# --- the same names -----------------------------------------------------------


def falls(optimizer, weight, bias, x, schedulers=(), maximize=False) -> bool:
    """Tell whether 20 steps move the loss in the right direction."""
    first = loss_of(optimizer, weight, bias, x).item()
    for _ in range(20):
        loss = loss_of(optimizer, weight, bias, x)
        optimizer.step()
        for scheduler in schedulers:
            plateau = isinstance(scheduler, ReduceLROnPlateau)
            scheduler.step(*([loss.detach()] if plateau else []))
    last = loss_of(optimizer, weight, bias, x).item()
    return last > first if maximize else last < first


@pytest.mark.parametrize(
    "error",
    optim_error_inputs("cpu", torch.float32),
    ids=lambda error: error.optimizer_error_input.desc,
)
def test_errors(error) -> None:
    wrong = error.optimizer_error_input
    assert error.error_on == OptimizerErrorEnum.CONSTRUCTION_ERROR
    if issubclass(error.error_type, Warning):
        with pytest.warns(error.error_type, match=error.error_regex):
            SM3(wrong.params, **wrong.kwargs)
    else:
        with pytest.raises(error.error_type, match=error.error_regex):
            SM3(wrong.params, **wrong.kwargs)


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("schedulers", [(), INFO.scheduler_inputs[0]], ids=["", "lr"])
@OPTIONS
def test_forloop_goes_right_direction(kwargs, schedulers, contiguous) -> None:
    kwargs = {**copy.deepcopy(kwargs), "foreach": False}
    weight, bias, x = model()
    if not contiguous:
        weight = Parameter(torch.randn(10, 5, 2)[..., 0])
        bias = Parameter(torch.randn(10, 2)[..., 0])
    optimizer = SM3([weight, bias], **kwargs)
    made = [make(optimizer) for make in schedulers]
    assert falls(optimizer, weight, bias, x, made, kwargs.get("maximize", False))


def test_param_group_with_lrscheduler_goes_right_direction() -> None:
    for schedulers in INFO.scheduler_inputs:
        weight, bias, x = model()
        optimizer = SM3([{"params": [weight]}, {"params": [bias], "lr": 0.01}])
        assert falls(
            optimizer, weight, bias, x, [make(optimizer) for make in schedulers]
        )


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
@PLAIN
def test_tensor_lr(kwargs, shape) -> None:
    weight, bias, x = model()
    twins = [Parameter(p.detach().clone()) for p in (weight, bias)]
    number = SM3([weight, bias], **{**kwargs, "lr": 1e-3})
    tensor = SM3(twins, **{**kwargs, "lr": torch.full(shape, 1e-3)})
    for _ in range(5):
        loss_of(number, weight, bias, x)
        loss_of(tensor, *twins, x)
        number.step()
        tensor.step()
        assert torch.equal(weight, twins[0]) and torch.equal(bias, twins[1])


def rosenbrock(x: Tensor) -> Tensor:
    return (1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2


@pytest.mark.parametrize(
    ("options", "scheduled"),
    [
        ({}, True),
        ({}, False),
        ({"foreach": True}, False),
        ({"fused": False}, True),
        ({"variant": "I"}, False),
        ({"maximize": True}, False),
    ],
    ids=str,
)
def test_rosenbrock_sparse(options, scheduled) -> None:
    schedulers = INFO.metadata_for_sparse[1] if scheduled else []
    params = [Parameter(torch.full((2,), 1.5, dtype=torch.float64)) for _ in range(2)]
    optimizers = [SM3([p], **options) for p in params]
    made = [[make(optimizer) for make in schedulers] for optimizer in optimizers]
    for i in range(1800):
        for sparse, param, optimizer, mine in zip(
            (True, False), params, optimizers, made, strict=True
        ):
            loss = rosenbrock(param)
            (grad,) = torch.autograd.grad(loss, param)
            # Coordinates by turns, the sparse one as two duplicates.
            grad[1 - i % 2] = 0
            place, value = torch.tensor([[i % 2, i % 2]]), grad[i % 2]
            if sparse:
                values = torch.stack([value / 4, value - value / 4])
                grad = torch.sparse_coo_tensor(
                    place, values, (2,), check_invariants=True
                )
            param.grad = grad
            optimizer.step()
            for scheduler in mine:
                plateau = isinstance(scheduler, ReduceLROnPlateau)
                scheduler.step(*([loss.detach()] if plateau else []))
        assert_close(*params, atol=5e-6, rtol=5e-6)
    start = torch.full((2,), 1.5, dtype=torch.float64)
    if options.get("maximize"):
        assert rosenbrock(params[0]) >= rosenbrock(start)
    else:
        assert params[0].dist(torch.ones(2)) <= start.dist(torch.ones(2))


def derived(kwargs: dict, flag: str, dtype: torch.dtype) -> None:
    """Compare a flag set and unset, through freezing and missing gradients."""
    runs = []
    for value in (False, True):
        torch.manual_seed(1)
        layers = [torch.nn.Linear(2, 3), torch.nn.Sigmoid()]
        layers += [torch.nn.Linear(3, 1), torch.nn.Sigmoid()]
        net = torch.nn.Sequential(*layers).to(dtype)
        scalar = torch.rand((), dtype=dtype, requires_grad=True)
        scalar.grad = torch.rand_like(scalar)
        params = [*net.parameters(), scalar]
        optimizer = SM3(params, **{**copy.deepcopy(kwargs), flag: value})
        x, states = torch.arange(1, 7).reshape(3, 2).to(dtype) / 10, []
        for i in range(7):
            optimizer.zero_grad()
            if i in (3, 5):
                net[2].requires_grad_(i == 5)
            if i != 2:
                net(x).sum().backward()
            optimizer.step()
            kept = [dict(optimizer.state[p]) for p in params]
            states.append(copy.deepcopy(([p.detach() for p in params], kept)))
        runs.append(states)
    for one, other in zip(*runs, strict=True):
        assert_close(one, other, rtol=0, atol=0)


@OPTIONS
def test_foreach_matches_forloop(kwargs) -> None:
    derived(kwargs, "foreach", torch.float64)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16]
)
@OPTIONS
def test_fused_matches_forloop(kwargs, dtype) -> None:
    derived(kwargs, "fused", dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_set_default_dtype_works_with_foreach(dtype) -> None:
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        param = Parameter(torch.randn(3, 4))
        param.grad = torch.randn(3, 4)
        optimizer = SM3([param], foreach=True)
        optimizer.step()
    finally:
        torch.set_default_dtype(before)
    assert optimizer.state[param]["step"].dtype == torch.int64


def test_fused_error_on_params_on_meta() -> None:
    with torch.device("meta"):
        net = torch.nn.Linear(2, 3)
    optimizer = SM3(net.parameters(), fused=True)
    for param in net.parameters():
        param.grad = torch.rand_like(param)
    with pytest.raises(
        RuntimeError,
        match="`fused=True` requires all the params to be floating point Tensors",
    ):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    net.to_empty(device="cpu")
    for param in net.parameters():
        param.grad = torch.rand_like(param)
    optimizer.step()


@pytest.mark.parametrize("scaled", [False, True])
@OPTIONS
def test_fused_does_not_step_if_foundinf(kwargs, scaled) -> None:
    params = [torch.ones(1) for _ in range(5)]
    for param in params:
        param.grad = torch.ones(1)
    optimizer = SM3(params, fused=True, **kwargs)
    optimizer.grad_scale = torch.ones(1) if scaled else None
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    for param in params:
        assert optimizer.state[param]["step"].dtype == torch.int64
        assert optimizer.state[param]["step"] == 0
        assert torch.equal(param, torch.ones(1))


@PLAIN
def test_param_groups_weight_decay(kwargs) -> None:
    weight, bias, x = model()
    groups = [{"params": [weight], **kwargs}]
    groups += [{"params": [bias], **copy.deepcopy(kwargs), "weight_decay": 0.0}]
    maximize = kwargs.get("maximize", False)
    assert falls(SM3(groups), weight, bias, x, maximize=maximize)


@PLAIN
def test_param_groups_lr(kwargs) -> None:
    weight, bias, x = model()
    other = Parameter(torch.randn(2))
    before = other.detach().clone()
    kwargs = {"lr": 1e-3, **kwargs}
    optimizer = SM3(
        [{"params": [weight, bias], **kwargs}, {"params": [other]}], lr=1e-28
    )
    other.grad = torch.rand(2)
    assert falls(optimizer, weight, bias, x, maximize=kwargs.get("maximize", False))
    assert torch.equal(other.detach(), before)


@EVERY
def test_step_is_noop_when_params_have_no_grad(kwargs) -> None:
    params = [torch.randn(2, 3) for _ in range(2)]
    before = [param.clone() for param in params]
    optimizer = SM3(params, **kwargs)
    assert optimizer.step(lambda: torch.tensor([1.0])) == 1
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))


# Decay moves parameters without gradients too.
@parametrized([(n, k) for n, k in configurations() if not k.get("weight_decay")])
def test_step_is_noop_for_zero_grads(kwargs) -> None:
    param = torch.randn(5, 1, requires_grad=True)
    stepped = param.clone() if kwargs.get("differentiable") else param
    stepped.grad = torch.zeros(5, 1)
    before = param.detach().clone()
    SM3([stepped], **kwargs).step(lambda: torch.tensor([1.0]))
    assert torch.equal(stepped.detach(), before)


@PLAIN
def test_grads_are_never_inplaced_into(kwargs) -> None:
    params = [Parameter(torch.randn(2, 3)) for _ in range(2)]
    for param in params:
        param.grad = torch.rand_like(param)
    versions = [param.grad._version for param in params]
    values = [param.grad.clone() for param in params]
    SM3(params, **kwargs).step()
    assert [param.grad._version for param in params] == versions
    assert all(torch.equal(p.grad, v) for p, v in zip(params, values, strict=True))


@EVERY
def test_optimizer_can_be_printed(kwargs) -> None:
    text = repr(SM3([Parameter(torch.randn(2, 3))], **kwargs))
    assert text.startswith("SM3 (") and "cover: " in text


def test_implementations_are_where_mocks_look_for_them(monkeypatch) -> None:
    called = []
    for name in ("_multi_tensor_sm3", "_single_tensor_sm3"):
        fake = lambda batch, options, name=name: called.append(name)  # noqa: E731
        monkeypatch.setattr(module, name, fake)
    assert module.__name__ == SM3.__module__
    param = Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    SM3([param], foreach=True).step()
    SM3([param], foreach=False).step()
    assert called == ["_multi_tensor_sm3", "_single_tensor_sm3"]
