# SPDX-License-Identifier: Apache-2.0
"""The node engine: one autograd node per step, streams rebuilt in the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function

from torch_sm3 import _ops
from torch_sm3.reversible._replay import Replay
from torch_sm3.reversible._steps import Half, Whole, is_stream

if TYPE_CHECKING:
    from torch_sm3.reversible._call import Call, Cursor


class Recorded:
    """One step of one call that has a node."""

    __slots__ = ("keys", "places", "position", "replay", "step")

    def __init__(
        self,
        step: Half | Whole,
        replay: Replay,
        keys: Any,
        places: list[int],
        position: int,
    ) -> None:
        self.step = step
        self.replay = replay
        self.keys = keys
        self.places = places
        self.position = position

    def move(self, stack: list[Any], kwargs: Any, backwards: bool) -> None:
        """Move the stack over this step, or back over it, without grad."""
        step = self.step
        if isinstance(step, Half):
            value = step.run([stack[i] for i in step.reads], kwargs)
            op = _ops.reversible_sub if backwards else _ops.reversible_add
            stack[step.acc] = op(stack[step.acc], value)
        elif backwards:
            stack[: step.n_out] = step.reverse(stack[: step.n_out], kwargs)
        else:
            stack[: step.n_in] = step.run(stack[: step.n_in], kwargs)

    def again(
        self, call: Call, cursor: Cursor, needs: Sequence[bool]
    ) -> tuple[Any, list[Tensor]]:
        """Run F with grad at rebuilt inputs; return its value and its inputs."""
        inputs: list[Tensor] = []

        def track(tensor: Tensor) -> Tensor:
            leaf = tensor.detach().requires_grad_(needs[len(inputs)])
            inputs.append(leaf)
            return leaf

        context = [cursor.stack[i] for i in self.step.reads]
        arguments = [track(x) if isinstance(x, Tensor) else x for x in context]
        side = {i: track(cursor.side[i]) for i in self.places}
        kwargs = call.kwargs(self.keys, side)
        with self.replay.again(), torch.enable_grad():
            value = self.step.run(arguments, kwargs)
        inputs += self.replay.owned
        return value, inputs


def _check_backward(ctx: Any) -> None:
    ctx.saved_tensors  # noqa: B018  raises torch's own error if the graph was freed
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "reversible: expected a backward pass without create_graph, but got "
            "create_graph=True: the node engine rebuilds streams outside the graph, "
            "so a double backward is not possible"
        )


def _vjp(
    step: Recorded,
    values: Sequence[Any],
    grads: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Return F's vector-Jacobian product, None where no gradient is needed."""
    result: list[Tensor | None] = [None] * len(needs)
    wanted = [i for i, need in enumerate(needs) if need]
    pairs = [
        (value, grad.to(value.dtype))
        for value, grad in zip(values, grads, strict=True)
        if grad is not None and value.requires_grad
    ]
    if not pairs or not wanted:
        return result
    values, grads = zip(*pairs, strict=True)
    _check_graph(step.replay, values, inputs)
    with _SuspendedHooks(step.replay.owned):
        found = torch.autograd.grad(
            values, [inputs[i] for i in wanted], grads, allow_unused=True
        )
    for i, grad in zip(wanted, found, strict=True):
        result[i] = grad
    return result


class HalfNode(Function):
    """``acc + value``, where ``value`` came from F of the other inputs."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, step: Recorded, value: Tensor, acc: Tensor, *_: Tensor
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.step = step
        return _ops.reversible_add(acc, value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        _check_backward(ctx)
        call: Call = ctx.call
        step: Recorded = ctx.step
        half: Any = step.step
        needs = ctx.needs_input_grad[4:]
        cursor = call.seek(step.position + 1)
        stack = cursor.stack
        value, inputs = step.again(call, cursor, needs)
        # Before the VJP, so that the old accumulator's memory is free in it.
        stack[half.acc] = _ops.reversible_sub(stack[half.acc], value.detach())
        call.done(cursor, step.position)
        del cursor, stack
        grads = _vjp(step, [value], [grad], inputs, needs)
        return None, None, None, grad, *grads


class WholeNode(Function):
    """A block of the user's: inverse without grad, then forward with grad."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, step: Recorded, values: list[Tensor], *_: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.step = step
        # An output may be an input, which must not get this node as its own.
        return tuple(value.detach() for value in values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        _check_backward(ctx)
        call: Call = ctx.call
        step: Recorded = ctx.step
        needs = ctx.needs_input_grad[3:]
        cursor = call.seek(step.position + 1)
        kwargs = call.kwargs(step.keys, cursor.side)
        with torch.no_grad(), step.replay.again():
            step.move(cursor.stack, kwargs, backwards=True)
        values, inputs = step.again(call, cursor, needs)
        call.done(cursor, step.position)
        streams = [value for value in values if is_stream(value)]
        return None, None, None, *_vjp(step, streams, grads, inputs, needs)


def _check_graph(
    replay: Replay, values: Sequence[Tensor], inputs: Sequence[Tensor]
) -> None:
    """Search F's graph, once, for tensors whose gradient would be lost."""
    if replay.learned.graph_checked:
        return
    known = {id(tensor) for tensor in inputs}
    stops = {t.grad_fn for t in inputs if t.grad_fn is not None}
    seen = set(stops)
    todo = [value.grad_fn for value in values]
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
