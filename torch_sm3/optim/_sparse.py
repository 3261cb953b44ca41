# SPDX-License-Identifier: Apache-2.0
"""SM3 for a sparse gradient: only touched elements and accumulators are visited."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_sm3.optim import _step
from torch_sm3.optim._batch import Options, Place, ResolvedCover
from torch_sm3.optim._numbers import Numbers, computing_type, numbers_of
from torch_sm3.optim._random import random_bits
from torch_sm3.optim._sets import least_at, set_positions


def sparse_sm3(
    param: Tensor,
    grad: Tensor,
    accumulators: Sequence[Tensor],
    compensation: Tensor | None,
    step: Tensor,
    cover: ResolvedCover,
    place: Place,
    options: Options,
) -> None:
    """Do one step of SM3 on a coalesced sparse gradient of a dense parameter.

    Momentum is not applied. In sum mode the result is that of the dense step on the
    densified gradient; with beta2 < 1 the decay is lazy.

    Args:
        param: parameter, updated in place at the touched elements.
        grad: coalesced COO gradient; its leading dims are sparse, others dense.
        accumulators: one per cover group, contiguous, updated in place.
        compensation: of Kahan summation, or None.
        step: count of steps, raised by one.
        cover: sets that share an accumulator.
        place: of the parameter in the whole one.
        options: of the step; momentum is ignored.

    Raises:
        RuntimeError: with weight decay, which would touch every element.
    """
    if options.weight_decay:
        raise RuntimeError(
            "sparse_sm3: expected no weight decay with a sparse gradient, but got "
            f"{options.weight_decay} (argument 'weight_decay')"
        )
    skip = _step.Skip(options, param.device)
    if skip.known:
        return
    count = step + 1
    values, indices = grad.values(), grad.indices()
    if values.numel():
        numbers = numbers_of(options, computing_type(param))
        g, finite = _step.scaled_gradient(values, numbers)
        groups = _groups_in_use(cover, param.shape, numbers)
        start = place.start if math.prod(cover.view) != param.numel() else 0
        flat = _flat_numbers(indices, param.shape, _contiguous(param.shape), start)
        used = ResolvedCover(cover.view, tuple(cover.axes[k] for k in groups))
        positions = set_positions(flat, used)
        old = [accumulators[k].view(-1) for k in groups]
        assigned = _assigned(used, param.shape, grad.sparse_dim(), numbers)
        nu = _accumulate(old, g * g, positions, assigned, numbers, options, skip)

        bits = None
        if options.stochastic_rounding:
            elements = _flat_numbers(indices, param.shape, place.strides, place.start)
            now = count.to(param.device)
            bits = random_bits(options.seed, now, place.ordinal, elements)
        u = _step.direction(g, finite, nu, numbers)
        _move(param, compensation, tuple(indices), u, bits, numbers, skip)
    skip.write(step, count)


def _move(
    param: Tensor,
    compensation: Tensor | None,
    where: tuple[Tensor, ...],
    u: Tensor,
    bits: Tensor | None,
    numbers: Numbers,
    skip: _step.Skip,
) -> None:
    """Update the touched elements of the parameter."""
    old = param[where]
    w = old.to(numbers.dtype)
    if compensation is None:
        new = _step.rounded_weight(_step.moved(w, u, numbers), param.dtype, bits)
    else:
        before = compensation[where]
        new, lost = _step.moved_with_compensation(w, u, before, numbers)
        compensation.index_put_(where, skip.choose(before, lost))
    param.index_put_(where, skip.choose(old, new))


def _accumulate(
    old: Sequence[Tensor],
    square: Tensor,
    positions: Sequence[Tensor],
    assigned: Sequence[bool],
    numbers: Numbers,
    options: Options,
    skip: _step.Skip,
) -> Tensor:
    """Update the flat accumulators and return nu of the touched elements."""
    if options.variant == "I":
        return _accumulate_first(old, square, positions, assigned, numbers, skip)
    nu = least_at(old, positions)
    if options.variant == "given":
        return nu
    nu = _step.bound(nu, square, numbers)
    for one, position, assign in zip(old, positions, assigned, strict=True):
        # A skipped step rewrites what is there.
        now = skip.choose(one[position], nu)
        one.scatter_reduce_(
            0, position.flatten(), now.flatten(), "amax", include_self=not assign
        )
    return nu


def _accumulate_first(
    old: Sequence[Tensor],
    square: Tensor,
    positions: Sequence[Tensor],
    assigned: Sequence[bool],
    numbers: Numbers,
    skip: _step.Skip,
) -> Tensor:
    """Do the same for SM3-I, where the maxima of squares come first."""
    nu = None
    for one, position, assign in zip(old, positions, assigned, strict=True):
        touched, inverse = position.flatten().unique(return_inverse=True)
        largest = square.new_zeros(touched.shape)
        largest.scatter_reduce_(0, inverse, square.flatten(), "amax")
        before = one[touched]
        now = _step.bound(before, largest, numbers)
        if not assign:
            now = torch.maximum(before, now)
        mine = now[inverse].view_as(square)
        nu = mine if nu is None else torch.minimum(nu, mine)
        one.index_put_((touched,), skip.choose(before, now))
    assert nu is not None, "a cover has at least one group"
    return nu


def _contiguous(shape: torch.Size) -> tuple[int, ...]:
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def _flat_numbers(
    indices: Tensor, shape: torch.Size, strides: Sequence[int], start: int
) -> Tensor:
    """Return ``start + sum(idx * strides)`` of touched elements, shaped as values."""
    sparse_dim, dense = len(indices), len(shape) - len(indices)
    numbers = torch.full((1,) * (1 + dense), start, device=indices.device)
    for d, stride in enumerate(strides):
        along = (
            indices[d]
            if d < sparse_dim
            else torch.arange(shape[d], device=indices.device)
        )
        axis = max(0, d - sparse_dim + 1)
        sizes = [-1 if k == axis else 1 for k in range(1 + dense)]
        numbers = numbers + (along * stride).reshape(sizes)
    return numbers


def _groups_in_use(
    cover: ResolvedCover, shape: torch.Size, numbers: Numbers
) -> list[int]:
    """Return the groups that are read and written: all, or the rows' alone.

    The rows' is the first that holds an axis of dim 0; without any it is the first.
    """
    every = list(range(len(cover.axes)))
    if not numbers.preset.rows_only:
        return every
    row = math.prod(shape[1:])
    of_rows = {a for a in range(len(cover.view)) if math.prod(cover.view[a:]) > row}
    of_rows = {a for a in of_rows if cover.view[a] > 1}
    return [k for k in every if of_rows & set(cover.axes[k])][:1] or every[:1]


def _assigned(
    cover: ResolvedCover, shape: torch.Size, sparse_dim: int, numbers: Numbers
) -> list[bool]:
    """Tell, per group, whether touched sets forget their old values.

    They may only where all of a set is touched: in whole rows, with beta2 < 1.
    """
    lazy = numbers.keep is not None and not numbers.preset.keep_larger
    row = math.prod(shape[1:])
    return [
        lazy and sparse_dim == 1 and _in_one_row(group, cover.view, row)
        for group in cover.axes
    ]


def _in_one_row(group: tuple[int, ...], view: tuple[int, ...], row: int) -> bool:
    """Tell whether each set of a group lies in one row of ``row`` elements."""
    for a, size in enumerate(view):
        if a not in group and size > 1:
            # From here on a set may spread over all of this many elements.
            return row % math.prod(view[a:]) == 0
    return True
