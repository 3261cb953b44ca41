# SPDX-License-Identifier: Apache-2.0
"""State of one parameter: what it holds, how it is made, moved and loaded."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_sm3.optim._batch import ResolvedCover
from torch_sm3.optim._options import MOMENTUM_DTYPES
from torch_sm3.optim._storage import BLOCK

# Below this an int8 buffer saves nothing worth its rounding.
_LEAST_INT8 = 4096

#: Shape and dtype of every tensor of a parameter's state, by its key.
Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]


def momentum_dtype(
    dtype: torch.dtype, shape: Sequence[int], option: str | None
) -> torch.dtype:
    """Return the dtype of a momentum buffer.

    Args:
        dtype: the parameter's.
        shape: the whole parameter's.
        option: the group's ``momentum_dtype``, by its name.
    """
    if option is None:
        return dtype
    small = len(shape) < 2 or math.prod(shape) < _LEAST_INT8
    return torch.float32 if option == "int8" and small else MOMENTUM_DTYPES[option]


def layout(
    param: Tensor, shape: Sequence[int], cover: ResolvedCover, group: Mapping[str, Any]
) -> Layout:
    """Return what the state of a parameter holds under its group's options.

    Args:
        param: the parameter.
        shape: the shape that its cover is chosen from.
        cover: its cover.
        group: options.
    """
    computing = torch.float64 if param.dtype == torch.float64 else torch.float32
    found: Layout = {"step": ((), torch.int64)}
    for i, size in enumerate(cover.shapes):
        found[f"accumulator_{i}"] = (size, computing)
    own = tuple(param.shape)
    if group["momentum"] > 0:
        # Blocks of a flat range are not those of the rows of the whole.
        whole = shape if len(shape) == len(own) else own
        dtype = momentum_dtype(param.dtype, whole, group["momentum_dtype"])
        found["momentum_buffer"] = (own, dtype)
        if dtype == torch.int8:
            found["momentum_scale"] = (scale_shape(own), torch.float32)
    if group["kahan"] and param.dtype in (torch.bfloat16, torch.float16):
        found["compensation"] = (own, param.dtype)
    return found


def zeros(
    param: Tensor, key: str, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Return one zero state tensor on a parameter's device, ``step`` on the CPU."""
    if key in ("momentum_buffer", "compensation"):
        # With the parameter's strides, which is what kernels walk fastest.
        return torch.zeros_like(
            param, dtype=dtype, memory_format=torch.preserve_format
        ).detach()
    device = "cpu" if key == "step" else param.device
    return torch.zeros(shape, dtype=dtype, device=device)


def steps_follow(group: Mapping[str, Any], on_device: bool) -> bool:
    """Tell whether step counts live on the parameters' device, else on the CPU.

    Args:
        group: options.
        on_device: the whole optimizer decides about a step without the host.
    """
    return bool(group["capturable"] or group["fused"] or on_device)


def as_step(value: object, device: torch.device) -> Tensor:
    """Return a step count of any number type as an int64 scalar on a device."""
    count = value if isinstance(value, Tensor) else torch.tensor(value)
    return count.detach().reshape(()).to(device, torch.int64)


def accumulators(state: Mapping[str, Any]) -> list[Tensor]:
    """Return the accumulators of a state in their order."""
    found: list[Tensor] = []
    while (key := f"accumulator_{len(found)}") in state:
        found.append(state[key])
    return found


def follow(param: Tensor, state: dict[str, Any], step_on: torch.device) -> None:
    """Move a state to the device that its parameter has moved to."""
    for key, value in state.items():
        if key == "step":
            is_count = isinstance(value, Tensor) and value.dtype == torch.int64
            if not is_count or value.device != step_on or value.dim():
                state[key] = as_step(value, step_on)
        elif isinstance(value, Tensor) and value.device != param.device:
            state[key] = value.to(param.device)


def scale_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the scales of an int8 buffer."""
    return (*shape[:-1], math.ceil(shape[-1] / BLOCK))


def check_shapes(key: object, expected: Layout, saved: Mapping[str, Any]) -> None:
    """Check that a saved state fits the parameter that it is loaded for.

    Args:
        key: of the parameter in the state dict.
        expected: layout under the options that are loaded.
        saved: state.

    Raises:
        ValueError: with both shapes.
    """
    shapes = {k: tuple(v.shape) for k, v in saved.items() if isinstance(v, Tensor)}
    wanted = [s for k, (s, _) in expected.items() if k.startswith("accumulator_")]
    found = [tuple(accumulator.shape) for accumulator in accumulators(saved)]
    pairs: list[tuple[str, object, object]] = [("accumulators", wanted, found)]
    for name in ("momentum_buffer", "compensation"):
        if name in expected and name in shapes:
            pairs.append((name, expected[name][0], shapes[name]))
    # What was saved decides about the dtype of the buffer, and so about scales.
    name = "momentum_buffer"
    if name in shapes and saved[name].dtype == torch.int8:
        scales = shapes.get("momentum_scale")
        pairs.append(("momentum_scale", scale_shape(shapes[name]), scales))
    for name, want, got in pairs:
        if want != got:
            raise ValueError(
                f"SM3.load_state_dict: expected {name} of shape {want} for parameter "
                f"{key}, but got {got} (argument 'state_dict')"
            )


def is_foreign(state_dict: Mapping[str, Any]) -> bool:
    """Tell whether another torch port of SM3 wrote a state dict."""
    groups = state_dict["param_groups"]
    if any("variant" in group or "beta2" in group for group in groups):
        return False
    if any("beta" in group for group in groups):
        return True
    # They keep accumulators in shapes that broadcast, and unused momentum as 0.0.
    for state in state_dict["state"].values():
        if not isinstance(state, Mapping):
            continue
        broad = [a for a in accumulators(state) if sum(n != 1 for n in a.shape) == 1]
        if len(broad) > 1 and any(a.dim() > 1 for a in broad):
            return True
        if isinstance(state.get("momentum_buffer"), float):
            return True
    return False


def load(
    saved: Mapping[str, Any],
    present: dict[str, Any],
    step_on: torch.device,
    place: Callable[[str, Tensor], Tensor],
) -> dict[str, Any]:
    """Copy a saved state to a parameter's device, with every dtype kept.

    Args:
        saved: is not modified.
        present: the state before, emptied: a tensor of it is freed before its
            successor is made.
        step_on: where ``step`` lives.
        place: copies a tensor, given its key, to where the parameter is.

    Returns:
        The new state.
    """
    loaded: dict[str, Any] = {}
    for key, value in saved.items():
        present.pop(key, None)
        if key == "step":
            loaded[key] = as_step(value, step_on).clone()
        elif isinstance(value, Tensor):
            loaded[key] = place(key, value.detach())
        else:
            loaded[key] = value
    return loaded
