# SPDX-License-Identifier: Apache-2.0
"""The store run of layers: one graph of ordinary autograd for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from torch_sm3.trainer._exact import Entry, store_run
from torch_sm3.trainer._layers import Layer, Model, StandardLayers, as_items
from torch_sm3.trainer._seeds import fold, seeded
from torch_sm3.trainer._side import SideItems


class Store:
    """Runs layers in order under autograd, each with its seed.

    Args:
        model: the layers.
        exact: how streams are kept exact.
        side: side context of reversible layers.
        device: where layers run.
    """

    def __init__(
        self, model: Model, exact: str, side: SideItems, device: torch.device
    ) -> None:
        self._model = model
        self._side = side
        self._device = device
        self._entry = Entry(model, exact, "store")
        self._runs = {
            layer.index: store_run(layer, exact)
            for layer in model.layers
            if layer.kind == "reversible"
        }

    def run(self, stack: Sequence[Any], seed: int, microbatch: int) -> Any:
        """Return what the loss layer returns for one microbatch."""
        items = list(stack)
        aux: list[Any] = []
        for layer in self._model.layers:
            if layer.kind == "loss":
                items = _together([*items, *aux])
            else:
                items = _together(items)
            with seeded(fold(fold(seed, layer.index), microbatch), self._device):
                if layer.kind == "standard":
                    assert isinstance(layer.module, StandardLayers)
                    items = layer.module.run(items)[0]
                elif layer.kind == "reversible":
                    items, more = self._reversible(layer, items)
                    aux += more
                else:
                    items = as_items(loss_call(layer, items))
        return items[0]

    def _reversible(
        self, layer: Layer, items: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        items = self._entry.enter(layer, items)
        places = self._side.of(layer, items)
        # An item that has several names is one tensor, joined once.
        unique = sorted(set(places.values()))
        joined = _together([items[place] for place in unique])
        by_place = dict(zip(unique, joined, strict=True))
        own = {name: by_place[place] for name, place in places.items()}
        result, aux = self._runs[layer.index](items, own)
        self._side.check(layer, items, result)
        return result, aux


def loss_call(layer: Layer, stack: Sequence[Any]) -> Any:
    """Run a loss layer: on its ``n_in`` items, or on the whole stack."""
    return layer.module(*stack[: loss_inputs(layer, stack)])


def loss_inputs(layer: Layer, stack: Sequence[Any]) -> int:
    """Return how many items a loss layer takes."""
    return min(len(stack), int(getattr(layer.module, "n_in", len(stack))))


class _Join(Function):
    """Identity of several tensors by one node.

    The uses of a tensor inside a layer are added up before they join those of later
    layers, as they are where a layer's backward pass is a step of its own.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads


def _together(items: list[Any]) -> list[Any]:
    tracked = [x for x in items if isinstance(x, Tensor) and x.requires_grad]
    if not tracked:
        return items
    joined = iter(_Join.apply(*tracked))
    return [
        next(joined) if isinstance(x, Tensor) and x.requires_grad else x for x in items
    ]
