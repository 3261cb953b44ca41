# SPDX-License-Identifier: Apache-2.0
"""Side context of reversible layers: stack items that functions take by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch_sm3.reversible import Block
from torch_sm3.reversible._moves import Move
from torch_sm3.reversible._side import Side
from torch_sm3.trainer._layers import Layer, Model


class SideItems:
    """Names of stack items, counted from the bottom, which standard layers keep.

    Args:
        op: how messages call the caller.
        model: whose reversible layers take them.
        places: from names to places: -1 is the last item of the stack.

    Raises:
        ValueError: for a place that is not negative.
        TypeError: for a name that no reversible layer takes.
    """

    def __init__(self, op: str, model: Model, places: Mapping[str, int] | None) -> None:
        self._op = op
        self._places = dict(places or {})
        for name, place in self._places.items():
            if place >= 0:
                raise ValueError(
                    f"{op}: expected places from the bottom of the stack, -1 for the "
                    f"last item, but got {place} for '{name}' (argument 'side')"
                )
        self._taken: dict[int, dict[str, int]] = {}
        for layer in model.layers:
            if layer.kind == "reversible" and isinstance(layer.module, Block):
                names = side_names(layer.module, self._places)
                self._taken[layer.index] = {n: self._places[n] for n in names}
        used = {name for taken in self._taken.values() for name in taken}
        unknown = sorted(self._places.keys() - used)
        if unknown:
            raise TypeError(
                f"{op}: expected names that a reversible layer takes, but got "
                f"{', '.join(unknown)} (argument 'side')"
            )

    def of(self, layer: Layer, stack: Sequence[Any]) -> dict[str, int]:
        """Return the places of the side context that a reversible layer takes."""
        taken = self._taken[layer.index]
        for name, place in taken.items():
            if -place > len(stack):
                raise ValueError(
                    f"{self._op}: expected a stack of at least {-place} items at "
                    f"{layer.name}, but got {len(stack)} (argument 'side', '{name}')"
                )
        return taken

    def check(self, layer: Layer, before: Sequence[Any], after: Sequence[Any]) -> None:
        """Check that a layer has left its side context where it was.

        Raises:
            ValueError: if it is a stream that the layer changes or moves.
        """
        for name, place in self._taken[layer.index].items():
            if -place > len(after) or before[place] is not after[place]:
                raise ValueError(
                    f"{self._op}: expected '{name}' to be an item that no reversible "
                    f"layer changes, but got one that {layer.name} changes (argument "
                    "'side')"
                )


def side_names(block: Block, places: Mapping[str, int]) -> set[str]:
    """Return the names of side context that a block takes."""
    side = Side(dict(places))
    steps = [step for step in block._steps() if not isinstance(step, Move)]
    return {name for step in steps for names in step.side_names(side) for name in names}
