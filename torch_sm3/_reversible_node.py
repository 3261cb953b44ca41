# SPDX-License-Identifier: Apache-2.0
"""The node engine: one autograd node per half-residual, streams rebuilt in backward.

The nodes of one call share a :class:`Call`. It keeps the final streams, once, and a
*cursor* for each running backward pass: the streams as they were after some step. A
node moves the cursor to its own step, so the order in which autograd runs the nodes
affects speed only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import Node

from torch_sm3 import _ops
from torch_sm3._reversible_replay import GeneratorStates, Inventory, Replay
from torch_sm3._reversible_steps import Half, Permute, Side, check_value

_FREED = (
    "Trying to backward through the graph a second time (or directly access saved "
    "tensors after they have already been freed). Saved intermediate values of the "
    "graph are freed when you call .backward() or autograd.grad(). Specify "
    "retain_graph=True if you need to backward through the graph a second time or if "
    "you need to access saved tensors after calling backward."
)


class _Cursor:
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
        self.steps: list[_Recorded | Permute] = []
        self._states: GeneratorStates = {}
        self._side: Side | None = side
        self._n_side = len(side.tensors)
        self._n_nodes = 0
        self._cursors: dict[int, _Cursor] = {}
        self._saved: Node | None = None
        self._items: list[Any] = []

    def half(self, half: Half, name: str, stack: list[Any]) -> None:
        """Run one half-residual on ``stack`` and give it a node."""
        assert self._side is not None
        acc = stack[half.acc]
        context = [stack[i] for i in half.reads]
        tensors = [item for item in context if isinstance(item, Tensor)]
        keys = half.side_names(self._side)
        places = self._side.places(keys)
        side = [self._side.tensors[i] for i in places]
        replay = Replay(name, half.layers, Inventory(half.layers), half.learned)
        kwargs = self._side.build(keys, self._side.tensors)
        with torch.no_grad():
            value = replay.first(
                lambda: half.run(context, kwargs), [*tensors, *side], self._states
            )
        check_value(value, acc, name)
        recorded = _Recorded(half, replay, keys, places, len(self.steps))
        stack[half.acc] = _HalfNode.apply(
            self, recorded, value, acc, *tensors, *side, *replay.owned
        )
        self.steps.append(recorded)
        self._n_nodes += 1

    def permute(self, step: Permute, stack: list[Any]) -> None:
        """Permute ``stack``; autograd needs no node for that."""
        step.forward(stack)
        self.steps.append(step)

    def close(self, stack: Sequence[Any]) -> None:
        """Save the final streams: the only ones that the call keeps."""
        assert self._side is not None
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

    def side(self, keys: Any, tensors: Any) -> Any:
        """Build one F's keyword arguments from ``tensors``."""
        assert self._side is not None
        return self._side.build(keys, tensors)

    def seek(self, position: int) -> _Cursor:
        """Return this backward pass's cursor, moved to after ``position`` steps."""
        task = torch._C._current_graph_task_id()
        cursor = self._cursors.get(task)
        if cursor is None:
            cursor = self._start(task)
        while cursor.position > position:
            step = self.steps[cursor.position - 1]
            if isinstance(step, Permute):
                step.reverse(cursor.stack)
            else:
                step.move(self, cursor, _ops.reversible_sub)
            cursor.position -= 1
        while cursor.position < position:
            step = self.steps[cursor.position]
            if isinstance(step, Permute):
                step.forward(cursor.stack)
            else:
                step.move(self, cursor, _ops.reversible_add)
            cursor.position += 1
        return cursor

    def done(self, cursor: _Cursor) -> None:
        """Count one node as run; free the cursor after the last one."""
        cursor.left -= 1
        if cursor.left == 0:
            self._cursors.pop(torch._C._current_graph_task_id(), None)

    def _start(self, task: int) -> _Cursor:
        if self._saved is None:
            raise RuntimeError(_FREED)
        tensors: Sequence[Tensor] = self._saved.saved_tensors  # type: ignore[attr-defined]
        stack = [
            tensors[item.index] if type(item) is _Place else item
            for item in self._items
        ]
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            self._saved = None
        cursor = _Cursor(len(self.steps), stack, tensors[: self._n_side], self._n_nodes)
        cursors = self._cursors
        cursors[task] = cursor

        def forget() -> None:
            cursors.pop(task, None)

        # For the passes in which some nodes do not run.
        torch.autograd.Variable._execution_engine.queue_callback(forget)
        return cursor


class _Recorded:
    """One half-residual of one call."""

    __slots__ = ("half", "keys", "places", "position", "replay")

    def __init__(
        self, half: Half, replay: Replay, keys: Any, places: list[int], position: int
    ) -> None:
        self.half = half
        self.replay = replay
        self.keys = keys
        self.places = places
        self.position = position

    def move(self, call: Call, cursor: _Cursor, op: Any) -> None:
        """Move the cursor's streams over this step, without grad."""
        stack = cursor.stack
        context = [stack[i] for i in self.half.reads]
        kwargs = call.side(self.keys, cursor.side)
        with torch.no_grad(), self.replay.again():
            value = self.half.run(context, kwargs)
        stack[self.half.acc] = op(stack[self.half.acc], value)


class _HalfNode(Function):
    """``acc + value``, where ``value`` came from F of the other inputs."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, step: _Recorded, value: Tensor, acc: Tensor, *_: Tensor
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.step = step
        return _ops.reversible_add(acc, value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        ctx.saved_tensors  # noqa: B018  raises torch's own error if it was freed
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "reversible: expected a backward pass without create_graph, but got "
                "create_graph=True: the node engine rebuilds streams outside the "
                "graph, so a double backward is not possible"
            )
        call: Call = ctx.call
        step: _Recorded = ctx.step
        needs = ctx.needs_input_grad[4:]
        cursor = call.seek(step.position + 1)
        value, inputs = _recompute(call, step, cursor, needs)
        stack, acc = cursor.stack, step.half.acc
        # Before the VJP, so that the old accumulator's memory is free in it.
        stack[acc] = _ops.reversible_sub(stack[acc], value.detach())
        cursor.position = step.position
        call.done(cursor)
        del cursor, stack
        grads: list[Tensor | None] = [None] * len(needs)
        if grad is not None and value.requires_grad and any(needs):
            _check_graph(step.replay, value, inputs)
            wanted = [i for i, need in enumerate(needs) if need]
            with _SuspendedHooks(step.replay.owned):
                found = torch.autograd.grad(
                    value,
                    [inputs[i] for i in wanted],
                    grad.to(value.dtype),
                    allow_unused=True,
                )
            for i, result in zip(wanted, found, strict=True):
                grads[i] = result
        return None, None, None, grad, *grads


def _recompute(
    call: Call, step: _Recorded, cursor: _Cursor, needs: Sequence[bool]
) -> tuple[Tensor, list[Tensor]]:
    """Run F with grad at the rebuilt inputs; return its value and its inputs."""
    inputs: list[Tensor] = []

    def track(tensor: Tensor) -> Tensor:
        leaf = tensor.detach().requires_grad_(needs[len(inputs)])
        inputs.append(leaf)
        return leaf

    context = []
    for i in step.half.reads:
        item = cursor.stack[i]
        context.append(track(item) if isinstance(item, Tensor) else item)
    side: dict[int, Tensor] = {i: track(cursor.side[i]) for i in step.places}
    with step.replay.again(), torch.enable_grad():
        value = step.half.run(context, call.side(step.keys, side))
    inputs += step.replay.owned
    return value, inputs


def _check_graph(replay: Replay, value: Tensor, inputs: Iterable[Tensor]) -> None:
    """Search F's graph, once, for tensors whose gradient would be lost."""
    if replay.learned.graph_checked:
        return
    known = {id(tensor) for tensor in inputs}
    stops = {t.grad_fn for t in inputs if t.grad_fn is not None}
    seen = set(stops)
    todo = [value.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            raise RuntimeError(
                f"reversible: expected every tensor that F of {replay.name} needs the "
                "gradient of to be an input, side context, or an attribute of F, but "
                f"got one of shape {tuple(leaf.shape)} from elsewhere (argument 'F')"
            )
        todo += [edge[0] for edge in node.next_functions]
    replay.learned.graph_checked = True


class _SuspendedHooks:
    """Keeps tensor hooks for the outer backward pass, where they fire once."""

    __slots__ = ("_content", "_hooks")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        found: list[Any] = [tensor._backward_hooks for tensor in tensors]
        self._hooks = [hooks for hooks in found if hooks]

    def __enter__(self) -> None:
        self._content = [dict(hooks) for hooks in self._hooks]
        for hooks in self._hooks:
            # Emptied in place: autograd holds the dictionary itself.
            hooks.clear()

    def __exit__(self, *_: object) -> None:
        for hooks, content in zip(self._hooks, self._content, strict=True):
            hooks.update(content)
