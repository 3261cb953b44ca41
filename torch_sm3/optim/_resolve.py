# SPDX-License-Identifier: Apache-2.0
"""From a cover and a shape to the view and the axis groups that kernels take."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch_sm3.optim._batch import ResolvedCover
from torch_sm3.optim._cover import Groups, cover_error

# One bit of an int64 stands for a view axis.
_MOST_AXES = 62


def _diagonal(shape: Sequence[int]) -> ResolvedCover:
    view = tuple(size for size in shape if size != 1)
    return ResolvedCover(view, (tuple(range(len(view))),))


def _without_ones(view: Sequence[int], groups: Sequence[set[int]]) -> ResolvedCover:
    """Drop axes of size 1, and groups whose sets only unite those of another."""
    kept = [axis for axis, size in enumerate(view) if size != 1]
    number = {axis: i for i, axis in enumerate(kept)}
    sets = [frozenset(number[a] for a in group if a in number) for group in groups]
    fine = [
        one
        for i, one in enumerate(sets)
        if not any(one < other for other in sets) and one not in sets[:i]
    ]
    return ResolvedCover(
        tuple(view[axis] for axis in kept), tuple(tuple(sorted(one)) for one in fine)
    )


def _standard(shape: Sequence[int]) -> ResolvedCover:
    return _without_ones(shape, [{axis} for axis in range(len(shape))] or [set()])


def _auto(shape: Sequence[int]) -> ResolvedCover:
    sizes = [size for size in shape if size != 1]
    small = sum(sizes) >= math.prod(sizes)
    return _diagonal(shape) if small else _standard(shape)


def _merge(shape: Sequence[int], groups: Groups) -> ResolvedCover:
    count = sum(map(len, groups))
    if count != len(shape):
        raise cover_error(f"the dimensions of shape {tuple(shape)}", groups, "groups")
    return _standard([math.prod(shape[d] for d in group) for group in groups])


def _heads(
    shape: Sequence[int], dim: int, n: int | None, size: int | None
) -> ResolvedCover:
    if not -len(shape) <= dim < len(shape):
        raise cover_error(f"a dimension of shape {tuple(shape)}", dim, "dim")
    dim %= len(shape)
    part = n if n is not None else size
    if part is None or shape[dim] % part:
        name = "n" if n is not None else "size"
        raise cover_error(
            f"a divisor of {shape[dim]}, the size of dim {dim}", part, name
        )
    n = n if n is not None else shape[dim] // part
    view = [*shape[:dim], n, shape[dim] // n, *shape[dim + 1 :]]
    own = [axis for axis in range(len(view)) if axis != dim]
    return _without_ones(view, [{dim, axis} for axis in own])


def _custom(
    shape: Sequence[int], view: tuple[int, ...] | None, axes: Groups | None
) -> ResolvedCover:
    sizes, numel = list(shape if view is None else view), math.prod(shape)
    if -1 in sizes:
        rest = math.prod(size for size in sizes if size != -1)
        if rest == 0 or numel % rest:
            raise cover_error(f"sizes whose product divides {numel}", view, "view")
        sizes[sizes.index(-1)] = numel // rest
    if math.prod(sizes) != numel:
        raise cover_error(f"sizes with the product {numel}", view, "view")
    if len(sizes) > _MOST_AXES:
        raise cover_error(f"at most {_MOST_AXES} sizes", len(sizes), "view")
    if axes is None:
        axes = tuple((axis,) for axis in range(len(sizes))) or ((),)
    for group in axes:
        if any(not 0 <= axis < len(sizes) for axis in group):
            raise cover_error(f"axes of the view {tuple(sizes)}", group, "axes")
    return ResolvedCover(tuple(sizes), tuple(tuple(sorted(group)) for group in axes))


def resolve(cover: object, shape: Sequence[int], compat: str | None) -> ResolvedCover:
    """Return the sets that a group's cover means for one global shape.

    Args:
        cover: plain form, see :func:`plain_cover`.
        shape: the whole parameter's, never a shard's.
        compat: preset, under which "auto" means "standard".

    Returns:
        The view and its axis groups.

    Raises:
        ValueError: if a custom cover does not fit the shape.
    """
    if 0 in shape or cover == "diagonal":
        return _diagonal(shape)
    if cover == "standard" or (cover == "auto" and compat is not None):
        return _standard(shape)
    if cover == "auto":
        return _auto(shape)
    assert isinstance(cover, tuple)
    name, *arguments = cover
    if name == "merge":
        return _merge(shape, *arguments)
    if name == "custom":
        return _custom(shape, *arguments)
    dim, number = arguments
    is_heads = name == "heads"
    return _heads(
        shape, dim, number if is_heads else None, None if is_heads else number
    )
