# SPDX-License-Identifier: Apache-2.0
"""Checks of what a user hands to SM3."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def _expect(condition: bool, expected: str, value: object, name: str) -> None:
    if not condition:
        raise ValueError(
            f"SM3: expected {expected}, but got {value} (argument {name!r})"
        )


def _is_size(value: object) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return math.isfinite(value) and value >= 0


def check_options(group: dict[str, Any]) -> None:
    """Check the hyper-parameters of one group."""
    lr = group["lr"]
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ValueError("Tensor lr must be 1-element")
    elif callable(lr):
        raise TypeError(
            "SM3: expected a number, but got a callable (argument 'lr'); for a "
            "schedule use torch.optim.lr_scheduler.LambdaLR"
        )
    else:
        _expect(_is_size(lr), "a finite number >= 0", lr, "lr")
    momentum, beta2, eps = group["momentum"], group["beta2"], group["eps"]
    _expect(
        _is_size(momentum) and momentum < 1, "0 <= momentum < 1", momentum, "momentum"
    )
    _expect(
        beta2 is None or (_is_size(beta2) and 0 < beta2 <= 1),
        "None or 0 < beta2 <= 1 (other ports' beta=0 means the sum: pass None)",
        beta2,
        "beta2",
    )
    _expect(eps is None or _is_size(eps), "None or a finite number >= 0", eps, "eps")
    decay = group["weight_decay"]
    _expect(_is_size(decay), "a finite number >= 0", decay, "weight_decay")


def check_param(param: Tensor) -> None:
    """Check that SM3 has a rule for a parameter."""
    if param.is_complex():
        raise ValueError(
            f"SM3: expected real parameters, but got {param.dtype} (argument "
            "'params'); use separate real and imaginary parameters"
        )
    _expect(
        param.dtype in _DTYPES,
        "float64, float32, float16 or bfloat16 parameters",
        param.dtype,
        "params",
    )
    _expect(param.layout == torch.strided, "dense parameters", param.layout, "params")
    shared = any(
        stride == 0 and size > 1
        for stride, size in zip(param.stride(), param.shape, strict=True)
    )
    _expect(
        not shared,
        "parameters whose elements do not share memory",
        f"strides {tuple(param.stride())}",
        "params",
    )
