# SPDX-License-Identifier: Apache-2.0
"""SM3 on parameters of which tensor parallelism gives each rank a part."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from torch_sm3.optim import SM3
from torch_sm3.optim._reduce import Slot


class TensorParallelSM3(SM3):
    r"""SM3 with the bits that it has on whole parameters.

    Megatron marks a parameter of which other ranks hold parts by attributes. An
    accumulator whose elements lie on several ranks is their maximum, which is taken
    after each step, as for DTensors.

    Args:
        params: parameters or groups.
        group_of: returns the ranks that share a parameter.
        **options: of :class:`torch_sm3.SM3`.
    """

    def __init__(
        self,
        params: Any,
        group_of: Callable[[torch.Tensor], dist.ProcessGroup],
        **options: Any,
    ) -> None:
        self._group_of = group_of
        super().__init__(params, **options)

    def _is_sharded(self, param: torch.Tensor) -> bool:
        return _cut_axis(param) is not None or super()._is_sharded(param)

    def _groups_of(
        self, param: Any, group: Mapping[str, Any]
    ) -> Iterator[tuple[Any, list[Slot]]]:
        axis = _cut_axis(param)
        if axis is None:
            yield from super()._groups_of(param, group)
            return
        cover = self._cover(param, group)
        if tuple(cover.view) != tuple(param.shape):
            raise ValueError(
                "SM3: expected a cover of a tensor-parallel parameter as it is, but "
                f"got one of its view {tuple(cover.view)} (argument 'cover'); "
                "tp_exact=False takes parts as parameters of their own"
            )
        sizes = zip(cover.axes, cover.shapes, strict=True)
        slots = [
            Slot(param, k, math.prod(shape), not param.numel())
            for k, (axes, shape) in enumerate(sizes)
            if axis not in axes
        ]
        yield self._group_of(param), slots


def _cut_axis(param: torch.Tensor) -> int | None:
    """Return the axis of which ranks hold parts, None if each has all of it."""
    if not getattr(param, "tensor_model_parallel", False):
        return None
    axis: int = getattr(param, "partition_dim", -1)
    return axis if axis >= 0 else None
