# SPDX-License-Identifier: Apache-2.0
"""The steps that reversible blocks are made of, and side context."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor, nn

from torch_sm3 import _ops
from torch_sm3.reversible._replay import Learned


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
def _declared(forward: Any, n_positional: int) -> frozenset[str] | None:
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


class Half:
    """The step ``stack[acc] += F(stack[reads])``.

    Args:
        layers: modules that run one after the other and together are F.
        acc: position of the accumulator in the stack.
        reads: positions of F's arguments.
        learned: what earlier calls found out about F.
    """

    __slots__ = ("acc", "layers", "learned", "reads")

    def __init__(
        self,
        layers: Sequence[nn.Module],
        acc: int,
        reads: Sequence[int],
        learned: Learned,
    ) -> None:
        self.layers = layers
        self.acc = acc
        self.reads = reads
        self.learned = learned

    def run(self, context: Sequence[Any], kwargs: Sequence[dict[str, Any]]) -> Any:
        """Return F's value; the first layer takes the context."""
        layers = self.layers
        if not kwargs:
            value = layers[0](*context)
            for layer in layers[1:]:
                value = layer(*value) if isinstance(value, tuple) else layer(value)
            return value
        value = layers[0](*context, **kwargs[0])
        for layer, names in zip(layers[1:], kwargs[1:], strict=True):
            arguments = value if isinstance(value, tuple) else (value,)
            value = layer(*arguments, **names)
        return value

    def side_names(self, side: Side) -> list[frozenset[str]]:
        """Return, for each layer, the names of side context that it takes."""
        if not side:
            return []
        names = []
        for i, layer in enumerate(self.layers):
            forward = getattr(layer.forward, "__func__", None)
            taken = len(self.reads) if i == 0 else 1
            if forward is None:
                declared = _declared(layer.forward, taken)
            else:
                declared = _declared(forward, taken + 1)
            names.append(side.names if declared is None else declared & side.names)
        return names

    def plain(self, stack: list[Any], side: Side, name: str, backwards: bool) -> None:
        """Run the step, or its inverse, with ordinary operators."""
        kwargs = side.build(self.side_names(side), side.tensors)
        value = self.run([stack[i] for i in self.reads], kwargs)
        check_value(value, stack[self.acc], name)
        op = _ops.reversible_sub if backwards else _ops.reversible_add
        stack[self.acc] = op(stack[self.acc], value)


class Whole:
    """A block of the user's as one step: its ``forward`` and its ``inverse``.

    Args:
        block: the block.
        learned: what earlier calls found out about it.
    """

    __slots__ = ("block", "layers", "learned", "n_in", "n_out", "reads")

    def __init__(self, block: Any, learned: Learned) -> None:
        self.block = block
        self.layers = (block,)
        self.learned = learned
        self.n_in: int = block.n_in
        self.n_out: int = block.n_out
        self.reads = range(self.n_in)

    def run(
        self, items: Sequence[Any], kwargs: Sequence[dict[str, Any]]
    ) -> tuple[Any, ...]:
        """Return what the block makes of the top of the stack."""
        result = self.block(*items, **(kwargs[0] if kwargs else {}))
        return self._checked(result, self.n_out)

    def reverse(
        self, items: Sequence[Any], kwargs: Sequence[dict[str, Any]]
    ) -> tuple[Any, ...]:
        """Return what the block's inverse makes of the top of the stack."""
        result = self.block.inverse(*items, **(kwargs[0] if kwargs else {}))
        return self._checked(result, self.n_in)

    def _checked(self, result: Any, count: int) -> tuple[Any, ...]:
        if not isinstance(result, tuple) or len(result) != count:
            got = len(result) if isinstance(result, tuple) else type(result).__name__
            raise TypeError(
                f"reversible: expected {type(self.block).__name__} to return a tuple "
                f"of {count} items, but got {got}"
            )
        return result

    def side_names(self, side: Side) -> list[frozenset[str]]:
        """Return the names of side context that the block takes."""
        if not side:
            return []
        declared = _declared(type(self.block).forward, self.n_in + 1)
        return [side.names if declared is None else declared & side.names]

    def plain(self, stack: list[Any], side: Side, name: str, backwards: bool) -> None:
        """Run the step, or its inverse, with ordinary operators."""
        kwargs = side.build(self.side_names(side), side.tensors)
        if backwards:
            stack[: self.n_out] = self.reverse(stack[: self.n_out], kwargs)
        else:
            stack[: self.n_in] = self.run(stack[: self.n_in], kwargs)


class Permute:
    """The step that permutes or duplicates the first ``n_in`` items of the stack."""

    __slots__ = ("_first", "_indices", "_n_in")

    def __init__(self, indices: Sequence[int], n_in: int) -> None:
        self._indices = indices
        self._n_in = n_in
        self._first = [indices.index(i) for i in range(n_in)]

    def plain(self, stack: list[Any], side: Side, name: str, backwards: bool) -> None:
        """Run the step, or its inverse; it needs neither side context nor a node."""
        self.move(None, stack, backwards)

    def move(self, call: Any, stack: list[Any], backwards: bool) -> None:
        """Move the stack over this step, or back over it."""
        if backwards:
            stack[: len(self._indices)] = [stack[i] for i in self._first]
        else:
            stack[: self._n_in] = [stack[i] for i in self._indices]


#: What a block consists of.
Step = Half | Whole | Permute


def is_stream(item: Any) -> bool:
    """Tell whether a stack item can have a gradient."""
    return isinstance(item, Tensor) and (item.is_floating_point() or item.is_complex())


def check_value(value: Any, acc: Any, name: str) -> None:
    """Check what F returned against its accumulator.

    Raises:
        TypeError: if it is no tensor of a kind that can be added.
        ValueError: if its shape or device differs.
    """
    if not isinstance(value, Tensor):
        raise TypeError(
            f"reversible: expected F of {name} to return a tensor, but got "
            f"{type(value).__name__} (argument 'F')"
        )
    dtype = value.dtype
    if not (dtype.is_floating_point or (dtype.is_complex and acc.dtype.is_complex)):
        raise TypeError(
            f"reversible: expected F of {name} to return a floating tensor for an "
            f"accumulator of {acc.dtype}, but got {dtype} (argument 'F')"
        )
    if value.shape != acc.shape:
        raise ValueError(
            f"reversible: expected F of {name} to return shape {tuple(acc.shape)}, "
            f"but got {tuple(value.shape)} (argument 'F')"
        )
    if value.device != acc.device:
        raise ValueError(
            f"reversible: expected F of {name} to return a tensor on {acc.device}, "
            f"but got {value.device} (argument 'F')"
        )
