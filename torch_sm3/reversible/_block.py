# SPDX-License-Identifier: Apache-2.0
"""What every reversible block is, and the blocks that are made of steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from torch_sm3.reversible._inventory import Learned
from torch_sm3.reversible._moves import Move
from torch_sm3.reversible._plain import run_step
from torch_sm3.reversible._side import Side
from torch_sm3.reversible._steps import Half, Step, Whole


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

    def reverse_and_grad(
        self,
        outputs: tuple[Any, ...],
        output_grads: tuple[Any, ...],
        side: dict[str, Any],
        record: Any,
    ) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
        """Return the block's inputs and all gradients, from its outputs.

        The default runs :meth:`inverse` without grad, then :meth:`forward` with grad.
        A block that can do with one run of its functions overrides it. Where inputs
        are kept or corrected, with the plan ``checkpoint`` or ``exact="sidecar"``, the
        default is used all the same.

        Args:
            outputs: what the block returned.
            output_grads: gradients of it, None where there is none.
            side: keyword arguments of the block.
            record: what is known of the first run: ``record.world()`` sets generators,
                autocast, flags and buffers as they were, ``record.rebuild(outputs,
                side)`` returns the inputs, ``record.run_and_grad(inputs, output_grads,
                side)`` the gradients, ``record.params`` is what the last of them
                are the gradients of.

        Returns:
            The inputs; their gradients; the gradients of the tensors in ``side``, in
            the order of its leaves; the gradients of ``record.params``.
        """
        inputs = record.rebuild(outputs, side)
        return (inputs, *record.run_and_grad(inputs, output_grads, side))

    def _join_aux(self, found: Sequence[tuple[Any, ...]]) -> Any:
        """Return the block's aux outputs, given those of its steps."""
        return tuple([item for items in found for item in items])

    def _steps(self) -> Sequence[Step]:
        """Return the primitive steps; they work on the top of the stack."""
        return (Whole(self, self.__dict__.setdefault("_learned", Learned())),)


class Stepwise(Block):
    """A block that is given by its steps."""

    def _parts(self) -> tuple[Any, ...]:
        """Return the modules that the steps refer to."""
        raise NotImplementedError

    def _make_steps(self) -> Sequence[Step]:
        """Return new steps."""
        raise NotImplementedError

    def _steps(self) -> Sequence[Step]:
        """Return the steps; they are made anew when a module was replaced."""
        parts = self._parts()
        known = self.__dict__.get("_known_steps")
        if known is None or not _same(known[0], parts):
            known = self.__dict__["_known_steps"] = parts, self._make_steps()
        steps: Sequence[Step] = known[1]
        return steps

    def forward(self, *stack: Any, _run: Any = None, **side: Any) -> tuple[Any, ...]:
        """Run the block with ordinary operators, or as the calling sequence does."""
        if _run is not None:
            return _run(stack, side)
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
        aux = run_steps(self, items, context, name, backwards)
        if has_aux(self) and not backwards:
            return tuple(items), aux
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


def _same(left: tuple[Any, ...], right: tuple[Any, ...]) -> bool:
    return len(left) == len(right) and all(
        a is b for a, b in zip(left, right, strict=True)
    )


def run_steps(
    block: Block,
    items: list[Any],
    side: Side,
    name: str,
    backwards: bool = False,
    **how: Any,
) -> Any:
    """Run a block, or its inverse, with ordinary operators; return its aux outputs."""
    steps = block._steps()
    found = []
    for step in reversed(steps) if backwards else steps:
        found.append(run_step(step, items, side, name, backwards, **how))
    return block._join_aux(found) if has_aux(block) else ()


def has_aux(block: Block) -> bool:
    """Tell whether a block has aux outputs."""
    return any(step.has_aux for step in block._steps())


def changed_items(blocks: Iterable[Block], count: int) -> list[int]:
    """Return which of ``count`` stack items some block changes."""
    changed: set[int] = set()
    stack: list[frozenset[int]] = [frozenset([i]) for i in range(count)]
    for block in blocks:
        for step in block._steps():
            if isinstance(step, Half):
                changed |= stack[step.acc]
            elif isinstance(step, Whole):
                changed = changed.union(*stack[: step.n_in])
                stack[: step.n_in] = [frozenset()] * step.n_out
            else:
                stack[: step.n_in] = step.follow(stack[: step.n_in])
    return sorted(changed)


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
    steps = [s for b in blocks for s in b._steps() if not isinstance(s, Move)]
    taken = frozenset().union(*(n for s in steps for n in s.side_names(side)))
    unknown = sorted(side.names - taken)
    if unknown:
        raise TypeError(
            f"{op}: expected side context that a function declares, but got "
            f"{', '.join(unknown)}"
        )
