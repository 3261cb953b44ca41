# SPDX-License-Identifier: Apache-2.0
"""Blocks with module hooks: their steps run inside the module's call.

Whoever shards or watches a block does so with hooks. They may put identities around
the streams, or cast them; the reverse pass must know of a cast.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from torch_sm3.reversible._ledger import Ledger
from torch_sm3.reversible._moves import Move
from torch_sm3.reversible._side import Side

if TYPE_CHECKING:
    from torch_sm3.reversible._block import Block

#: Runs a block's steps on the top of the stack, with the side context that hooks have
#: left; changes the stack and returns aux outputs.
Run = Callable[[list[Any], Mapping[str, Any]], Any]


def has_hooks(block: Block) -> bool:
    """Tell whether calling the block as a module does more than its forward."""
    return bool(
        block._forward_pre_hooks
        or block._forward_hooks
        or block._backward_pre_hooks
        or block._backward_hooks
    )


def run_inside(
    block: Block, items: list[Any], side: Side, with_aux: bool, run: Run
) -> Any:
    """Call the block as a module, with ``run`` for its forward; return its aux outputs.

    Args:
        block: a block that is made of steps.
        items: all stack items; changed.
        side: the call's side context.
        with_aux: whether the block has aux outputs.
        run: runs the steps.
    """

    def forward(stack: Sequence[Any], given: Mapping[str, Any]) -> Any:
        inner = list(stack)
        aux = run(inner, given)
        return (tuple(inner), aux) if with_aux else tuple(inner)

    result = block(*items[: block.n_in], _run=forward, **values_of(block, side))
    items[: block.n_in], aux = result if with_aux else (result, ())
    return aux


def values_of(block: Block, side: Side) -> dict[str, Any]:
    """Return the side context that the steps of a block take."""
    steps = [step for step in block._steps() if not isinstance(step, Move)]
    names = frozenset().union(*(n for step in steps for n in step.side_names(side)))
    return side.build([names], side.tensors)[0] if names else {}


@contextlib.contextmanager
def side_after_hooks(
    block: Block, side: Side, given: Mapping[str, Any], name: str
) -> Iterator[None]:
    """Let the steps of a block have side context as hooks have left it: in identities.

    Raises:
        RuntimeError: if they have done more.
    """
    before, after = tree_leaves(values_of(block, side)), tree_leaves(dict(given))
    if len(before) != len(after) or not all(map(same_data, before, after)):
        raise RuntimeError(
            f"reversible: expected the module hooks of {name} to leave side context as "
            "it is, but got other values (fully_shard casts it under "
            "cast_forward_inputs; shard the functions instead of the block)"
        )
    tensors = side.tensors
    passed = {id(old): new for old, new in zip(before, after, strict=True)}
    side.tensors = [passed.get(id(tensor), tensor) for tensor in tensors]
    try:
        yield
    finally:
        side.tensors = tensors


class CastRecord:
    """Streams that hooks have cast, between two steps of one call.

    Args:
        before: items before the hooks.
        after: the same items after them.
        name: how messages call the block.
        ledger: what the call keeps.
        first: whether no step comes before, so that nobody needs ``before``.

    Raises:
        RuntimeError: if a hook has done more to an item than a cast.
    """

    __slots__ = ("_casts", "_kept")

    def __init__(
        self,
        before: Sequence[Any],
        after: Sequence[Any],
        name: str,
        ledger: Ledger,
        first: bool,
    ) -> None:
        #: Position of each stream that was cast, its dtypes before and after.
        self._casts: dict[int, tuple[torch.dtype, torch.dtype]] = {}
        #: Where streams are kept that the cast has rounded.
        self._kept: dict[int, int] = {}
        for i, (old, new) in enumerate(zip(before, after, strict=True)):
            if same_data(old, new):
                continue
            if not _is_cast(old, new):
                raise RuntimeError(
                    f"reversible: expected the module hooks of {name} to leave item "
                    f"{i} of the stack as it is, but got another value"
                )
            self._casts[i] = old.dtype, new.dtype
            if not first and not torch.equal(new.detach().to(old.dtype), old.detach()):
                self._kept[i] = ledger.keep(old)

    def __bool__(self) -> bool:
        return bool(self._casts)

    def move(
        self, stack: list[Any], side: Any, saved: Sequence[Tensor], backwards: bool
    ) -> None:
        """Cast the streams, or take the cast back."""
        for i, (old, new) in self._casts.items():
            if backwards and i in self._kept:
                stack[i] = saved[self._kept[i]]
            else:
                stack[i] = stack[i].to(old if backwards else new)


def same_data(old: Any, new: Any) -> bool:
    """Tell whether two items are one, or aliases of one tensor."""
    if old is new:
        return True
    return (
        isinstance(old, Tensor)
        and isinstance(new, Tensor)
        and old.dtype == new.dtype
        and old.data_ptr() == new.data_ptr()
        and old.stride() == new.stride()
        and old.shape == new.shape
    )


def _is_cast(old: Any, new: Any) -> bool:
    return (
        isinstance(old, Tensor)
        and isinstance(new, Tensor)
        and old.dtype != new.dtype
        and old.shape == new.shape
        and old.device == new.device
    )
