# SPDX-License-Identifier: Apache-2.0
"""The node engine: one autograd node per step, streams rebuilt in the backward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function

from torch_sm3.reversible._half import HalfRecord
from torch_sm3.reversible._region import eager_region
from torch_sm3.reversible._steps import is_stream
from torch_sm3.reversible._whole import WholeRecord

if TYPE_CHECKING:
    from torch_sm3.reversible._call import Call

_REASON = "streams are rebuilt by running functions again"


def _check_backward(ctx: Any) -> None:
    ctx.saved_tensors  # noqa: B018  raises torch's own error if the graph was freed
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "reversible: expected a backward pass without create_graph, but got "
            "create_graph=True: the node engine rebuilds streams outside the graph, "
            "so a double backward needs double_backward=True"
        )


class HalfNode(Function):
    """The new accumulator and F's floating aux outputs, computed before."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        record: HalfRecord,
        outputs: list[Tensor],
        acc: Tensor,
        *_: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.record = record
        if not any(ctx.needs_input_grad[4:]):
            # The accumulator alone needs a gradient; F's aux outputs have none.
            ctx.mark_non_differentiable(*outputs[1:])
        return tuple(outputs)

    @staticmethod
    @eager_region(_REASON)
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        _check_backward(ctx)
        call: Call = ctx.call
        record: HalfRecord = ctx.record
        needs = ctx.needs_input_grad[4:]
        cursor = call.seek(record.position + 1)
        acc_grad, found = record.reverse_and_grad(
            cursor.stack, call.side, cursor.saved, grads, needs
        )
        call.done(cursor, record.position)
        return None, None, None, acc_grad, *found


class WholeNode(Function):
    """The floating outputs of a block of the user's, computed before."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, record: WholeRecord, outputs: list[Any], *_: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.record = record
        ctx.streams = [is_stream(y) for y in outputs]
        return tuple([y for y in outputs if is_stream(y)])

    @staticmethod
    @eager_region(_REASON)
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        _check_backward(ctx)
        call: Call = ctx.call
        record: WholeRecord = ctx.record
        given = iter(grads)
        all_grads = [next(given) if stream else None for stream in ctx.streams]
        needs = ctx.needs_input_grad[3:]
        cursor = call.seek(record.position + 1)
        found = record.reverse_and_grad(
            cursor.stack, call.side, cursor.saved, all_grads, needs
        )
        call.done(cursor, record.position)
        return None, None, None, *found
