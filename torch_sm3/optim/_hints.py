# SPDX-License-Identifier: Apache-2.0
"""Parameters that an engine has flattened: what is told of them or guessed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn.parameter import is_lazy

# A vector this long is more likely a flattened model than a bias.
_FLATTENED = 2**20


@dataclass(frozen=True)
class ShapeHint:
    """The tensor that a 1-D parameter is a range of.

    Args:
        shape: of the tensor that was flattened.
        offset: of the parameter's first element in it.
        process_group: the processes that hold the other ranges; None is the default
            group, or nobody where torch.distributed is not initialized.
    """

    shape: tuple[int, ...]
    offset: int
    process_group: Any

    def __reduce__(self) -> tuple[Any, ...]:
        # A process group has no copy; its name finds it again.
        name = getattr(self.process_group, "group_name", None)
        return _restored, (self.shape, self.offset, name)

    def __deepcopy__(self, _: dict[int, Any]) -> ShapeHint:
        return self


def _restored(shape: tuple[int, ...], offset: int, name: str | None) -> ShapeHint:
    if name is None:
        return ShapeHint(shape, offset, None)
    known: Any = dist.distributed_c10d
    return ShapeHint(shape, offset, known._resolve_process_group(name))


def _error(expected: str, value: object, name: str) -> ValueError:
    return ValueError(
        f"SM3.set_shape_hint: expected {expected}, but got {value} (argument {name!r})"
    )


def check_hint(hint: ShapeHint, param: Tensor, *, known: bool, has_state: bool) -> None:
    """Check that a hint may be given for a parameter.

    Args:
        hint: the hint.
        param: the parameter.
        known: the optimizer holds it.
        has_state: it has been stepped.

    Raises:
        ValueError: if it is another optimizer's or not 1-D, or the range is outside.
        RuntimeError: if it has state.
    """
    if not known:
        raise _error("a parameter of this optimizer", "another", "param")
    if has_state:
        raise RuntimeError(
            "SM3.set_shape_hint: expected a parameter without state, but got one that "
            "has it (argument 'param')"
        )
    if param.dim() != 1:
        raise _error("a 1-D parameter", f"{param.dim()}-D", "param")
    if hint.process_group is not None and not hasattr(hint.process_group, "rank"):
        # What torch.distributed.new_group gives to ranks outside.
        raise _error(
            "a process group with this rank", hint.process_group, "process_group"
        )
    end, numel = hint.offset + param.numel(), math.prod(hint.shape)
    if hint.offset < 0 or end > numel:
        raise _error(
            f"a range within the {numel} elements of {hint.shape}",
            f"[{hint.offset}, {end})",
            "offset",
        )


def is_flattened(param: Tensor) -> bool:
    """Tell whether an engine has probably flattened a model into a parameter."""
    # FSDP1 and DeepSpeed mark what they made.
    if getattr(param, "_is_flat_param", False) or hasattr(param, "ds_id"):
        return True
    return not is_lazy(param) and param.dim() == 1 and param.numel() >= _FLATTENED
