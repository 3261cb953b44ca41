# SPDX-License-Identifier: Apache-2.0
"""Options of a parameter group: their defaults, checks and plain form."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from torch_sm3.optim._cover import plain_cover
from torch_sm3.optim._presets import PRESETS

#: Every key of a group besides ``params``, with the value that fills a gap.
DEFAULTS: dict[str, Any] = {
    "lr": 0.1,
    "momentum": 0.0,
    "beta2": None,
    "eps": None,
    "weight_decay": 0.0,
    "variant": "II",
    "compat": None,
    "cover": "auto",
    "maximize": False,
    "momentum_dtype": None,
    "stochastic_rounding": False,
    "kahan": False,
    "seed": 0,
    "foreach": None,
    "fused": None,
    "capturable": False,
    "differentiable": False,
}

#: Options that decide which state exists and which implementation steps.
SHAPING = (
    "variant",
    "compat",
    "cover",
    "momentum_dtype",
    "stochastic_rounding",
    "kahan",
    "foreach",
    "fused",
    "capturable",
    "differentiable",
)

PARAM_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
MOMENTUM_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
}


def expect(condition: bool, expected: str, value: object, name: str) -> None:
    """Raise the ValueError of this project's wording unless ``condition`` holds."""
    if not condition:
        raise ValueError(
            f"SM3: expected {expected}, but got {value} (argument {name!r})"
        )


def _is_number(value: object) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return math.isfinite(value) and value >= 0


def _is_seed(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def plain_dtype(value: object) -> object:
    """Return a dtype by its name, as a state dict holds it; others as they are."""
    return str(value).removeprefix("torch.") if type(value) is torch.dtype else value


def make_plain(group: dict[str, Any]) -> None:
    """Put options that have a plain form into it, in place."""
    if "cover" in group:
        group["cover"] = plain_cover(group["cover"])
    if "momentum_dtype" in group:
        group["momentum_dtype"] = plain_dtype(group["momentum_dtype"])


def fill(group: dict[str, Any]) -> None:
    """Give a group every key that it lacks, with its default."""
    for key, value in DEFAULTS.items():
        group.setdefault(key, value)


def _check_lr(lr: object) -> None:
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ValueError("Tensor lr must be 1-element")
        expect(lr.dim() < 2, "a tensor of shape [] or [1]", tuple(lr.shape), "lr")
        expect(not lr.is_complex(), "a real tensor", lr.dtype, "lr")
    elif callable(lr):
        raise TypeError(
            "SM3: expected a number, but got a callable (argument 'lr'); for a "
            "schedule use torch.optim.lr_scheduler.LambdaLR"
        )
    else:
        expect(_is_number(lr), "a finite number >= 0", lr, "lr")


def _check_numbers(group: dict[str, Any]) -> None:
    _check_lr(group["lr"])
    momentum, beta2, eps = group["momentum"], group["beta2"], group["eps"]
    expect(
        _is_number(momentum) and momentum < 1, "0 <= momentum < 1", momentum, "momentum"
    )
    expect(
        beta2 is None or (_is_number(beta2) and 0 < beta2 <= 1),
        "None or 0 < beta2 <= 1 (other ports' beta=0 means the sum: pass None)",
        beta2,
        "beta2",
    )
    expect(eps is None or _is_number(eps), "None or a finite number >= 0", eps, "eps")
    decay = group["weight_decay"]
    expect(_is_number(decay), "a finite number >= 0", decay, "weight_decay")
    expect(_is_seed(group["seed"]), "an int in [0, 2**63)", group["seed"], "seed")


def _check_choice(value: object, choices: tuple[object, ...], name: str) -> None:
    """Check one of a few strings, or None where it is listed."""
    if value is not None and not isinstance(value, str):
        raise TypeError(
            f"SM3: expected one of {choices}, but got {type(value).__name__} "
            f"(argument {name!r})"
        )
    expect(value in choices, f"one of {choices}", repr(value), name)


def _check_rounding(group: dict[str, Any]) -> None:
    for name in ("stochastic_rounding", "kahan", "maximize"):
        expect(isinstance(group[name], bool), "a bool", group[name], name)
    expect(
        not (group["stochastic_rounding"] and group["kahan"]),
        "stochastic_rounding or kahan, not both",
        "both True",
        "kahan",
    )
    name = group["momentum_dtype"]
    expect(
        name is None or name in MOMENTUM_DTYPES,
        "None, torch.float32, torch.bfloat16 or torch.int8",
        name,
        "momentum_dtype",
    )


def _check_implementation(group: dict[str, Any]) -> None:
    """Refuse flags that exclude each other, with torch's words where it has some."""
    if group["fused"] and group["foreach"]:
        raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
    if not group["differentiable"]:
        return
    for name in ("fused", "foreach"):
        if group[name]:
            raise RuntimeError(f"`{name}` does not support `differentiable`")
    low = group["momentum_dtype"] in ("bfloat16", "int8")
    for name, given in [
        ("momentum_dtype", low),
        ("stochastic_rounding", group["stochastic_rounding"]),
        ("kahan", group["kahan"]),
    ]:
        if given:
            raise RuntimeError(
                "SM3: expected options of full precision with differentiable=True, but "
                f"got {group[name]} (argument {name!r})"
            )


def check_group(group: dict[str, Any]) -> None:
    """Check the options of a group in their plain form.

    Raises:
        ValueError: for a value out of its range.
        TypeError: for a callable ``lr``, or a name of another type than str.
        RuntimeError: for implementations that exclude each other.
    """
    _check_choice(group["variant"], ("II", "I"), "variant")
    _check_choice(group["compat"], tuple(PRESETS), "compat")
    _check_numbers(group)
    _check_rounding(group)
    beta2 = group["beta2"]
    expect(
        beta2 in (None, 1) or group["compat"] != "trax",
        "beta2 None or 1 with compat='trax', which grafts two optimizers otherwise",
        beta2,
        "beta2",
    )
    _check_implementation(group)


def _check_dtype(param: Tensor, group: dict[str, Any]) -> None:
    if param.is_complex():
        raise ValueError(
            f"SM3: expected real parameters, but got {param.dtype} (argument "
            "'params'); use separate real and imaginary parameters"
        )
    expect(
        param.dtype in PARAM_DTYPES,
        "float64, float32, float16 or bfloat16 parameters",
        param.dtype,
        "params",
    )
    expect(
        param.dtype != torch.float16 or not group["stochastic_rounding"],
        "no float16 parameter with stochastic_rounding=True",
        param.dtype,
        "params",
    )
    buffer = group["momentum_dtype"]
    if param.dtype == torch.float64 and buffer in ("bfloat16", "int8"):
        raise NotImplementedError(
            "SM3: expected momentum_dtype None or torch.float32 for float64 parameters,"
            f" but got {buffer} (argument 'momentum_dtype')"
        )
    if group["differentiable"] and param.dtype.itemsize < 4:
        raise RuntimeError(
            "SM3: expected float32 or float64 parameters with differentiable=True, but "
            f"got {param.dtype} (argument 'params')"
        )


def check_param(param: Tensor, group: dict[str, Any]) -> None:
    """Check that SM3 has a rule for a parameter under its group's options.

    Raises:
        ValueError: for a complex, integer, float8, sparse, quantized or expanded
            parameter, or float16 with stochastic rounding.
        NotImplementedError: for float64 with a momentum buffer of low precision.
        RuntimeError: for low precision with ``differentiable``.
    """
    _check_dtype(param, group)
    dense = param.layout == torch.strided and not param.is_quantized
    expect(dense, "dense parameters", param.layout, "params")
    if is_lazy(param):
        return
    # Megatron-LM of 2020 keeps a number under this name in its parameters.
    strides = torch.Tensor.stride(param)
    shared = any(
        stride == 0 and size > 1
        for stride, size in zip(strides, param.shape, strict=True)
    )
    expect(
        not shared,
        "parameters whose elements do not share memory",
        f"strides {tuple(strides)}",
        "params",
    )
