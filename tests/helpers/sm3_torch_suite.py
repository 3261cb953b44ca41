# SPDX-License-Identifier: Apache-2.0
"""SM3 in torch's table of optimizers, so that torch's own tests run on it.

As a pytest plugin (``-p helpers.sm3_torch_suite``) it registers SM3 before any test
file is imported, which torch's test file needs.
"""

from __future__ import annotations

import unittest
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.testing._internal.common_methods_invocations import DecorateInfo
from torch.testing._internal.common_optimizers import (
    ErrorOptimizerInput,
    OptimizerInfo,
    OptimizerInput,
    get_error_inputs_for_all_optims,
    optim_db,
)

from torch_sm3 import SM3

# Tests of torch that contradict what SM3 promises, with the reason.
_SKIPS = {
    "test_complex": "SM3 takes no complex parameters",
    "test_complex_2d": "SM3 takes no complex parameters",
    "test_defaults_changed_to_foreach": "the default is the fused operator",
    "test_set_default_dtype_works_with_foreach": "step is int64",
    "test_fused_does_not_step_if_foundinf": "step is int64",
    "test_peak_memory_foreach": "the budget of SM3 is two temporaries",
}


def optim_inputs(device: Any, dtype: Any = None) -> list[OptimizerInput]:
    """Return options to test; "capturable" where the device knows it."""
    options: list[tuple[str, dict[str, Any]]] = [
        ("default", {}),
        ("non-default lr", {"lr": 0.01}),
        ("Tensor lr", {"lr": torch.tensor(0.01)}),
        ("momentum", {"momentum": 0.9}),
        ("nonzero weight_decay", {"weight_decay": 0.1}),
        ("maximize", {"weight_decay": 0.1, "maximize": True}),
        ("beta2", {"beta2": 0.9, "momentum": 0.5}),
        ("variant I", {"variant": "I"}),
        ("diagonal", {"cover": "diagonal"}),
        ("optax", {"compat": "optax", "eps": 1e-6}),
        ("enealor", {"compat": "enealor", "beta2": 0.9}),
        ("trax", {"compat": "trax", "momentum": 0.9, "weight_decay": 0.1}),
    ]
    if str(device).startswith("cuda"):
        lr = torch.tensor(0.01, device=device)
        options += [
            ("capturable", {"capturable": True, "momentum": 0.9}),
            ("capturable, Tensor lr", {"capturable": True, "lr": lr}),
        ]
    return [OptimizerInput(None, kwargs, desc) for desc, kwargs in options]


def optim_error_inputs(device: Any, dtype: Any) -> list[ErrorOptimizerInput]:
    """Return what must be refused, with a part of the message."""
    errors = list(get_error_inputs_for_all_optims(device, dtype))
    sample = Parameter(torch.randn(2, 3, device=device, dtype=dtype))
    own: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"beta2": 0.0}, ValueError, "pass None"),
        ({"momentum": 1.0}, ValueError, "0 <= momentum < 1"),
        (
            {"foreach": True, "fused": True},
            RuntimeError,
            "`fused` and `foreach` cannot be `True` together",
        ),
        (
            {"fused": True, "differentiable": True},
            RuntimeError,
            "`fused` does not support `differentiable`",
        ),
    ]
    for kwargs, kind, text in own:
        wrong = OptimizerInput([sample], kwargs, str(kwargs))
        errors.append(
            ErrorOptimizerInput(wrong, error_type=kind, error_regex=text),
        )
    return errors


def info() -> OptimizerInfo:
    """Return the entry of SM3."""
    return OptimizerInfo(
        SM3,
        optim_inputs_func=optim_inputs,
        optim_error_inputs_func=optim_error_inputs,
        supported_impls=("foreach", "differentiable", "fused"),
        supports_sparse=True,
        has_capturable_arg=True,
        supports_complex=False,
        supports_fused_on=("cpu", "cuda"),
        # These change the rule for sparse gradients, or their equality to dense ones.
        metadata_for_sparse=(
            {"lr": 0.1, "weight_decay": 0, "momentum": 0, "beta2": 0, "compat": 0},
            [
                lambda opt: StepLR(opt, gamma=1 - 1e-5, step_size=500),
                lambda opt: ReduceLROnPlateau(opt, threshold=1e-4),
            ],
        ),
        skips=tuple(
            DecorateInfo(unittest.skip(reason), "TestOptimRenewed", name)
            for name, reason in _SKIPS.items()
        ),
    )


def register() -> OptimizerInfo:
    """Append SM3 to torch's table, once, and return its entry."""
    for known in optim_db:
        if known.optim_cls is SM3:
            return known
    optim_db.append(info())
    return optim_db[-1]


def pytest_configure() -> None:
    """Register SM3 when pytest loads this file as a plugin."""
    register()


def configurations(*without: str) -> list[tuple[str, dict[str, Any]]]:
    """Return names and options of all inputs times all implementations.

    torch's own list leaves foreach out on the CPU, which SM3 supports.

    Args:
        without: flags of implementations to leave out.
    """
    flags = [flag for flag in register().supported_impls if flag not in without]
    found: list[tuple[str, dict[str, Any]]] = []
    for one in optim_inputs("cpu"):
        for chosen in (None, *flags):
            options = {flag: flag == chosen for flag in flags}
            name = one.desc + (f" & {chosen}" if chosen else "")
            found.append((name, {**deepcopy(one.kwargs), **options}))
    return found


def model() -> tuple[Parameter, Parameter, Tensor]:
    """Return the weight, bias and input of torch's small problem."""
    return Parameter(torch.randn(10, 5)), Parameter(torch.randn(10)), torch.randn(5)


def loss_of(
    optimizer: torch.optim.Optimizer, weight: Parameter, bias: Parameter, x: Tensor
) -> Tensor:
    """Return its loss, with new gradients."""
    optimizer.zero_grad()
    loss = (weight.mv(x) + bias).pow(2).sum()
    loss.backward()
    return loss
