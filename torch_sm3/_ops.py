# SPDX-License-Identifier: Apache-2.0
"""One typed function per operator of ``libtorch_sm3.so``.

The C++ ``Meta`` kernels are the fake kernels, so nothing is registered here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_sm3 import _library

assert _library.BUILD_INFO, "the library is loaded before any operator is looked up"
_ops = torch.ops.torch_sm3

# --- library ---------------------------------------------------------------


def build_info() -> str:
    """Return the build information of the loaded library as JSON."""
    return _ops.build_info()


def cpu_capability() -> str:
    """Return the instruction set of the CPU kernels: scalar, avx2 or avx512."""
    return _ops.cpu_capability()


# --- SM3 -------------------------------------------------------------------


def sm3_accumulators(param: Tensor) -> list[Tensor]:
    """Return the zero accumulators of one parameter."""
    return _ops.sm3_accumulators(param)


def sm3_update_(
    params: list[Tensor],
    grads: list[Tensor],
    accumulators: list[Tensor],
    momentum_buffers: list[Tensor],
    *,
    steps: list[Tensor],
    lr: float,
    momentum: float,
    beta2: float,
    eps: float | None,
    weight_decay: float,
    maximize: bool,
) -> None:
    """Do one step of SM3-II on a list of parameters, in place."""
    _ops.sm3_update_(
        params,
        grads,
        accumulators,
        momentum_buffers,
        steps=steps,
        lr=lr,
        momentum=momentum,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        maximize=maximize,
    )


# --- Adasum ----------------------------------------------------------------


# --- reversible ------------------------------------------------------------


def reversible_add(acc: Tensor, value: Tensor) -> Tensor:
    """Return ``acc + value`` in the accumulator's dtype, without broadcasting."""
    return _ops.reversible_add(acc, value)


def reversible_sub(acc: Tensor, value: Tensor) -> Tensor:
    """Return ``acc - value`` in the accumulator's dtype, without broadcasting."""
    return _ops.reversible_sub(acc, value)


# --- pipeline --------------------------------------------------------------
