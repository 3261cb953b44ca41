# SPDX-License-Identifier: Apache-2.0
"""The fused implementation: lists of tensors for one call of an operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torch_sm3 import _ops
from torch_sm3.optim._batch import Options, Place, ResolvedCover

# Stands for "automatic" in place of a view's rank.
_AUTOMATIC = -1


@dataclass
class Entry:
    """One parameter of a step, as the tensors that lie on this process.

    Args:
        owner: the parameter that the optimizer holds.
        param: the part that is updated here; the owner itself unless it is sharded.
        accumulators: of the part.
        momentum_buffer: of the part, or None.
        momentum_scale: of an int8 buffer, or None.
        compensation: of Kahan summation, or None.
        step: count of steps.
        cover: sets that share an accumulator.
        place: where the part lies in the whole.
        automatic: the operator finds this cover by itself.
    """

    owner: Tensor
    param: Tensor
    accumulators: list[Tensor]
    momentum_buffer: Tensor | None
    momentum_scale: Tensor | None
    compensation: Tensor | None
    step: Tensor
    cover: ResolvedCover
    place: Place
    automatic: bool


@dataclass
class Lists:
    """Arguments of ``sm3_update_`` that stay the same from step to step."""

    params: list[Tensor] = field(default_factory=list)
    accumulators: list[Tensor] = field(default_factory=list)
    momentum_buffers: list[Tensor] = field(default_factory=list)
    momentum_scales: list[Tensor] = field(default_factory=list)
    compensations: list[Tensor] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)
    covers: list[int] = field(default_factory=list)
    global_index: list[int] = field(default_factory=list)


def encode_cover(cover: ResolvedCover) -> list[int]:
    """Return a cover as ints: rank, view sizes, group count, one bit mask a group."""
    masks = [sum(1 << axis for axis in group) for group in cover.axes]
    return [len(cover.view), *cover.view, len(masks), *masks]


def _encode_covers(entries: Sequence[Entry]) -> list[int]:
    if all(entry.automatic for entry in entries):
        return []
    codes: list[int] = []
    for entry in entries:
        codes += [_AUTOMATIC] if entry.automatic else encode_cover(entry.cover)
    return codes


def _encode_places(entries: Sequence[Entry], rounds_by_place: bool) -> list[int]:
    # Only stochastic rounding and ranges of a hinted shape look at places.
    if not rounds_by_place and not any(entry.place.start for entry in entries):
        return []
    codes: list[int] = []
    for entry in entries:
        place = entry.place
        codes += [place.ordinal, place.start, *place.strides]
    return codes


def _optional(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """Return one tensor for each parameter, empty where there is none; [] for none."""
    given = [tensor for tensor in tensors if tensor is not None]
    if not given:
        return []
    nothing = given[0].new_empty(0)
    return [nothing if tensor is None else tensor for tensor in tensors]


def lists(entries: Sequence[Entry], group: Mapping[str, Any]) -> Lists:
    """Gather the entries of one device for one call, under their group's options."""
    uses_momentum = group["momentum"] > 0
    return Lists(
        params=[entry.param for entry in entries],
        accumulators=[one for entry in entries for one in entry.accumulators],
        momentum_buffers=[
            entry.momentum_buffer
            for entry in entries
            if uses_momentum and entry.momentum_buffer is not None
        ],
        momentum_scales=_optional([entry.momentum_scale for entry in entries])
        if uses_momentum
        else [],
        compensations=_optional([entry.compensation for entry in entries]),
        steps=[entry.step for entry in entries],
        covers=_encode_covers(entries),
        global_index=_encode_places(entries, group["stochastic_rounding"]),
    )


def fused_sm3(arguments: Lists, grads: list[Tensor], options: Options) -> None:
    """Do one step of SM3 on dense gradients by one operator.

    Args:
        arguments: parameters and state on one device.
        grads: one for each parameter.
        options: of the step.
    """
    _ops.sm3_update_(
        arguments.params,
        grads,
        arguments.accumulators,
        arguments.momentum_buffers,
        arguments.momentum_scales,
        arguments.compensations,
        arguments.steps,
        lr=options.lr,
        momentum=options.momentum,
        beta2=1.0 if options.beta2 is None else options.beta2,
        eps=options.eps,
        weight_decay=options.weight_decay,
        maximize=options.maximize,
        variant=options.variant,
        compat=options.compat or "",
        covers=arguments.covers,
        global_index=arguments.global_index,
        stochastic_rounding=options.stochastic_rounding,
        seed=options.seed,
        grad_scale=options.grad_scale,
        found_inf=options.found_inf,
    )


def fused_sparse_sm3(entry: Entry, grad: Tensor, options: Options) -> None:
    """Do one step of SM3 on one sparse gradient by one operator.

    Args:
        entry: the parameter and its state.
        grad: coalesced.
        options: of the step.
    """
    one = [entry]
    _ops.sm3_sparse_update_(
        entry.param,
        grad.indices(),
        grad.values(),
        entry.accumulators,
        _optional([entry.compensation]),
        entry.step,
        lr=options.lr,
        beta2=1.0 if options.beta2 is None else options.beta2,
        eps=options.eps,
        maximize=options.maximize,
        variant=options.variant,
        compat=options.compat or "",
        covers=_encode_covers(one),
        global_index=_encode_places(one, options.stochastic_rounding),
        stochastic_rounding=options.stochastic_rounding,
        seed=options.seed,
        grad_scale=options.grad_scale,
        found_inf=options.found_inf,
    )


def is_fusable(tensor: Tensor) -> bool:
    """Tell whether an operator may take a tensor: plain, floating, CPU or CUDA."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.device.type in ("cpu", "cuda")
        and tensor.is_floating_point()
    )
