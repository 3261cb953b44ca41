# SPDX-License-Identifier: Apache-2.0
"""Least accumulators of elements, and maxima over the sets of a cover."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_sm3.optim._batch import Place, ResolvedCover


class DenseSets:
    """The sets of a cover whose view holds just the parameter's elements."""

    def __init__(self, cover: ResolvedCover, shape: torch.Size) -> None:
        self._cover, self._shape = cover, shape

    def least(self, accumulators: Sequence[Tensor]) -> Tensor:
        """Return, for each element, the least accumulator of its sets."""
        view = self._cover.view
        found: Tensor | None = None
        for accumulator, group in zip(accumulators, self._cover.axes, strict=True):
            order = sorted(range(len(group)), key=group.__getitem__)
            sizes = [n if a in group else 1 for a, n in enumerate(view)]
            one = (accumulator.permute(order) if group else accumulator).reshape(sizes)
            found = one if found is None else torch.minimum(found, one)
        assert found is not None, "a cover has at least one group"
        return found.expand(view).reshape(self._shape)

    def maxima(self, values: Tensor) -> list[Tensor]:
        """Return the largest value of each set, in the accumulators' shapes.

        Nothing is larger than 0 in a set without elements, as of an empty shard.
        """
        if not values.numel():
            return [values.new_zeros(shape) for shape in self._cover.shapes]
        whole = values.reshape(self._cover.view)
        result = []
        for group, shape in zip(self._cover.axes, self._cover.shapes, strict=True):
            others = [a for a in range(whole.dim()) if a not in group]
            largest = whole.amax(others) if others else whole
            kept = sorted(group)
            largest = largest.permute([kept.index(a) for a in group])
            result.append(largest.reshape(shape))
        return result


class RangeSets:
    """The sets of a 1-D parameter that is a flat range of the cover's view."""

    def __init__(self, cover: ResolvedCover, place: Place, param: Tensor) -> None:
        stop = place.start + param.numel()
        numbers = torch.arange(place.start, stop, device=param.device)
        self._positions = set_positions(numbers, cover)
        self._shapes = cover.shapes

    def least(self, accumulators: Sequence[Tensor]) -> Tensor:
        """Return, for each element, the least accumulator of its sets."""
        return least_at(accumulators, self._positions)

    def maxima(self, values: Tensor) -> list[Tensor]:
        """Return the largest value of each set; 0 where no element lies here."""
        return [
            values.new_zeros(math.prod(shape))
            .scatter_reduce(0, positions, values, "amax")
            .reshape(shape)
            for positions, shape in zip(self._positions, self._shapes, strict=True)
        ]


def sets_of(param: Tensor, cover: ResolvedCover, place: Place) -> DenseSets | RangeSets:
    """Return the sets that the elements of a dense gradient lie in."""
    if math.prod(cover.view) == param.numel():
        return DenseSets(cover, param.shape)
    return RangeSets(cover, place, param)


def set_positions(numbers: Tensor, cover: ResolvedCover) -> list[Tensor]:
    """Return, per group, where each element's accumulator lies in the flat one.

    Args:
        numbers: int64, places of the elements in the flattened view.
        cover: the cover.
    """
    strides = [math.prod(cover.view[a + 1 :]) for a in range(len(cover.view))]
    result = []
    for group in cover.axes:
        position = torch.zeros_like(numbers)
        for a in group:
            position = position * cover.view[a] + numbers // strides[a] % cover.view[a]
        result.append(position)
    return result


def least_at(accumulators: Sequence[Tensor], positions: Sequence[Tensor]) -> Tensor:
    """Return the least of the accumulators at each of the ``positions``."""
    found: Tensor | None = None
    for accumulator, position in zip(accumulators, positions, strict=True):
        one = accumulator.flatten()[position]
        found = one if found is None else torch.minimum(found, one)
    assert found is not None, "a cover has at least one group"
    return found
