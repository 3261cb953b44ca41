# SPDX-License-Identifier: Apache-2.0
"""adasum_all_reduce: Adasum of any tensors, without DDP."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from torch_sm3 import _ops
from torch_sm3.distributed._binding import Binding
from torch_sm3.distributed._group import resolve
from torch_sm3.distributed._options import check_options
from torch_sm3.distributed._state import AdasumState

# One worker per process group, whatever the options: ranks that pass different ones
# then meet in the header check instead of waiting in different groups.
_bindings: weakref.WeakKeyDictionary[dist.ProcessGroup, Binding] = (
    weakref.WeakKeyDictionary()
)


def adasum_all_reduce(
    tensors: torch.Tensor | Sequence[torch.Tensor],
    group: dist.ProcessGroup | None = None,
    *,
    state: AdasumState | None = None,
    async_op: bool = False,
    mode: str = "tree",
    scale: float = 1.0,
) -> torch.futures.Future[Any] | None:
    r"""Replace tensors by their Adasum over all ranks, in place.

    Collective: every rank passes tensors of the same sizes and dtypes, each of which
    is a layer of its own. The first call with a group is where the ranks set up a
    process group for it.

    Args:
        tensors: one tensor or several, on the CPU, of any strides; dtypes may differ.
        group: the ranks, the default group if None.
        state: use the options and the process group of this state instead.
        async_op: return at once.
        mode: see :class:`AdasumState`.
        scale: factor of the result.

    Returns:
        None, or with ``async_op`` a future of ``tensors``.

    Raises:
        TypeError: on tensors that are not float16, bfloat16, float32 or float64.
        ValueError: on no tensors, tensors that overlap, an unknown mode, a scale that
            is not finite, options beside a state, or a group without this rank.
        NotImplementedError: on sparse tensors or tensors of another device.
        RuntimeError: on all ranks, if any two pass different sizes or options.
        torch.distributed.DistBackendError: if another rank is dead or silent.

    Example::

        >>> import torch, torch.distributed as dist
        >>> store = dist.HashStore()
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> x = torch.tensor([1.0, 2.0])
        >>> adasum_all_reduce(x, scale=0.5)
        >>> x
        tensor([0.5000, 1.0000])
        >>> dist.destroy_process_group()
    """
    op = "adasum_all_reduce"
    check_options(op, mode, scale)
    listed = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in listed:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    if not by_dtype:
        raise ValueError(
            f"{op}: expected at least one tensor, but got none (argument 'tensors')"
        )
    if state is not None:
        if (mode, scale) != ("tree", 1.0):
            raise ValueError(
                f"{op}: expected either a state or mode and scale, but got both "
                "(argument 'state')"
            )
        binding = state._bound(op)
        mode, scale = state.mode, state.scale
    else:
        group = resolve(op, group)
        if group not in _bindings:
            _bindings[group] = Binding(group, None)
        binding = _bindings[group]
    for part in by_dtype.values():
        # Everything that can be refused here is refused before the first message.
        plan = _ops.adasum_plan([tensor.numel() for tensor in part])
        binding.exchange.check(plan, part, [], op)
    for part in by_dtype.values():
        # One thread works in order, so the last future is the last to complete.
        result = binding.submit(
            op, part, [tensor.numel() for tensor in part], mode, scale, tensors
        )
    if async_op:
        return result
    try:
        result.wait()
    except dist.DistBackendError:
        raise
    except RuntimeError:
        # All ranks refused the call together; the next one starts afresh.
        if state is None and group is not None:
            _bindings.pop(group).close()
        raise
    return None
