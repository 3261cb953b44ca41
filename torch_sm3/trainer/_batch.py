# SPDX-License-Identifier: Apache-2.0
"""A batch as the stacks of this rank's microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

#: The stack that a microbatch starts with, and its weight in the mean loss.
Microbatch = tuple[list[Any], float]


def as_stack(op: str, batch: Any) -> list[Tensor]:
    """Return a batch as a list of tensors.

    Raises:
        TypeError: if it is something else than a tensor or a tuple of tensors.
    """
    items = list(batch) if isinstance(batch, (tuple, list)) else [batch]
    for item in items:
        if not isinstance(item, Tensor):
            raise TypeError(
                f"{op}: expected a tensor or a tuple of tensors, but got "
                f"{type(item).__name__} (argument 'batch')"
            )
    if not items:
        raise TypeError(
            f"{op}: expected a tensor or a tuple of tensors, but got an empty one "
            "(argument 'batch')"
        )
    return items


def part_of_rank(
    op: str, stack: Sequence[Tensor], rank: int, size: int
) -> list[Tensor]:
    """Return one rank's part of a global batch.

    Raises:
        ValueError: if the ranks cannot have equal parts.
    """
    count = _count(op, stack)
    if count % size:
        raise ValueError(
            f"{op}: expected a batch that {size} ranks divide equally, but got "
            f"{count} examples (argument 'batch')"
        )
    share = count // size
    return [x.narrow(0, rank * share, share) if x.dim() else x for x in stack]


def microbatches(
    op: str, stack: Sequence[Tensor], n: int, device: torch.device
) -> list[Microbatch]:
    """Split a batch into up to ``n`` microbatches; the last may be smaller.

    Args:
        op: how messages call the caller.
        stack: of all examples. Tensors without dimensions go to every microbatch.
        n: number of microbatches.
        device: where they are needed.
    """
    if n == 1:
        return [([x.detach().to(device) for x in stack], 1.0)]
    count = _count(op, stack)
    share = max(1, -(-count // n))
    found = []
    for start in range(0, count, share):
        size = min(share, count - start)
        parts = [x.narrow(0, start, size) if x.dim() else x for x in stack]
        items: list[Any] = [part.detach().to(device) for part in parts]
        found.append((items, size / count))
    return found


def _count(op: str, stack: Sequence[Tensor]) -> int:
    counts = {x.shape[0] for x in stack if x.dim()}
    if len(counts) != 1 or 0 in counts:
        raise ValueError(
            f"{op}: expected tensors of equally many examples to split, but got "
            f"shapes {[tuple(x.shape) for x in stack]} (argument 'batch')"
        )
    return counts.pop()
