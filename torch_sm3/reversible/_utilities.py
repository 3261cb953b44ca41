# SPDX-License-Identifier: Apache-2.0
"""Blocks without a function: they move stack items."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from torch_sm3.reversible._block import Stepwise
from torch_sm3.reversible._moves import (
    Concatenate,
    Halve,
    Log,
    Move,
    Permute,
    ReshapePrefix,
)
from torch_sm3.reversible._steps import Step


class Utility(Stepwise):
    """A block of one move."""

    _move: Move

    def _steps(self) -> Sequence[Step]:
        return (self._move,)


class Select(Utility):
    r"""Permute or duplicate stack items of any shape and type.

    Args:
        indices: which input each output is. Every input must occur; the gradients of
            duplicates are summed.
        n_in: number of inputs; by default the largest index plus one.

    Raises:
        IndexError: if an index is out of range.
        ValueError: if an input does not occur.

    Example:
        >>> from torch_sm3.reversible import Select
        >>> Select([1, 0, 1])("a", "b")
        ('b', 'a', 'b')
    """

    def __init__(self, indices: Iterable[int], n_in: int | None = None) -> None:
        super().__init__()
        self.indices = tuple(indices)
        self.n_in = max(self.indices, default=-1) + 1 if n_in is None else n_in
        self.n_out = len(self.indices)
        for index in self.indices:
            if not 0 <= index < self.n_in:
                raise IndexError(
                    f"Select: expected indices in [0, {self.n_in}), but got {index} "
                    "(argument 'indices')"
                )
        missing = sorted(set(range(self.n_in)) - set(self.indices))
        if missing:
            raise ValueError(
                f"Select: expected every input to occur, but got {self.indices} "
                f"without {missing} (argument 'indices')"
            )
        self._move = Permute(self.indices, self.n_in)

    def extra_repr(self) -> str:
        """Return what ``print`` shows."""
        return f"{list(self.indices)}, n_in={self.n_in}"


class Swap(Select):
    r"""Exchange the first two items of the stack: ``Select([1, 0])``.

    Example:
        >>> from torch_sm3.reversible import Swap
        >>> Swap()(1, 2)
        (2, 1)
    """

    def __init__(self) -> None:
        super().__init__([1, 0])


class ConcatenatePair(Utility):
    r"""Join two items; both outputs are the joined one.

    :math:`(x, y) \to (\mathrm{cat}(x, y), \mathrm{cat}(x, y))`. The inverse splits the
    first copy; the gradients of both are summed.

    Args:
        dim: dimension along which the items are joined.

    Example:
        >>> import torch
        >>> from torch_sm3.reversible import ConcatenatePair
        >>> [y.shape for y in ConcatenatePair()(torch.ones(2, 3), torch.ones(2, 1))]
        [torch.Size([2, 4]), torch.Size([2, 4])]
    """

    n_in = n_out = 2

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim
        self._move = Concatenate(dim)

    def extra_repr(self) -> str:
        """Return what ``print`` shows."""
        return f"dim={self.dim}"


class Split(Utility):
    """Split one item into two equal halves.

    Args:
        dim: dimension along which it is split.

    Raises:
        ValueError: in the call, if the size is odd.

    Example:
        >>> import torch
        >>> from torch_sm3.reversible import Split
        >>> Split(0)(torch.arange(4))
        (tensor([0, 1]), tensor([2, 3]))
    """

    n_in = 1
    n_out = 2

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim
        self._move = Halve(dim)

    def extra_repr(self) -> str:
        """Return what ``print`` shows."""
        return f"dim={self.dim}"


class Reshape(Utility):
    """View the leading dimensions of the first item otherwise.

    Args:
        shape1: leading sizes of the item.
        shape2: sizes in their place, with the same product.

    Raises:
        ValueError: if the products differ; in the call, if the item's shape does not
            begin with ``shape1``.

    Example:
        >>> import torch
        >>> from torch_sm3.reversible import Reshape
        >>> Reshape((2, 6), (3, 4))(torch.ones(2, 6, 5))[0].shape
        torch.Size([3, 4, 5])
    """

    n_in = n_out = 1

    def __init__(self, shape1: Sequence[int], shape2: Sequence[int]) -> None:
        super().__init__()
        self.shape1, self.shape2 = tuple(shape1), tuple(shape2)
        if math.prod(self.shape1) != math.prod(self.shape2):
            raise ValueError(
                f"Reshape: expected sizes of the product {math.prod(self.shape1)}, but "
                f"got {self.shape2} (argument 'shape2')"
            )
        self._move = ReshapePrefix(self.shape1, self.shape2)

    def extra_repr(self) -> str:
        """Return what ``print`` shows."""
        return f"{self.shape1}, {self.shape2}"


class PrintShape(Utility):
    """Log shapes and dtypes of the top of the stack, once for each direction.

    Args:
        message: beginning of the line, logged by ``torch_sm3.reversible``.
        n_in: number of items.

    Example:
        >>> import torch
        >>> from torch_sm3.reversible import PrintShape
        >>> PrintShape("after the embedding")(torch.ones(1))
        (tensor([1.]),)
    """

    def __init__(self, message: str = "", n_in: int = 1) -> None:
        super().__init__()
        self.message = message
        self.n_in = self.n_out = n_in
        self._move = Log(message, n_in)

    def extra_repr(self) -> str:
        """Return what ``print`` shows."""
        return f"{self.message!r}, n_in={self.n_in}"
