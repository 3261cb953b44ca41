# SPDX-License-Identifier: Apache-2.0
"""Run all layers forward, and keep nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch_sm3.trainer._exact import Reversal
from torch_sm3.trainer._layers import StandardLayers
from torch_sm3.trainer._seeds import fold, seeded
from torch_sm3.trainer._store import loss_call
from torch_sm3.trainer._track import Plan


def evaluate(plan: Plan, stack: Sequence[Any], seed: int, microbatch: int) -> Any:
    """Return what the loss layer returns for one microbatch, without grad."""
    items = list(stack)
    aux: list[Any] = []
    layers = plan.model.layers
    for i, layer in enumerate(layers):
        plan.place.visit(layer, layers[i + 1 :])
        with seeded(fold(fold(seed, layer.index), microbatch), plan.device):
            if layer.kind == "standard":
                assert isinstance(layer.module, StandardLayers)
                items = layer.module.run(items)[0]
            elif layer.kind == "reversible":
                items = plan.entry.enter(layer, items)
                places = plan.side.of(layer, items)
                side = {name: items[place] for name, place in places.items()}
                needs = [False] * len(items)
                run = Reversal(layer, plan.exact, plan.stats)
                items, more = run.forward(items, side, needs)
                aux += more
            else:
                result = loss_call(layer, [*items, *aux])
        plan.place.leave(layer)
    return result[0] if isinstance(result, (tuple, list)) else result
