# SPDX-License-Identifier: Apache-2.0
"""The same blocks under ordinary autograd: the store run and the run without grad."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from torch_sm3.reversible._moves import Move
from torch_sm3.reversible._side import Side
from torch_sm3.reversible._steps import Half, Step, check_values, is_stream


class _Together(Function):
    """An identity of several tensors as one node.

    F's uses of one input are so summed before they meet the gradient of the input's
    other users, as in the node engine: addition is not associative.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple([tensor.view_as(tensor) for tensor in tensors])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return grads

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        return tuple([t if t is None else t.view_as(t) for t in tangents])


def together(
    context: Sequence[Any], side: Sequence[Tensor]
) -> tuple[list[Any], list[Tensor]]:
    """Pass F's inputs through one node, in the order context, side context."""
    items = [*context, *side]
    streams = [x for x in items if is_stream(x) and x.requires_grad]
    if not streams or not torch.is_grad_enabled():
        return list(context), list(side)
    passed = iter(_Together.apply(*streams))
    items = [next(passed) if is_stream(x) and x.requires_grad else x for x in items]
    return items[: len(context)], items[len(context) :]


def run_step(
    step: Step,
    stack: list[Any],
    side: Side,
    name: str,
    backwards: bool = False,
    rule: Any = None,
    merge: bool = False,
) -> tuple[Any, ...]:
    """Run a step, or its inverse, with ordinary operators; return F's aux outputs.

    Args:
        step: the step.
        stack: all items; changed.
        side: the call's side context.
        name: how messages call the step's block.
        backwards: run the inverse.
        rule: returns how a half joins its values, where the exact mode changes it.
        merge: pass F's inputs through one node, as the store run does.
    """
    if isinstance(step, Move):
        if backwards:
            step.move_back(stack, step.note_of(stack[: step.n_out]))
        else:
            step.move(stack, name)
        return ()
    keys = step.side_names(side)
    places = side.places(keys)
    context = [stack[i] for i in step.reads]
    tensors = [side.tensors[i] for i in places]
    if merge:
        context, tensors = together(context, tensors)
    kwargs = side.build(keys, dict(zip(places, tensors, strict=True)))
    if isinstance(step, Half):
        return _run_half(step, stack, context, kwargs, name, backwards, rule)
    if backwards:
        stack[: step.n_out] = step.reverse(stack[: step.n_out], kwargs)
    else:
        stack[: step.n_in] = step.run(context, kwargs)
    return ()


def _run_half(
    step: Half,
    stack: list[Any],
    context: Sequence[Any],
    kwargs: Any,
    name: str,
    backwards: bool,
    rule: Any,
) -> tuple[Any, ...]:
    values, aux = step.function.run(context, kwargs, name)
    check_values(values, stack[step.acc], name)
    rule = step.rule if rule is None else rule(step)
    join = rule.invert if backwards else rule.apply
    stack[step.acc] = join(stack[step.acc], values)
    return aux
