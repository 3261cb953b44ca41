# SPDX-License-Identifier: Apache-2.0
"""Arguments of AdasumOptimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from torch_sm3.distributed._delta_layers import Layer
from torch_sm3.distributed._delta_merge import check_merge
from torch_sm3.distributed._delta_shared import SharingOptimizer
from torch_sm3.distributed._state import AdasumState
from torch_sm3.optim._in_backward import SM3InBackward
from torch_sm3.optim._sm3 import SM3

_OP = "AdasumOptimizer"


def _mismatch(expected: str, got: str, name: str) -> str:
    return f"{_OP}: expected {expected}, but got {got} (argument {name!r})"


def check_optimizer(optimizer: Any, whole: bool) -> None:
    """Check what is wrapped.

    Raises:
        TypeError: if it is no optimizer.
        ValueError: if it cannot be stepped in this way.
    """
    if not isinstance(optimizer, Optimizer):
        kind = type(optimizer).__name__
        raise TypeError(_mismatch("a torch.optim.Optimizer", kind, "optimizer"))
    if isinstance(optimizer, SharingOptimizer):
        expected = "an optimizer of one rank"
        raise ValueError(_mismatch(expected, "another AdasumOptimizer", "optimizer"))
    if isinstance(optimizer, SM3InBackward):
        expected = "an optimizer whose step is all in step(), such as SM3"
        raise ValueError(_mismatch(expected, "SM3InBackward", "optimizer"))
    if isinstance(optimizer, SM3) and optimizer._skip_nonfinite and not whole:
        # Part of the parameters would step, and part would not.
        expected = "whole=True with SM3(skip_nonfinite=True), which looks at all "
        raise ValueError(_mismatch(expected + "gradients together", "False", "whole"))


def check_arguments(
    optimizer: Any,
    process_group: Any,
    state: Any,
    combine_every: Any,
    bucket_bytes: Any,
    whole: bool,
    merge: Mapping[str, str],
    grad_scaler: Any,
) -> None:
    """Check the arguments of the constructor, before the first message.

    Raises:
        TypeError: for objects of other kinds.
        ValueError: for values out of range.
    """
    check_optimizer(optimizer, whole)
    if state is not None and not isinstance(state, AdasumState):
        kind = type(state).__name__
        raise TypeError(_mismatch("an AdasumState", kind, "state"))
    if state is not None and process_group is not None:
        expected = "either a state or a process group"
        raise ValueError(_mismatch(expected, "both", "state"))
    for name, value in (
        ("combine_every", combine_every),
        ("bucket_bytes", bucket_bytes),
    ):
        if isinstance(value, bool) or not isinstance(value, int):
            kind = type(value).__name__
            raise TypeError(_mismatch("an integer", kind, name))
        if value < 1:
            raise ValueError(_mismatch("at least 1", str(value), name))
    check_merge(_OP, merge)
    if grad_scaler is not None and not isinstance(grad_scaler, GradScaler):
        kind = type(grad_scaler).__name__
        raise TypeError(_mismatch("a torch.amp.GradScaler", kind, "grad_scaler"))


def check_layers(op: str, layers: Sequence[Layer]) -> None:
    """Check parameters before the first message.

    Raises:
        TypeError: on dtypes that have no inner product.
        NotImplementedError: on parameters that are cut over ranks.
    """
    for layer in layers:
        dtype = layer.param.dtype
        if isinstance(layer.param, DTensor):
            raise NotImplementedError(
                f"{op}: expected whole parameters, but got {layer.name} as a DTensor "
                "(argument 'optimizer'); adasum_fsdp_hook combines the gradients of "
                "sharded models"
            )
        floats = dtype.is_floating_point and dtype.itemsize > 1
        if not floats and dtype not in (torch.complex64, torch.complex128):
            raise TypeError(
                f"{op}: expected floating or complex parameters of 16 bits and more, "
                f"but got {layer.name} of {dtype} (argument 'optimizer')"
            )
