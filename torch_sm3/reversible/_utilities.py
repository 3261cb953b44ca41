# SPDX-License-Identifier: Apache-2.0
"""Blocks without a function: they move stack items."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch_sm3.reversible._block import Stepwise
from torch_sm3.reversible._steps import Permute, Step


class Select(Stepwise):
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
        self._permute = Permute(self.indices, self.n_in)

    def extra_repr(self) -> str:
        """Return what ``print`` shows."""
        return f"{list(self.indices)}, n_in={self.n_in}"

    def _steps(self) -> Sequence[Step]:
        return (self._permute,)


class Swap(Select):
    r"""Exchange the first two items of the stack: ``Select([1, 0])``.

    Example:
        >>> from torch_sm3.reversible import Swap
        >>> Swap()(1, 2)
        (2, 1)
    """

    def __init__(self) -> None:
        super().__init__([1, 0])
