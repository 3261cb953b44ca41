# SPDX-License-Identifier: Apache-2.0
"""Hyper-parameters of a step, rounded to the type that the step computes in."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_sm3.optim._batch import Options
from torch_sm3.optim._presets import PRESETS, Preset

#: The largest number whose square is finite.
ROOT_MAX = {
    torch.float32: 2.0**64 - 2.0**40,
    torch.float64: 1.3407807929942596e154,
}


def computing_type(param: Tensor) -> torch.dtype:
    """Return float64 for float64 parameters, else float32."""
    return torch.float64 if param.dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Numbers:
    """Numbers that enter the arithmetic; a Tensor where the learning rate is one.

    Args:
        dtype: the computing type.
        preset: conventions of ``compat``.
        lr: learning rate.
        decay: 1 - lr * weight_decay, the factor of the weight; None where it is 1.
        lr_decay: lr * weight_decay where it is decoupled, else 0.
        weight_decay: as given.
        momentum: factor of the old momentum.
        one_minus_momentum: factor of the direction.
        keep: factor of the accumulator; None for a sum of squares.
        add: factor of the square.
        eps: added under the root.
        outside: added to the root.
        factor: of the gradient; None where it is 1.
    """

    dtype: torch.dtype
    preset: Preset
    lr: float | Tensor
    decay: float | Tensor | None
    lr_decay: float | Tensor
    weight_decay: float
    momentum: float
    one_minus_momentum: float
    keep: float | None
    add: float
    eps: float
    outside: float
    factor: float | Tensor | None

    @property
    def largest(self) -> float:
        """The largest finite number of the computing type."""
        return torch.finfo(self.dtype).max

    @property
    def root_max(self) -> float:
        """The largest number whose square is finite."""
        return ROOT_MAX[self.dtype]


def numbers_of(options: Options, dtype: torch.dtype) -> Numbers:
    """Round the options of a step to ``dtype``.

    The difference from 1 of momentum and beta2 is taken before they are rounded.
    """
    preset = PRESETS[options.compat]
    ema = options.beta2 is not None and options.beta2 < 1
    beta2 = options.beta2 if options.beta2 is not None else 1.0
    lr = _round(options.lr, dtype)
    decoupled = options.weight_decay != 0 and not preset.decay_first
    weight_decay = _round_float(options.weight_decay, dtype)
    lr_decay = _round(lr * weight_decay, dtype) if decoupled else 0.0
    return Numbers(
        dtype=dtype,
        preset=preset,
        lr=lr,
        decay=_round(1.0 - lr_decay, dtype) if decoupled else None,
        lr_decay=lr_decay,
        weight_decay=weight_decay,
        momentum=_round_float(options.momentum, dtype),
        one_minus_momentum=_round_float(1.0 - options.momentum, dtype),
        keep=_round_float(beta2, dtype) if ema else None,
        add=_round_float(1.0 - beta2, dtype),
        eps=_round_float(preset.eps if options.eps is None else options.eps, dtype),
        outside=_round_float(preset.outside, dtype),
        factor=_gradient_factor(options, dtype),
    )


def _round_float(x: float, dtype: torch.dtype) -> float:
    # Products and differences of two float32 may be taken in float64 first: with
    # more than 2 * 24 + 2 bits the second rounding is harmless.
    return x if dtype == torch.float64 else ctypes.c_float(x).value


def _round(x: float | Tensor, dtype: torch.dtype) -> float | Tensor:
    if isinstance(x, Tensor):
        return x.reshape(()).to(dtype)
    return _round_float(x, dtype)


def _gradient_factor(options: Options, dtype: torch.dtype) -> float | Tensor | None:
    sign = -1.0 if options.maximize else 1.0
    if options.grad_scale is None:
        return sign if options.maximize else None
    scale = options.grad_scale.reshape(()).to(torch.float64)
    inverse = (torch.ones_like(scale) / scale).to(torch.float32)
    return inverse.to(dtype) * sign
