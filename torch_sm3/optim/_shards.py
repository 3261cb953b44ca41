# SPDX-License-Identifier: Apache-2.0
"""One DTensor parameter: its cover and place on this process, its state's placements.

A maximum over the elements of all processes is the maximum of theirs. So every number
is kept where its elements are; one whose elements lie on several processes is kept on
each of them, and reduced.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torch_sm3.optim._batch import ResolvedCover
from torch_sm3.optim._placements import Runs, Spread, length, spread_of
from torch_sm3.optim._storage import BLOCK


@dataclass(frozen=True)
class Shards:
    """How one DTensor parameter and its state lie in a mesh.

    Args:
        spread: where the parameter's elements are.
        whole: the cover of the whole parameter.
        cover: the cover of the part on this process.
        start: number of the part's first element in the whole.
        strides: of the whole, contiguous.
        in_one_piece: the strides hold for the whole part, on every process.
        placements: of each accumulator.
        reduced: for each accumulator, dimensions of the mesh over which it is reduced.
    """

    spread: Spread
    whole: ResolvedCover
    cover: ResolvedCover
    start: int
    strides: tuple[int, ...]
    in_one_piece: bool
    placements: tuple[tuple[Any, ...], ...]
    reduced: tuple[tuple[int, ...], ...]

    @property
    def is_empty(self) -> bool:
        """Whether no element of the parameter is on this process."""
        return 0 in self.spread.local_shape


def shards_of(param: Any, whole: ResolvedCover) -> Shards:
    """Return how a DTensor parameter lies, with the cover of the whole.

    Raises:
        ValueError: if the mesh cuts sets of the cover that are kept apart, on all
            processes alike.
    """
    placements = tuple(param.placements)
    spread = spread_of(param, param.shape, placements)
    axes = _cut_axes(spread, whole.view)
    kept, reduced = [], []
    for group, shape in zip(whole.axes, whole.shapes, strict=True):
        own, over = _placed(group, placements, spread, axes)
        _check_boundaries(param, spread, axes, whole.view, group, shape, own)
        kept.append(own)
        reduced.append(over)
    strides = tuple(math.prod(spread.shape[d + 1 :]) for d in range(len(spread.shape)))
    dims = range(len(spread.shape))
    runs = [spread.runs(dim) for dim in dims]
    return Shards(
        spread=spread,
        whole=whole,
        cover=_local_cover(spread, axes, whole),
        start=sum(r[0][0] * s for r, s in zip(runs, strides, strict=True) if r),
        strides=strides,
        in_one_piece=all(len(r) < 2 for dim in dims for r in spread.all_runs(dim)),
        placements=tuple(kept),
        reduced=tuple(reduced),
    )


def _blocks(
    shape: Sequence[int], view: Sequence[int]
) -> list[tuple[list[int], list[int]]]:
    """Pair the fewest dimensions and view axes that hold the same elements.

    Those of size 1 are in no block.
    """
    dims = [d for d, size in enumerate(shape) if size != 1]
    axes = [a for a, size in enumerate(view) if size != 1]
    blocks = []
    while dims and axes:
        mine, theirs = [dims.pop(0)], [axes.pop(0)]
        while (one := math.prod(shape[d] for d in mine)) != (
            other := math.prod(view[a] for a in theirs)
        ):
            if one < other:
                mine.append(dims.pop(0))
            else:
                theirs.append(axes.pop(0))
        blocks.append((mine, theirs))
    return blocks


@dataclass(frozen=True)
class _Axis:
    """The view axis that a cut dimension is seen in, None for one of size 1."""

    axis: int | None
    # Elements behind one index of the dimension, of the axis; both in the block.
    inner: int
    unit: int


def _cut_axes(spread: Spread, view: Sequence[int]) -> dict[int, _Axis]:
    """Return, for each dimension that is cut, the view axis that is cut thereby.

    A cut of a dimension that is not the first of its block cuts the axis into pieces
    that no placement describes; its unit 0 is a boundary for no number.
    """
    shape = spread.shape
    found = {d: _Axis(None, 1, 1) for d, cuts in enumerate(spread.cuts) if cuts}
    if 0 in shape:
        # The view is the shape, without sizes of 1.
        number = {d: i for i, d in enumerate(d for d, n in enumerate(shape) if n != 1)}
        return {d: _Axis(number.get(d), 1, 1) for d in found}
    for dims, axes in _blocks(shape, view):
        for d in found.keys() & set(dims):
            if d != dims[0] and all(cut.pieces == 1 for cut in spread.cuts[d]):
                continue
            inner = math.prod(shape[other] for other in dims if other > d)
            unit = math.prod(view[a] for a in axes[1:]) if d == dims[0] else 0
            found[d] = _Axis(axes[0], inner, unit)
    return found


def _placed(
    group: Sequence[int],
    placements: Sequence[Any],
    spread: Spread,
    axes: dict[int, _Axis],
) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Return an accumulator's placements, and the mesh dims that it is reduced over."""
    from torch.distributed.tensor import Replicate

    own: list[Any] = [Replicate()] * len(placements)
    over = []
    for dim, cuts in enumerate(spread.cuts):
        for cut in cuts:
            axis = axes[dim].axis
            if axis in group:
                own[cut.mesh_dim] = _moved(placements[cut.mesh_dim], group.index(axis))
            else:
                over.append(cut.mesh_dim)
    return tuple(own), tuple(sorted(over))


def _moved(placement: Any, dim: int) -> Any:
    """Return a placement of another dimension."""
    if (factor := getattr(placement, "split_factor", None)) is not None:
        return type(placement)(dim, split_factor=factor)
    return type(placement)(dim)


def _check_boundaries(
    param: Any,
    spread: Spread,
    axes: dict[int, _Axis],
    view: Sequence[int],
    group: Sequence[int],
    shape: Sequence[int],
    placements: Sequence[Any],
) -> None:
    """Check that pieces of an accumulator belong to pieces of the parameter."""
    own = spread_of(param, shape, placements)
    for dim, axis in axes.items():
        if axis.axis is None or 0 in spread.shape:
            continue
        if axis.axis in group:
            position = group.index(axis.axis)
            numbers = [_scaled(r, axis.unit) for r in own.all_runs(position)]
            pieces = [_scaled(r, axis.inner) for r in spread.all_runs(dim)]
            fits = numbers == pieces
        else:
            pieces = [_scaled(r, axis.inner) for r in spread.all_runs(dim)]
            fits = axis.unit > 0 and all(
                a % axis.unit == 0 and b % axis.unit == 0 for r in pieces for a, b in r
            )
        if not fits:
            raise ValueError(
                "SM3: expected shards that end on boundaries of the cover's view "
                f"{tuple(view)}, but got shape {spread.shape} with placements "
                f"{tuple(param.placements)} (argument 'cover')"
            )


def _scaled(runs: Runs, factor: int) -> Runs:
    return tuple((a * factor, b * factor) for a, b in runs)


def _local_cover(
    spread: Spread, axes: dict[int, _Axis], whole: ResolvedCover
) -> ResolvedCover:
    """Return the cover of the part on this process."""
    view = list(whole.view)
    for dim, axis in axes.items():
        if axis.axis is not None:
            count = length(spread.runs(dim)) * axis.inner
            view[axis.axis] = count // axis.unit
    if 0 in spread.local_shape and 0 not in view:
        # Cut in a dimension of size 1, which is no axis: none of the numbers goes.
        view.append(0)
    return ResolvedCover(tuple(view), whole.axes)


def check_scale_blocks(param: Tensor, runs: Sequence[Runs]) -> None:
    """Check that no block of an int8 momentum buffer lies on two processes.

    Args:
        param: for the message.
        runs: ranges of the last dimension, one for each process.

    Raises:
        ValueError: on all processes alike.
    """
    last = param.shape[-1]
    ends = {end for one in runs for run in one for end in run} - {last}
    if any(end % BLOCK for end in ends):
        raise ValueError(
            "SM3: expected shards that end at multiples of "
            f"{BLOCK} in the last dimension with int8 momentum, but got "
            f"{sorted(ends)} of {last} (argument 'momentum_dtype')"
        )
