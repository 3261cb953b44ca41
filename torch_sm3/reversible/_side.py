# SPDX-License-Identifier: Apache-2.0
"""Side context: what a call gives to every function and no block changes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor


class Side:
    """Side context of one call: values by name, their tensors in one list.

    Args:
        values: tensors, other values, and nested tuples, lists and dicts of them.
    """

    __slots__ = ("_places", "_templates", "tensors")

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.tensors: list[Tensor] = []
        self._templates: dict[str, Any] = {}
        self._places: dict[str, list[int]] = {}
        index: dict[int, int] = {}
        for name, value in values.items():
            places: list[int] = []
            self._templates[name] = self._strip(value, index, places)
            self._places[name] = places

    def __bool__(self) -> bool:
        return bool(self._templates)

    @property
    def names(self) -> frozenset[str]:
        """Names of the values."""
        return frozenset(self._templates)

    def places(self, keys: Sequence[frozenset[str]]) -> list[int]:
        """Return the positions of the tensors that the named values contain."""
        if not self._templates:
            return []
        names = frozenset().union(*keys)
        return sorted({i for name in names for i in self._places[name]})

    def build(self, keys: Sequence[frozenset[str]], tensors: Any) -> list[Any]:
        """Return one dict of keyword arguments for each layer."""
        if not self._templates:
            return []
        return [
            {name: _fill(self._templates[name], tensors) for name in names}
            for names in keys
        ]

    def without_tensors(self) -> Side:
        """Return the structure alone, which keeps no tensor alive."""
        structure = Side({})
        structure._templates = self._templates
        structure._places = self._places
        return structure

    def _strip(self, value: Any, index: dict[int, int], places: list[int]) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in index:
                index[id(value)] = len(self.tensors)
                self.tensors.append(value)
            places.append(index[id(value)])
            return _Slot(index[id(value)])
        if isinstance(value, dict):
            return {k: self._strip(v, index, places) for k, v in value.items()}
        if isinstance(value, (tuple, list)):
            items = [self._strip(v, index, places) for v in value]
            return _like(value, items)
        return value


class _Slot:
    """Stands for a tensor in a value that keeps none alive."""

    __slots__ = ("place",)

    def __init__(self, place: int) -> None:
        self.place = place


def _like(value: Any, items: list[Any]) -> Any:
    if hasattr(value, "_fields"):
        return type(value)(*items)
    return type(value)(items)


def _fill(template: Any, tensors: Any) -> Any:
    if isinstance(template, _Slot):
        return tensors[template.place]
    if isinstance(template, dict):
        return {k: _fill(v, tensors) for k, v in template.items()}
    if isinstance(template, (tuple, list)):
        return _like(template, [_fill(v, tensors) for v in template])
    return template


@lru_cache(maxsize=1024)
def declared_names(forward: Any, n_positional: int) -> frozenset[str] | None:
    """Names that ``forward`` takes by keyword; None if it takes every name."""
    try:
        parameters = list(inspect.signature(forward).parameters.values())
    except (TypeError, ValueError):  # a TorchScript method
        names = [argument.name for argument in forward.schema.arguments]
        return frozenset(names[1 + n_positional :])
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    positional = [
        p.name
        for p in parameters
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    taken = set(positional[:n_positional])
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(p.name for p in parameters if p.kind in kinds) - taken
