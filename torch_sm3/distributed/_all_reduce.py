# SPDX-License-Identifier: Apache-2.0
"""adasum_all_reduce: Adasum of any tensors, without DDP."""

from __future__ import annotations

import dataclasses
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_sm3.distributed._binding import Binding
from torch_sm3.distributed._group import resolve, resolve_shards
from torch_sm3.distributed._names import Layers, pairs
from torch_sm3.distributed._options import Options, check_timeout, refuse
from torch_sm3.distributed._reduction import Reduction
from torch_sm3.distributed._state import AdasumState

_OP = "adasum_all_reduce"
_FIELDS = {field.name for field in dataclasses.fields(Options)}
_OTHERS = {"exclude", "named_parameters", "shard_group", "timeout"}
# Of one group; each is small, but predicates made anew for each call are new options.
_MOST_OPTIONS = 32


class _Shared:
    """What all calls with one process group share.

    One worker, whatever the options: ranks that pass different ones then meet in the
    header check instead of waiting in different groups.
    """

    def __init__(self) -> None:
        # Where weight shards are combined or another timeout is asked for, the worker
        # is another one.
        self.bindings: dict[Any, Binding] = {}
        self.reductions: OrderedDict[Any, tuple[Reduction, Any]] = OrderedDict()

    def binding(self, group: dist.ProcessGroup, given: dict[str, Any]) -> Binding:
        timeout = given.get("timeout")
        check_timeout(_OP, timeout)
        shards = resolve_shards(_OP, group, given.get("shard_group"))
        if (shards, timeout) not in self.bindings:
            self.bindings[shards, timeout] = Binding(group, timeout, shards)
        return self.bindings[shards, timeout]

    def reduction(self, group: dist.ProcessGroup, given: dict[str, Any]) -> Reduction:
        options = Options(**{k: v for k, v in given.items() if k in _FIELDS})
        options.checked(_OP)
        named, exclude = given.get("named_parameters"), given.get("exclude", ())
        if named is not None:
            named = pairs(_OP, named)
        if isinstance(exclude, (list, tuple, set)):
            exclude = tuple(exclude)
        # Addresses stand for tensors and predicates, which the entry keeps alive.
        key = (
            options,
            None if named is None else tuple((n, id(tensor)) for n, tensor in named),
            tuple(map(id, exclude)) if isinstance(exclude, tuple) else id(exclude),
        )
        found = self.reductions.pop(key, None)
        if found is None:
            options.check_ranks(_OP, dist.get_world_size(group))
            found = (Reduction(options, Layers(_OP, exclude, named)), (named, exclude))
        self.reductions[key] = found
        if len(self.reductions) > _MOST_OPTIONS:
            self.reductions.popitem(last=False)
        return found[0]

    def drop(self, binding: Binding) -> None:
        """Leave a worker whose ranks are out of step."""
        for key, mine in list(self.bindings.items()):
            if mine is binding:
                del self.bindings[key]
        binding.close()


_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, _Shared] = (
    weakref.WeakKeyDictionary()
)


def _outputs(tensors: list[Tensor], out: Any, wide: bool) -> list[Tensor]:
    if out is None:
        narrow = [t.dtype for t in tensors if t.dtype.itemsize == 2]
        if wide and narrow:
            refuse(_OP, f"float32 tensors for results of {narrow[0]}", None, "out")
        return []
    outputs = [out] if isinstance(out, Tensor) else list(out)
    if len(outputs) != len(tensors):
        refuse(_OP, f"{len(tensors)} tensors", len(outputs), "out")
    for tensor, output in zip(tensors, outputs, strict=True):
        narrow_input = tensor.dtype in (torch.float16, torch.bfloat16)
        dtype = torch.float32 if wide and narrow_input else tensor.dtype
        if output.shape != tensor.shape:
            refuse(_OP, f"shape {list(tensor.shape)}", list(output.shape), "out")
        if output.dtype != dtype:
            refuse(_OP, f"{dtype}", output.dtype, "out")
        if output.device != tensor.device:
            refuse(_OP, f"device {tensor.device}", output.device, "out")
    return outputs


def _listed(tensors: Any) -> list[Tensor]:
    listed = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    if not listed:
        refuse(_OP, "at least one tensor", "none", "tensors")
    for tensor in listed:
        if not isinstance(tensor, Tensor):
            refuse(_OP, "tensors", type(tensor).__name__, "tensors", TypeError)
    return listed


def adasum_all_reduce(
    tensors: Tensor | Sequence[Tensor],
    group: dist.ProcessGroup | None = None,
    *,
    state: AdasumState | None = None,
    async_op: bool = False,
    out: Tensor | Sequence[Tensor] | None = None,
    **options: Any,
) -> torch.futures.Future[Any] | None:
    r"""Replace tensors by their Adasum over all ranks.

    Collective: every rank passes tensors of the same sizes and dtypes, each of which
    is a layer of its own. The first call with a group is where the ranks set up a
    process group for it. Every call compares sizes and options across ranks first,
    unless ``check="off"``, and is a step of its own for ``metrics``.

    Args:
        tensors: one tensor or several, of any strides; dtypes and devices may differ.
            Complex ones count as pairs of real numbers.
        group: the ranks, the default group if None.
        state: use the options and the process group of this state instead.
        async_op: return at once.
        out: where the results go, in place if None. With
            ``result_dtype=torch.float32`` those of 16-bit tensors are float32.
        **options: as those of :class:`AdasumState`.

    Returns:
        None, or with ``async_op`` a future of ``tensors`` (or ``out``).

    Raises:
        TypeError: on tensors that are not float16, bfloat16, float32, float64,
            complex64 or complex128, on unknown options and on a state that is none.
        ValueError: on no tensors, tensors that overlap, ``out`` that does not fit,
            options or a group beside a state, and as :class:`AdasumState` does.
        NotImplementedError: on sparse tensors.
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
    listed = _listed(tensors)
    unknown = sorted(set(options) - _FIELDS - _OTHERS)
    if unknown:
        refuse(_OP, "options of AdasumState", unknown, "options", TypeError)
    shared = None
    if state is not None:
        if not isinstance(state, AdasumState):
            refuse(_OP, "an AdasumState", type(state).__name__, "state", TypeError)
        if options or group is not None:
            refuse(_OP, "either a state or a group and options", "both", "state")
        binding, reduction = state._bound(_OP), state._reduction
    else:
        group = resolve(_OP, group, "group")
        shared = _groups.setdefault(group, _Shared())
        reduction = shared.reduction(group, options)
        binding = shared.binding(group, options)
    outputs = _outputs(listed, out, reduction.options.result_dtype is not None)
    value = tensors if out is None else out
    results = reduction.all_reduce(
        binding, _OP, listed, value, outputs=outputs, header=True
    )
    reduction.end_step(binding, _OP)
    if async_op:
        # One thread works in order, so the last future is the last to complete.
        return results[-1]
    try:
        for result in results:
            result.wait()
    except dist.DistBackendError:
        raise
    except RuntimeError:
        # All ranks refused the call together; the next one starts afresh.
        if shared is not None:
            shared.drop(binding)
        raise
    return None
