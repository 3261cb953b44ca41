# SPDX-License-Identifier: Apache-2.0
"""The steps without a function: each has a value rule for streams and for gradients.

A move runs as ordinary differentiable operators that save no data. What its inverse
needs to know, sizes for instance, is its *note*, kept with the call.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_logger = logging.getLogger("torch_sm3.reversible")


class Move:
    """A step that moves the first ``n_in`` items of the stack."""

    n_in: int
    n_out: int
    has_aux = False

    def run(self, items: Sequence[Any], name: str) -> tuple[tuple[Any, ...], Any]:
        """Return the items that take the place of ``items``, and the note."""
        raise NotImplementedError

    def back(self, items: Sequence[Any], note: Any) -> tuple[Any, ...]:
        """Return the items that :meth:`run` was given."""
        raise NotImplementedError

    def pull(self, grads: Sequence[Tensor | None], note: Any) -> tuple[Any, ...]:
        """Return the gradients of what :meth:`run` was given."""
        raise NotImplementedError

    def note_of(self, items: Sequence[Any]) -> Any:
        """Return the note of a call whose outputs alone are known."""
        return None

    def follow(self, origins: Sequence[frozenset[int]]) -> Sequence[frozenset[int]]:
        """Return where each output comes from, given the same of each input."""
        return [frozenset().union(*origins)] * self.n_out

    def move(self, stack: list[Any], name: str) -> Any:
        """Move the stack over this step and return the note."""
        stack[: self.n_in], note = self.run(stack[: self.n_in], name)
        return note

    def move_back(self, stack: list[Any], note: Any) -> None:
        """Move the stack back over this step."""
        stack[: self.n_out] = self.back(stack[: self.n_out], note)


class Permute(Move):
    """Permute or duplicate items.

    Args:
        indices: which input each output is.
        n_in: number of inputs.
    """

    def __init__(self, indices: Sequence[int], n_in: int) -> None:
        self._indices = indices
        self.n_in = n_in
        self.n_out = len(indices)
        self._first = [indices.index(i) for i in range(n_in)]

    def follow(self, origins: Sequence[frozenset[int]]) -> Sequence[frozenset[int]]:
        """Return where each output comes from."""
        return [origins[i] for i in self._indices]

    def run(self, items: Sequence[Any], name: str) -> tuple[tuple[Any, ...], Any]:
        """Return the selected items."""
        return tuple([items[i] for i in self._indices]), None

    def back(self, items: Sequence[Any], note: Any) -> tuple[Any, ...]:
        """Return the first occurrence of each item."""
        return tuple([items[i] for i in self._first])

    def pull(self, grads: Sequence[Tensor | None], note: Any) -> tuple[Any, ...]:
        """Sum the gradients of duplicates."""
        result: list[Tensor | None] = [None] * self.n_in
        for index, grad in zip(self._indices, grads, strict=True):
            result[index] = sum_of(result[index], grad)
        return tuple(result)


class Concatenate(Move):
    """Join two items along ``dim``; both outputs are the joined one."""

    n_in = n_out = 2

    def __init__(self, dim: int) -> None:
        self._dim = dim

    def run(self, items: Sequence[Any], name: str) -> tuple[tuple[Any, ...], Any]:
        """Return two references to the joined tensor."""
        joined = torch.cat(list(items), self._dim)
        return (joined, joined), [item.shape[self._dim] for item in items]

    def back(self, items: Sequence[Any], note: Any) -> tuple[Any, ...]:
        """Split the first copy at the recorded sizes."""
        parts = torch.split(items[0], note, self._dim)
        return tuple([part.contiguous() for part in parts])

    def pull(self, grads: Sequence[Tensor | None], note: Any) -> tuple[Any, ...]:
        """Split the sum of both copies' gradients."""
        total = sum_of(grads[0], grads[1])
        return (None, None) if total is None else self.back((total,), note)

    def note_of(self, items: Sequence[Any]) -> Any:
        """Assume halves: the sizes are not in the outputs."""
        size = items[0].shape[self._dim]
        if size % 2:
            raise ValueError(
                "ConcatenatePair: expected an even size, because the sizes of the "
                f"parts are not known outside a sequence, but got {size}"
            )
        return [size // 2, size // 2]


class Halve(Move):
    """Split one item into two equal halves along ``dim``."""

    n_in = 1
    n_out = 2

    def __init__(self, dim: int) -> None:
        self._dim = dim

    def run(self, items: Sequence[Any], name: str) -> tuple[tuple[Any, ...], Any]:
        """Return the halves."""
        # Contiguous, as they are when they are rebuilt: strides decide the order in
        # which some functions sum.
        first, second = halves(items[0], self._dim, f"Split of {name}")
        return (first.contiguous(), second.contiguous()), None

    def back(self, items: Sequence[Any], note: Any) -> tuple[Any, ...]:
        """Join the halves."""
        return (torch.cat(list(items), self._dim),)

    def pull(self, grads: Sequence[Tensor | None], note: Any) -> tuple[Any, ...]:
        """Join the gradients; one that is missing is zero."""
        known = [grad for grad in grads if grad is not None]
        if not known:
            return (None,)
        full = [torch.zeros_like(known[0]) if g is None else g for g in grads]
        return self.back(full, None)


class ReshapePrefix(Move):
    """View the leading dimensions ``before`` as ``after``."""

    n_in = n_out = 1

    def __init__(self, before: Sequence[int], after: Sequence[int]) -> None:
        self._before = tuple(before)
        self._after = tuple(after)

    def run(self, items: Sequence[Any], name: str) -> tuple[tuple[Any, ...], Any]:
        """Return the item with its prefix reshaped."""
        return (self._view(items[0], self._before, self._after),), None

    def back(self, items: Sequence[Any], note: Any) -> tuple[Any, ...]:
        """Return the item with its prefix as before."""
        return (self._view(items[0], self._after, self._before),)

    def pull(self, grads: Sequence[Tensor | None], note: Any) -> tuple[Any, ...]:
        """Reshape the gradient back."""
        return (None,) if grads[0] is None else self.back(grads, None)

    def _view(self, item: Tensor, old: Sequence[int], new: Sequence[int]) -> Tensor:
        if tuple(item.shape[: len(old)]) != old:
            raise ValueError(
                f"Reshape: expected an item whose shape begins with {tuple(old)}, but "
                f"got {tuple(item.shape)}"
            )
        return item.reshape(*new, *item.shape[len(old) :])


class Log(Move):
    """Log shapes and dtypes of the first ``n`` items, once for each direction."""

    def __init__(self, message: str, n: int) -> None:
        self._message = message
        self.n_in = self.n_out = n
        self._seen: set[str] = set()

    def follow(self, origins: Sequence[frozenset[int]]) -> Sequence[frozenset[int]]:
        """Return where each output comes from."""
        return origins

    def run(self, items: Sequence[Any], name: str) -> tuple[tuple[Any, ...], Any]:
        """Log and return the items."""
        self._log("forward", items)
        return tuple(items), None

    def back(self, items: Sequence[Any], note: Any) -> tuple[Any, ...]:
        """Log and return the items."""
        self._log("reverse", items)
        return tuple(items)

    def pull(self, grads: Sequence[Tensor | None], note: Any) -> tuple[Any, ...]:
        """Return the gradients."""
        return tuple(grads)

    def _log(self, direction: str, items: Sequence[Any]) -> None:
        if direction in self._seen:
            return
        self._seen.add(direction)
        shown = ", ".join(
            f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else repr(x)
            for x in items
        )
        _logger.info("%s %s: %s", self._message, direction, shown)


def sum_of(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    """Add two gradients, either of which may be missing."""
    if left is None or right is None:
        return right if left is None else left
    return left + right


def halves(item: Any, dim: int, name: str) -> tuple[Tensor, Tensor]:
    """Split a tensor into two equal halves.

    Raises:
        ValueError: if its size is odd.
    """
    size = item.shape[dim]
    if size % 2:
        raise ValueError(
            f"{name}: expected an even size along dimension {dim}, but got {size} of "
            f"shape {tuple(item.shape)}"
        )
    first, second = torch.split(item, size // 2, dim)
    return first, second
