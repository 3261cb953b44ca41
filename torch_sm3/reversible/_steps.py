# SPDX-License-Identifier: Apache-2.0
"""The steps that reversible blocks are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torch_sm3.reversible._functions import Function
from torch_sm3.reversible._inventory import Learned
from torch_sm3.reversible._moves import Move
from torch_sm3.reversible._rules import Rule
from torch_sm3.reversible._side import Side, declared_names


class Half:
    """The step ``stack[acc] = rule(stack[acc], F(stack[reads]))``.

    Args:
        function: F.
        rule: how its values are joined with the accumulator.
        acc: position of the accumulator in the stack.
        reads: positions of F's arguments.
        learned: what earlier calls found out about F.
    """

    __slots__ = ("acc", "function", "learned", "reads", "rule")

    def __init__(
        self,
        function: Function,
        rule: Rule,
        acc: int,
        reads: Sequence[int],
        learned: Learned,
    ) -> None:
        self.function = function
        self.rule = rule
        self.acc = acc
        self.reads = reads
        self.learned = learned

    @property
    def has_aux(self) -> bool:
        """Whether F has aux outputs."""
        return self.function.has_aux

    @property
    def modules(self) -> Sequence[Any]:
        """All modules below which F's parameters and buffers are."""
        return self.function.modules

    @property
    def touched(self) -> Sequence[int]:
        """Positions of all items that the step reads or changes."""
        return (self.acc, *self.reads)

    def side_names(self, side: Side) -> list[frozenset[str]]:
        """Return, for each layer, the names of side context that it takes."""
        return self.function.side_names(side)


class Whole:
    """A block of the user's as one step: its ``forward`` and its ``inverse``.

    Args:
        block: the block.
        learned: what earlier calls found out about it.
    """

    __slots__ = ("block", "learned", "modules", "n_in", "n_out", "reads")

    has_aux = False

    def __init__(self, block: Any, learned: Learned) -> None:
        self.block = block
        self.modules = (block,)
        self.learned = learned
        self.n_in: int = block.n_in
        self.n_out: int = block.n_out
        self.reads = range(self.n_in)

    @property
    def touched(self) -> Sequence[int]:
        """Positions of all items that the step reads or changes."""
        return self.reads

    def run(
        self, items: Sequence[Any], kwargs: Sequence[dict[str, Any]]
    ) -> tuple[Any, ...]:
        """Return what the block makes of the top of the stack."""
        result = self.block(*items, **(kwargs[0] if kwargs else {}))
        return self.checked(result, self.n_out)

    def reverse(
        self, items: Sequence[Any], kwargs: Sequence[dict[str, Any]]
    ) -> tuple[Any, ...]:
        """Return what the block's inverse makes of the top of the stack."""
        result = self.block.inverse(*items, **(kwargs[0] if kwargs else {}))
        return self.checked(result, self.n_in)

    def checked(self, result: Any, count: int) -> tuple[Any, ...]:
        """Return what a method of the block returned, if it is a tuple of ``count``."""
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
        declared = declared_names(type(self.block).forward, self.n_in + 1)
        return [side.names if declared is None else declared & side.names]


#: What a block consists of.
Step = Half | Whole | Move


def is_stream(item: Any) -> bool:
    """Tell whether a stack item can have a gradient."""
    return isinstance(item, Tensor) and (item.is_floating_point() or item.is_complex())


def check_values(values: Sequence[Any], acc: Any, name: str) -> None:
    """Check what F returned against its accumulator.

    Raises:
        TypeError: if it is no tensor of a kind that can be added, or the accumulator
            is none that something can be added to.
        ValueError: if its shape or device differs.
    """
    if not is_stream(acc):
        got = acc.dtype if isinstance(acc, Tensor) else type(acc).__name__
        raise TypeError(
            f"reversible: expected a floating or complex accumulator of {name}, but "
            f"got {got}"
        )
    for value in values:
        _check_value(value, acc, name)


def _check_value(value: Any, acc: Tensor, name: str) -> None:
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
