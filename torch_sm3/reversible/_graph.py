# SPDX-License-Identifier: Apache-2.0
"""The graph engine: F's own graph is part of the outer one, without its tensors.

F runs with grad inside saved-tensor hooks that put a handle in the place of every
tensor that F's nodes save. The first handle that the backward pass redeems moves the
cursor to the block, runs F again and finds the tensors of all its handles. So hooks,
sharded parameters, closures and double backward work as in the plain run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from torch_sm3.reversible._bare import refused_writes
from torch_sm3.reversible._exact import Watch
from torch_sm3.reversible._half import HalfRecord
from torch_sm3.reversible._ledger import Ledger
from torch_sm3.reversible._plain import together
from torch_sm3.reversible._region import eager_region
from torch_sm3.reversible._steps import is_stream
from torch_sm3.reversible._whole import WholeRecord

if TYPE_CHECKING:
    from torch_sm3.reversible._call import Call

_Kind = tuple[torch.Size, torch.dtype, torch.device]


def _kind(tensor: Tensor) -> _Kind:
    return tensor.shape, tensor.dtype, tensor.device


class GraphStep:
    """One step whose F is part of the outer graph.

    The handles own it and through it the call, so the call does not own it.

    Args:
        call: the call.
        record: how the step is run again.
        store: keep F's graph and the streams that the step changes, instead of running
            F again.
        merge: pass the inputs of a stored F through one node, as the node engine does.
    """

    __slots__ = (
        "_acc_needs",
        "_call",
        "_fresh",
        "_kinds",
        "_merge",
        "_needs",
        "_record",
        "_store",
    )

    def __init__(
        self, call: Call, record: HalfRecord | WholeRecord, store: bool, merge: bool
    ) -> None:
        self._call = call
        self._record = record
        self._store = store
        self._merge = merge
        self._kinds: list[_Kind] = []
        #: The tensors themselves, while F runs: it may differentiate inside.
        self._fresh: list[Tensor] | None = None
        self._needs: list[bool] = []
        self._acc_needs = False

    def first(
        self, stack: list[Any], ledger: Ledger, watch: Watch, again: bool
    ) -> tuple[Any, ...]:
        """Run the step on ``stack`` and return F's aux outputs.

        Args:
            stack: all items; changed.
            ledger: what the call keeps.
            watch: reads overflow flags.
            again: F ran already, outside the graph.
        """
        record = self._record
        step = record.step
        context = [stack[i] for i in step.reads]
        side = [ledger.side.tensors[i] for i in record.places]
        if self._store:
            record.keep_changed(stack, ledger)
            if self._merge:
                context, side = together(context, side)
        tensors = [x for x in context if isinstance(x, Tensor)] + side
        self._needs = [tensor.requires_grad for tensor in tensors]
        by_place = dict(zip(record.places, side, strict=True))
        kwargs = ledger.side.build(record.keys, by_place)
        hooks: Any = contextlib.nullcontext()
        regions: Any = contextlib.nullcontext()
        if not self._store:
            hooks = self._handles()
            regions = record.memory.noting_regions(self._call)
        run: Any = record.first_in_graph
        if isinstance(record, HalfRecord):
            self._acc_needs = stack[record.step.acc].requires_grad
            run = partial(run, store=self._store)
        with refused_writes(record.name), regions:
            return run(stack, context, kwargs, tensors, ledger, watch, hooks, again)

    @contextlib.contextmanager
    def _handles(self) -> Iterator[None]:
        self._fresh = []
        try:
            with saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            self._fresh = None

    def _pack(self, tensor: Tensor) -> int:
        self._kinds.append(_kind(tensor))
        if self._fresh is not None:
            self._fresh.append(tensor.detach())
        return len(self._kinds) - 1

    @eager_region("streams are rebuilt by running functions again")
    def _unpack(self, handle: int) -> Tensor:
        if self._fresh is not None:
            return self._fresh[handle]
        cursor = self._call.cursor()
        if cursor.owner is not self._record or cursor.found[handle] is None:
            # Before the recompute, so that two blocks' tensors are never alive.
            cursor.owner, cursor.found = None, []
            cursor.found = list(self._recompute())
            cursor.owner = self._record
        tensor = cursor.found[handle]
        assert tensor is not None, "it was found just now"
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            # A node asks once, so that its tensors go as the pass goes on.
            cursor.found[handle] = None
        return tensor

    def _recompute(self) -> list[Tensor]:
        call, record = self._call, self._record
        found: list[Tensor] = []

        def capture(tensor: Tensor) -> int:
            found.append(tensor.detach())
            return len(found) - 1

        cursor = call.seek(record.position + 1)
        needs = iter(self._needs)

        def track(item: Any) -> Any:
            if not isinstance(item, Tensor):
                return item
            need = next(needs)
            return item.detach().requires_grad_(need and is_stream(item))

        record.again_in_graph(
            cursor.stack,
            call.side,
            cursor.saved,
            track,
            self._acc_needs,
            saved_tensors_hooks(capture, found.__getitem__),
        )
        cursor.position = record.position
        kinds = [_kind(tensor) for tensor in found]
        if kinds != self._kinds:
            raise RuntimeError(
                f"reversible: expected F of {record.name} to save the same tensors in "
                f"both runs, but got {len(kinds)} instead of {len(self._kinds)}, or of "
                "other shapes, dtypes or devices (argument 'F')"
            )
        return found
