# SPDX-License-Identifier: Apache-2.0
"""Residual functions that end in an attention layer with a split backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from torch_sm3.reversible._attend import SplitAttention
from torch_sm3.reversible._functions import First, Function, Pulled, Result
from torch_sm3.reversible._ledger import Ledger
from torch_sm3.reversible._remember import unobserved
from torch_sm3.reversible._split import draw_seed, forward_and_or_backward


class Place(NamedTuple):
    """Stands for a tensor that the ledger keeps."""

    place: int


class AttentionFunction(Function):
    """Layers whose outputs feed an attention layer.

    Args:
        layers: modules that run before it.
        attention: the layer; it takes the first ``n_in`` outputs (attribute, default
            1), the others are aux outputs.
        n_context: see :class:`Function`.
        context: see :class:`Function`.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        attention: nn.Module,
        n_context: int,
        has_aux: bool,
        context: Sequence[str] | None,
    ) -> None:
        super().__init__(layers, n_context, has_aux, context)
        self.attention = attention
        self.n_taken: int = getattr(attention, "n_in", 1)

    @property
    def modules(self) -> Sequence[nn.Module]:
        """All modules below which F's parameters and buffers are."""
        return [*self.layers, self.attention]

    def inputs(
        self, context: Sequence[Any], kwargs: Sequence[dict[str, Any]], name: str
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return what attention takes and the aux outputs."""
        value: Any = tuple(context)
        if self.layers:
            value = self.features(context, kwargs)
        value = value if isinstance(value, tuple) else (value,)
        if len(value) < self.n_taken or (
            len(value) > self.n_taken and not self.has_aux
        ):
            raise TypeError(
                f"reversible: expected the layers of {name} to return {self.n_taken} "
                f"items for attention, but got {len(value)} (argument 'layers')"
            )
        return value[: self.n_taken], value[self.n_taken :]

    def run(
        self, context: Sequence[Any], kwargs: Sequence[dict[str, Any]], name: str
    ) -> Result:
        """Return attention's output, differentiable, and the aux outputs."""
        inputs, aux = self.inputs(context, kwargs, name)
        seed = draw_seed(self.attention)
        with unobserved():
            output, _ = SplitAttention.run(self.attention, inputs, None, seed)
        return [output], aux

    def first_in_graph(
        self, context: Sequence[Any], kwargs: Sequence[dict[str, Any]], name: str
    ) -> First:
        """Run F for the first time, with values that are part of a graph."""
        inputs, aux = self.inputs(context, kwargs, name)
        seed = draw_seed(self.attention)
        output, state = SplitAttention.run(self.attention, inputs, None, seed)
        return First([output], aux, (seed, state), [output, *aux])

    def again_in_graph(
        self,
        context: Sequence[Any],
        kwargs: Sequence[dict[str, Any]],
        name: str,
        note: Any,
        saved: Sequence[Tensor],
    ) -> Result:
        """Run F for the second time, with the same graph and the first run's state."""
        inputs, aux = self.inputs(context, kwargs, name)
        draw_seed(self.attention)
        seed, state = self._recalled(note, saved)
        output, _ = SplitAttention.run(self.attention, inputs, state, seed)
        return [output], aux

    def first(
        self, context: Sequence[Any], kwargs: Sequence[dict[str, Any]], name: str
    ) -> First:
        """Run F for the first time; the note is the seed and the state."""
        inputs, aux = self.inputs(context, kwargs, name)
        seed = draw_seed(self.attention)
        with torch.no_grad():
            output, state, _, _ = forward_and_or_backward(
                self.attention, inputs, None, None, seed, None, True, True
            )
        assert output is not None, "it was asked for"
        return First([output], aux, (seed, state), [*inputs, *aux])

    def keep_note(self, note: Any, ledger: Ledger) -> Any:
        """Return the note with the state's tensors moved to the ledger."""
        seed, state = note
        leaves, structure = tree_flatten(state)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        places = iter(ledger.keep_all(tensors))
        marks = [
            Place(next(places)) if isinstance(leaf, Tensor) else leaf for leaf in leaves
        ]
        return seed, marks, structure

    def again(
        self,
        context: Sequence[Any],
        kwargs: Sequence[dict[str, Any]],
        name: str,
        note: Any,
        saved: Sequence[Tensor],
        grad: Tensor | None,
    ) -> tuple[list[Tensor], tuple[Any, ...], Pulled | None]:
        """Run the layers again, and attention's forward and backward at once."""
        inputs, aux = self.inputs(context, kwargs, name)
        # What the first run drew; the generator has to move on all the same.
        draw_seed(self.attention)
        seed, state = self._recalled(note, saved)
        detached = tuple([x.detach() if isinstance(x, Tensor) else x for x in inputs])
        with torch.no_grad():
            output, _, input_grads, weight_grads = forward_and_or_backward(
                self.attention, detached, None, state, seed, grad, True, False
            )
        assert output is not None, "it was asked for"
        if grad is None:
            return [output], aux, None
        assert input_grads is not None, "they were asked for"
        assert weight_grads is not None, "they were asked for"
        pairs = [
            (x, g)
            for x, g in zip(inputs, input_grads, strict=True)
            if isinstance(x, Tensor) and x.requires_grad
        ]
        weights = list(zip(self.attention.parameters(), weight_grads, strict=True))
        pulled = Pulled([x for x, _ in pairs], [g for _, g in pairs], weights)
        return [output], aux, pulled

    def _recalled(self, note: Any, saved: Sequence[Tensor]) -> tuple[int, Any]:
        seed, marks, structure = note
        leaves = [saved[m.place] if isinstance(m, Place) else m for m in marks]
        return seed, tree_unflatten(leaves, structure)
