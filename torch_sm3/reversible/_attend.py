# SPDX-License-Identifier: Apache-2.0
"""One autograd node for an attention layer that splits its own work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from torch_sm3.reversible._split import AutocastState, forward_and_or_backward


class SplitAttention(Function):
    """Calls ``forward_and_or_backward`` once forward and once backward."""

    @staticmethod
    def run(
        attention: nn.Module, inputs: Sequence[Any], state: Any, seed: int
    ) -> tuple[Tensor, Any]:
        """Return the output and the state; a given state is not updated."""
        if not hasattr(attention, "forward_and_or_backward"):
            # Its backward would be a run of its own, with other random numbers.
            return attention(*inputs), ()
        box: list[Any] = [state]
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        template = [Tensor if isinstance(x, Tensor) else x for x in inputs]
        weights = list(attention.parameters())
        call = (attention, box, seed, template, len(tensors))
        output = SplitAttention.apply(call, *tensors, *weights)
        return output, box[0]

    @staticmethod
    def forward(ctx: Any, call: Any, *tensors: Tensor) -> Tensor:
        attention, box, seed, template, count = call
        inputs = _filled(template, tensors[:count])
        update = box[0] is None
        output, state, _, _ = forward_and_or_backward(
            attention, inputs, None, box[0], seed, None, True, update
        )
        assert output is not None, "it was asked for"
        if update:
            box[0] = state
        ctx.call = (attention, box[0], seed, template, count)
        ctx.training = attention.training
        ctx.autocast = AutocastState(output.device.type)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        attention, state, seed, template, count = ctx.call
        tensors = ctx.saved_tensors
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "attention: expected a backward pass without create_graph, but got "
                "create_graph=True: the layer computes gradients outside the graph"
            )
        if grad is None:
            return (None,) * (1 + len(tensors))
        inputs = _filled(template, tensors[:count])
        with ctx.autocast.again(), _training(attention, ctx.training):
            _, _, input_grads, weight_grads = forward_and_or_backward(
                attention, inputs, None, state, seed, grad, False, False
            )
        assert input_grads is not None, "they were asked for"
        assert weight_grads is not None, "they were asked for"
        pairs = zip(inputs, input_grads, strict=True)
        found = [g for x, g in pairs if isinstance(x, Tensor)]
        return None, *found, *weight_grads


@contextlib.contextmanager
def _training(module: nn.Module, flag: bool) -> Iterator[None]:
    """Give a module the training flag of its forward pass."""
    outer, module.training = module.training, flag
    try:
        yield
    finally:
        module.training = outer


def _filled(template: Sequence[Any], tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    values = iter(tensors)
    return tuple(next(values) if item is Tensor else item for item in template)
