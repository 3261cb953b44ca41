# SPDX-License-Identifier: Apache-2.0
"""What every reversible block is, and the blocks that are made of steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from torch_sm3.reversible._replay import Learned
from torch_sm3.reversible._steps import Permute, Side, Step, Whole


class Block(nn.Module):
    r"""Map the top of a stack of streams invertibly.

    A block takes the first :attr:`n_in` items of the stack and puts :attr:`n_out`
    items in their place; deeper items pass untouched. Called by itself it is ordinary
    differentiable code; in a :class:`ReversibleSequence` its inputs are rebuilt in the
    backward pass by :meth:`inverse`, and :meth:`forward` runs again with grad at them.
    Both are then given the same random numbers, so they must draw in the same order.

    Attributes:
        n_in: number of stack items that the block takes.
        n_out: number of stack items that it returns.

    Example:
        >>> import torch
        >>> from torch_sm3.reversible import Block, ReversibleSequence
        >>> class Scale(Block):
        ...     n_in = n_out = 1
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.scale = torch.nn.Parameter(torch.tensor(2.0))
        ...     def forward(self, x):
        ...         return (x * self.scale,)
        ...     def inverse(self, y):
        ...         return (y / self.scale,)
        >>> seq = ReversibleSequence(Scale(), Scale())
        >>> seq(torch.ones(3))[0].sum().backward()
        >>> seq[0].scale.grad
        tensor(6.)
    """

    n_in: int
    n_out: int

    def forward(self, *stack: Any, **side: Any) -> tuple[Any, ...]:
        """Return the items that take the place of ``stack``."""
        raise NotImplementedError

    def inverse(self, *stack: Any, **side: Any) -> tuple[Any, ...]:
        """Return the inputs that :meth:`forward` maps to ``stack``."""
        raise NotImplementedError

    def _steps(self) -> Sequence[Step]:
        """Return the primitive steps; they work on the top of the stack."""
        return (Whole(self, self.__dict__.setdefault("_learned", Learned())),)


class Stepwise(Block):
    """A block that is given by its steps."""

    def forward(self, *stack: Any, **side: Any) -> tuple[Any, ...]:
        """Run the block with ordinary operators."""
        return self._run(stack, side, backwards=False)

    def inverse(self, *stack: Any, **side: Any) -> tuple[Any, ...]:
        """Return the inputs that :meth:`forward` maps to ``stack``."""
        return self._run(stack, side, backwards=True)

    def _run(
        self, stack: Sequence[Any], side: dict[str, Any], backwards: bool
    ) -> tuple[Any, ...]:
        items = list(stack)
        name = type(self).__name__
        check_count(name, self.n_out if backwards else self.n_in, items)
        context = Side(side)
        check_names(name, context, [self])
        run_steps(self, items, context, name, backwards)
        return tuple(items)


def inverse(module: Block, *outputs: Any, **side: Any) -> tuple[Any, ...]:
    """Return the inputs that a block or sequence maps to ``outputs``, without grad.

    Args:
        module: a block or a sequence.
        *outputs: the stack that it returned.
        **side: side context of the call.

    Returns:
        The stack that it was called with, up to rounding. Functions that draw random
        numbers draw new ones, so switch dropout off first.

    Raises:
        TypeError: if ``module`` is not a block.
    """
    if not isinstance(module, Block):
        raise TypeError(
            "inverse: expected a Block or a ReversibleSequence, but got "
            f"{type(module).__name__} (argument 'module')"
        )
    with torch.no_grad():
        return module.inverse(*outputs, **side)


def run_steps(
    block: Block, items: list[Any], side: Side, name: str, backwards: bool
) -> None:
    steps = block._steps()
    for step in reversed(steps) if backwards else steps:
        step.plain(items, side, name, backwards)


def check_module(op: str, argument: str, module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"{op}: expected a module, but got {type(module).__name__} "
            f"(argument '{argument}')"
        )


def check_count(op: str, needed: int, items: Sequence[Any]) -> None:
    if len(items) < needed:
        raise TypeError(
            f"{op}: expected at least {needed} streams, but got {len(items)}"
        )


def check_names(op: str, side: Side, blocks: Iterable[Block]) -> None:
    if not side:
        return
    steps = [s for b in blocks for s in b._steps() if not isinstance(s, Permute)]
    taken = frozenset().union(*(n for s in steps for n in s.side_names(side)))
    unknown = sorted(side.names - taken)
    if unknown:
        raise TypeError(
            f"{op}: expected side context that a function declares, but got "
            f"{', '.join(unknown)}"
        )
