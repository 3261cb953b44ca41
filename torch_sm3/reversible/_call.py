# SPDX-License-Identifier: Apache-2.0
"""What the nodes of one call of a sequence share.

A :class:`Call` keeps the final streams, once, and a *cursor* for each running backward
pass: the streams as they were after some step. A node moves the cursor to its own
step, so the order in which autograd runs the nodes affects speed only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import Node

from torch_sm3.reversible._node import HalfNode, Recorded, WholeNode
from torch_sm3.reversible._replay import GeneratorStates, Inventory, Replay
from torch_sm3.reversible._steps import (
    Half,
    Permute,
    Side,
    Step,
    check_value,
    is_stream,
)

_FREED = (
    "Trying to backward through the graph a second time (or directly access saved "
    "tensors after they have already been freed). Saved intermediate values of the "
    "graph are freed when you call .backward() or autograd.grad(). Specify "
    "retain_graph=True if you need to backward through the graph a second time or if "
    "you need to access saved tensors after calling backward."
)


class Cursor:
    """Streams of one backward pass, as they were after ``position`` steps."""

    __slots__ = ("left", "position", "side", "stack")

    def __init__(
        self, position: int, stack: list[Any], side: Sequence[Tensor], left: int
    ) -> None:
        self.position = position
        self.stack = stack
        self.side = side
        #: Nodes that have not run yet in this pass.
        self.left = left


class _Place:
    """Where a saved tensor stands in the final stack."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class _Saved(Function):
    """A node whose saved tensors are the final streams and the side tensors.

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


class Call:
    """What the nodes of one call of a sequence share.

    Args:
        side: the call's side context.
    """

    def __init__(self, side: Side) -> None:
        self._steps: list[Recorded | Permute] = []
        self._states: GeneratorStates = {}
        self._side = side
        self._n_side = len(side.tensors)
        self._n_nodes = 0
        self._cursors: dict[int, Cursor] = {}
        self._saved: Node | None = None
        self._items: list[Any] = []

    def run(self, step: Step, name: str, stack: list[Any]) -> None:
        """Run one step on ``stack``; give it a node unless it is a permutation."""
        if isinstance(step, Permute):
            step.move(self, stack, backwards=False)
            self._steps.append(step)
            return
        context = [stack[i] for i in step.reads]
        keys = step.side_names(self._side)
        places = self._side.places(keys)
        tensors = [item for item in context if isinstance(item, Tensor)]
        tensors += [self._side.tensors[i] for i in places]
        replay = Replay(name, step.layers, Inventory(step.layers), step.learned)
        recorded = Recorded(step, replay, keys, places, len(self._steps))
        kwargs = self._side.build(keys, self._side.tensors)
        with torch.no_grad():
            value = replay.first(
                lambda: step.run(context, kwargs), tensors, self._states
            )
        inputs = [*tensors, *replay.owned]
        if isinstance(step, Half):
            acc = stack[step.acc]
            check_value(value, acc, name)
            stack[step.acc] = HalfNode.apply(self, recorded, value, acc, *inputs)
        else:
            streams = [y for y in value if is_stream(y)]
            outputs = iter(WholeNode.apply(self, recorded, streams, *inputs))
            stack[: step.n_in] = [next(outputs) if is_stream(y) else y for y in value]
        self._steps.append(recorded)
        self._n_nodes += 1

    def close(self, stack: Sequence[Any]) -> None:
        """Save the final streams: the only ones that the call keeps."""
        tensors = list(self._side.tensors)
        places: dict[int, _Place] = {}
        for item in stack:
            if isinstance(item, Tensor) and id(item) not in places:
                places[id(item)] = _Place(len(tensors))
                tensors.append(item)
        self._items = [places.get(id(item), item) for item in stack]
        # Detached aliases: they share the version counter, but not the graph, whose
        # nodes own this call.
        aliases = [tensor.detach() for tensor in tensors]
        with torch.enable_grad():
            self._saved = _Saved.apply(_ANCHOR, aliases).grad_fn
        self._side = self._side.without_tensors()
        self._states = {}

    def kwargs(self, keys: Any, tensors: Any) -> list[dict[str, Any]]:
        """Build one F's keyword arguments from ``tensors``."""
        return self._side.build(keys, tensors)

    def seek(self, position: int) -> Cursor:
        """Return this backward pass's cursor, moved to after ``position`` steps."""
        task = torch._C._current_graph_task_id()
        cursor = self._cursors.get(task)
        if cursor is None:
            cursor = self._start(task)
        while cursor.position > position:
            self._move(cursor, cursor.position - 1, backwards=True)
            cursor.position -= 1
        while cursor.position < position:
            self._move(cursor, cursor.position, backwards=False)
            cursor.position += 1
        return cursor

    def done(self, cursor: Cursor, position: int) -> None:
        """Note that a node has moved its cursor; free it after the last node."""
        cursor.position = position
        cursor.left -= 1
        if cursor.left == 0:
            self._cursors.pop(torch._C._current_graph_task_id(), None)

    def _move(self, cursor: Cursor, index: int, backwards: bool) -> None:
        step = self._steps[index]
        if isinstance(step, Permute):
            step.move(self, cursor.stack, backwards)
        else:
            kwargs = self.kwargs(step.keys, cursor.side)
            with torch.no_grad(), step.replay.again():
                step.move(cursor.stack, kwargs, backwards)

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
        side = tensors[: self._n_side]
        cursor = Cursor(len(self._steps), stack, side, self._n_nodes)
        cursors = self._cursors
        cursors[task] = cursor

        def forget() -> None:
            cursors.pop(task, None)

        # For the passes in which some nodes do not run.
        torch.autograd.Variable._execution_engine.queue_callback(forget)
        return cursor
