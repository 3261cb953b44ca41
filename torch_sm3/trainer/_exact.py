# SPDX-License-Identifier: Apache-2.0
"""How reversible layers run: exactly or not, reversibly or stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_sm3.trainer._layers import Layer, Model

StoreRun = Callable[[list[Any], dict[str, Any]], tuple[list[Any], list[Any]]]


class Entry:
    def __init__(self, model: Model, exact: str) -> None:
        pass

    def quantized(self, layer: Layer, items: list[Any]) -> list[Any]:
        return items


def store_run(layer: Layer, exact: str) -> StoreRun:
    block = layer.module

    def run(items, side):
        top = block(*items[: block.n_in], **side)
        return [*top, *items[block.n_in :]], []

    return run


from torch_sm3.trainer._stand_in import LayerRun


class Reversal:
    def __init__(self, layer, exact):
        self._run = LayerRun(layer.module, exact)

    def forward(self, stack, side):
        return self._run.forward(stack, side), []

    def reverse(self, stack, grads, needs, aux_grads, last):
        return self._run.reverse_and_grad(stack, grads)


def pieces(layer, side):
    block = layer.module

    def call(run, items):
        top = run(*items[: block.n_in], **side)
        return [*top, *items[block.n_in :]]

    return [(block, call)]
