# SPDX-License-Identifier: Apache-2.0
"""What the nodes of one call of a sequence share.

A :class:`Call` keeps the final streams, once, and a *cursor* for each running backward
pass: the streams as they were after some step. A node moves the cursor to its own
step, so the order in which autograd runs the nodes affects speed only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import Node
from torch.utils._pytree import tree_flatten, tree_unflatten

from torch_sm3.reversible._block import Block, Stepwise, has_aux
from torch_sm3.reversible._drift import Drift
from torch_sm3.reversible._exact import Watch
from torch_sm3.reversible._graph import GraphStep
from torch_sm3.reversible._half import HalfRecord
from torch_sm3.reversible._hooks import (
    CastRecord,
    has_hooks,
    run_inside,
    side_after_hooks,
)
from torch_sm3.reversible._ledger import Ledger
from torch_sm3.reversible._moves import Move
from torch_sm3.reversible._node import HalfNode, WholeNode
from torch_sm3.reversible._record import Record
from torch_sm3.reversible._steps import Half, Step, Whole, is_stream
from torch_sm3.reversible._vjp import check_declared
from torch_sm3.reversible._whole import WholeRecord

_FREED = (
    "Trying to backward through the graph a second time (or directly access saved "
    "tensors after they have already been freed). Saved intermediate values of the "
    "graph are freed when you call .backward() or autograd.grad(). Specify "
    "retain_graph=True if you need to backward through the graph a second time or if "
    "you need to access saved tensors after calling backward."
)


class Cursor:
    """Streams of one backward pass, as they were after ``position`` steps."""

    __slots__ = ("found", "left", "owner", "position", "saved", "stack")

    def __init__(
        self, position: int, stack: list[Any], saved: Sequence[Tensor], left: int
    ) -> None:
        self.position = position
        self.stack = stack
        self.saved = saved
        #: Nodes that have not run yet in this pass.
        self.left = left
        #: What the graph engine recomputed last, and the tensors that its F saved.
        self.owner: Record | None = None
        self.found: list[Tensor | None] = []


class _Place:
    """Where a saved tensor stands in the final stack."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class _Saved(Function):
    """A node whose saved tensors are the final streams and what the call keeps.

    So version checks, saved-tensor hooks and offloading apply to them, once. The node
    is connected to nothing; the call owns it.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensors: list[Tensor]) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("no gradient can reach a node that nothing uses")


_ANCHOR = torch.empty(0, requires_grad=True)


class MoveRecord:
    """A step without a function of one call."""

    __slots__ = ("note", "step")

    def __init__(self, step: Move, note: Any) -> None:
        self.step = step
        self.note = note

    def move(
        self, stack: list[Any], side: Any, saved: Sequence[Tensor], backwards: bool
    ) -> None:
        """Move the stack over this step, or back over it."""
        if backwards:
            self.step.move_back(stack, self.note)
        else:
            self.step.move(stack, "")


class Call:
    """What the nodes of one call of a sequence share.

    Args:
        ledger: what the call keeps besides the final streams.
        judge: called with the monitor's findings at the end of a backward pass.
    """

    def __init__(
        self, ledger: Ledger, judge: Callable[[list[Drift]], None] | None = None
    ) -> None:
        self._ledger: Ledger | None = ledger
        self._report = ledger.report
        self._judge = judge if ledger.monitored else None
        self._watch = Watch()
        self._records: list[AnyRecord] = []
        self._n_saved = 0
        self._n_nodes = 0
        self._cursors: dict[int, Cursor] = {}
        self._saved: Node | None = None
        self._items: list[Any] = []
        self.side: Any = ledger.side.without_tensors()

    def run_block(
        self, block: Block, name: str, stack: list[Any], plan: str, engine: str
    ) -> Any:
        """Run the steps of a block on ``stack``; return its aux outputs.

        Args:
            block: the block.
            name: how messages call it.
            stack: all items; changed.
            plan: ``reversible``, ``store`` or ``checkpoint``.
            engine: ``node``, ``graph``, or ``auto``, which is node unless F's graph
                reaches tensors that nothing declares.
        """
        with_aux = has_aux(block)
        if not has_hooks(block) or not isinstance(block, Stepwise):
            found = [self.run(s, name, stack, plan, engine) for s in block._steps()]
            return block._join_aux(found) if with_aux else ()
        ledger = self._ledger
        assert ledger is not None, "the call has not ended"
        inner: list[Any] = []

        def run(items: list[Any], given: Any) -> Any:
            self._note_casts(stack[: block.n_in], items, name)
            with side_after_hooks(block, ledger.side, given, name):
                steps = block._steps()
                found = [self.run(step, name, items, plan, engine) for step in steps]
            inner.extend(items)
            return block._join_aux(found) if with_aux else ()

        aux = run_inside(block, stack, ledger.side, with_aux, run)
        self._note_casts(inner, stack[: block.n_out], name)
        return aux

    def _note_casts(self, before: list[Any], after: list[Any], name: str) -> None:
        ledger = self._ledger
        assert ledger is not None, "the call has not ended"
        record = CastRecord(before, after, name, ledger, first=not self._records)
        if record:
            self._records.append(record)

    def run(
        self, step: Step, name: str, stack: list[Any], plan: str, engine: str
    ) -> tuple[Any, ...]:
        """Run one step on ``stack`` and record it; return F's aux outputs.

        Args:
            step: the step.
            name: how messages call its block.
            stack: all items; changed.
            plan: see :meth:`run_block`.
            engine: see :meth:`run_block`.
        """
        ledger = self._ledger
        assert ledger is not None, "the call has not ended"
        if isinstance(step, Move):
            self._records.append(MoveRecord(step, step.move(stack, name)))
            return ()
        self._n_nodes += 1
        reached = step.learned.undeclared
        if plan == "store" or engine == "graph" or (engine == "auto" and reached):
            return self._run_in_graph(step, name, stack, plan, engine)
        record = self._record(step, name, ledger)
        if plan == "checkpoint":
            record.keep_inputs(step, stack, ledger)
        outputs, aux = record.first(stack, ledger, self._watch)
        if step.learned.undeclared:
            if engine == "auto":
                return self._run_in_graph(step, name, stack, plan, engine, record)
            check_declared(step, name)
        inputs = [x for i in step.reads if isinstance(x := stack[i], Tensor)]
        inputs += [ledger.side.tensors[i] for i in record.places]
        inputs += record.owned
        self._records.append(record)
        if isinstance(record, HalfRecord):
            return self._half_node(record, outputs, aux, stack, inputs)
        streams = iter(WholeNode.apply(self, record, outputs, *inputs))
        stack[: record.step.n_in] = [
            next(streams) if is_stream(y) else y for y in outputs
        ]
        return ()

    def _half_node(
        self,
        record: HalfRecord,
        out: Any,
        aux: tuple[Any, ...],
        stack: list[Any],
        inputs: list[Tensor],
    ) -> tuple[Any, ...]:
        acc = record.step.acc
        if not aux:
            (stack[acc],) = HalfNode.apply(self, record, [out], stack[acc], *inputs)
            return ()
        leaves, structure = tree_flatten(aux)
        floating = [leaf for leaf in leaves if is_stream(leaf)]
        results = HalfNode.apply(self, record, [out, *floating], stack[acc], *inputs)
        stack[acc] = results[0]
        tracked = iter(results[1:])
        leaves = [next(tracked) if is_stream(leaf) else leaf for leaf in leaves]
        return tree_unflatten(leaves, structure)

    def _run_in_graph(
        self,
        step: Half | Whole,
        name: str,
        stack: list[Any],
        plan: str,
        engine: str,
        again: Any = None,
    ) -> tuple[Any, ...]:
        ledger = self._ledger
        assert ledger is not None, "the call has not ended"
        record = again or self._record(step, name, ledger)
        if plan == "checkpoint" and again is None:
            record.keep_inputs(step, stack, ledger)
        graph = GraphStep(self, record, plan == "store", merge=engine != "graph")
        aux = graph.first(stack, ledger, self._watch, again is not None)
        self._records.append(record)
        return aux

    def _record(self, step: Half | Whole, name: str, ledger: Ledger) -> Any:
        kind = HalfRecord if isinstance(step, Half) else WholeRecord
        return kind(step, name, ledger, len(self._records))  # type: ignore[arg-type]

    def close(self, stack: Sequence[Any]) -> None:
        """Save the final streams: the only ones that the call keeps."""
        ledger = self._ledger
        assert ledger is not None, "the call has not ended"
        self._watch.finish()
        tensors = ledger.take()
        self._ledger = None
        self._n_saved = len(tensors)
        places: dict[int, _Place] = {}
        for item in stack:
            if isinstance(item, Tensor) and id(item) not in places:
                places[id(item)] = _Place(len(tensors))
                # Detached aliases share the version counter, but not the graph, whose
                # nodes own this call.
                tensors.append(item.detach())
        self._items = [places.get(id(item), item) for item in stack]
        with torch.enable_grad():
            self._saved = _Saved.apply(_ANCHOR, tensors).grad_fn

    def cursor(self) -> Cursor:
        """Return this backward pass's cursor."""
        task = torch._C._current_graph_task_id()
        known = self._cursors.get(task)
        return self._start(task) if known is None else known

    def seek(self, position: int) -> Cursor:
        """Return this backward pass's cursor, moved to after ``position`` steps."""
        cursor = self.cursor()
        while cursor.position > position:
            record = self._records[cursor.position - 1]
            record.move(cursor.stack, self.side, cursor.saved, backwards=True)
            cursor.position -= 1
        while cursor.position < position:
            record = self._records[cursor.position]
            record.move(cursor.stack, self.side, cursor.saved, backwards=False)
            cursor.position += 1
        return cursor

    def done(self, cursor: Cursor, position: int) -> None:
        """Note that a node has moved its cursor; free it after the last node."""
        cursor.position = position
        cursor.left -= 1
        if cursor.left == 0:
            self._cursors.pop(torch._C._current_graph_task_id(), None)

    def _start(self, task: int) -> Cursor:
        if self._saved is None:
            raise RuntimeError(_FREED)
        tensors: Sequence[Tensor] = self._saved.saved_tensors  # type: ignore[attr-defined]
        stack = [
            tensors[item.index] if type(item) is _Place else item
            for item in self._items
        ]
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            self._saved = None
        self._report.clear()
        saved = tensors[: self._n_saved]
        cursor = Cursor(len(self._records), stack, saved, self._n_nodes)
        self._cursors[task] = cursor
        # For the passes in which some nodes do not run. Compiled autograd has neither
        # tasks nor callbacks; there a cursor that is left serves the next pass.
        if task >= 0:
            torch.autograd.Variable._execution_engine.queue_callback(
                lambda: self._end(task)
            )
        return cursor

    def _end(self, task: int) -> None:
        self._cursors.pop(task, None)
        if self._judge is not None:
            self._judge(self._report)


#: What may stand in a call's list of records.
AnyRecord = HalfRecord | WholeRecord | MoveRecord | CastRecord
