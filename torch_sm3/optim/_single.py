# SPDX-License-Identifier: Apache-2.0
"""SM3 tensor by tensor, for every device and tensor type; also differentiable."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_sm3.optim import _step
from torch_sm3.optim._batch import Batch, Options
from torch_sm3.optim._numbers import Numbers, computing_type, numbers_of
from torch_sm3.optim._random import element_numbers, random_bits
from torch_sm3.optim._sets import DenseSets, RangeSets, sets_of
from torch_sm3.optim._storage import decode_blocks, encode_blocks


def single_tensor_sm3(batch: Batch, options: Options) -> None:
    """Do one step of SM3 on dense gradients, one parameter after the other.

    Parameters and state are overwritten at the end, so that they may carry a graph.

    Args:
        batch: parameters, gradients and state.
        options: of the step.
    """
    for i in range(len(batch.params)):
        _step_one(batch, i, options)


def _step_one(batch: Batch, i: int, options: Options) -> None:
    param, step = batch.params[i], batch.steps[i]
    skip = _step.Skip(options, param.device)
    if skip.known:
        return
    count = step + 1
    for target, value in _results(batch, i, options, count):
        skip.write(target, value)
    skip.write(step, count)


def _results(
    batch: Batch, i: int, options: Options, count: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of a tensor and its new value."""
    param, place = batch.params[i], batch.places[i]
    numbers = numbers_of(options, computing_type(param))
    sets = sets_of(param, batch.covers[i], place)
    bits = None
    if options.stochastic_rounding:
        elements = element_numbers(param.shape, place, param.device)
        bits = random_bits(
            options.seed, count.to(param.device), place.ordinal, elements
        )

    g, finite = _step.scaled_gradient(batch.grads[i], numbers)
    old = [_read(one, options) for one in batch.accumulators[i]]
    nu, new = _accumulate(old, g * g, sets, numbers, options.variant)
    results = list(zip(batch.accumulators[i], new, strict=False))
    if not param.numel():
        return results

    w = _read(param, options).to(numbers.dtype)
    m = _step.direction(g, finite, nu, numbers)
    if numbers.preset.decay_first and numbers.weight_decay:
        m = m + w * numbers.weight_decay
    buffer = batch.momentum_buffers[i]
    if buffer is not None:
        scales = batch.momentum_scales[i]
        if scales is None:
            m = _step.averaged(_read(buffer, options).to(numbers.dtype), m, numbers)
            results.append((buffer, m))
        else:
            m = _step.averaged(decode_blocks(buffer, scales), m, numbers)
            results += zip((buffer, scales), encode_blocks(m, bits), strict=True)

    compensation = batch.compensations[i]
    if compensation is None:
        w = _step.moved(w, m, numbers)
        results.append((param, _step.rounded_weight(w, param.dtype, bits)))
    else:
        pair = _step.moved_with_compensation(w, m, compensation, numbers)
        results += zip((param, compensation), pair, strict=True)
    return results


def _accumulate(
    old: list[Tensor],
    square: Tensor,
    sets: DenseSets | RangeSets,
    numbers: Numbers,
    variant: str,
) -> tuple[Tensor, list[Tensor]]:
    """Return nu of every element and the new accumulators, none if they are given."""
    if variant == "given":
        return sets.least(old), []
    if variant == "I":
        squares = sets.maxima(square)
        new = [_step.bound(a, b, numbers) for a, b in zip(old, squares, strict=True)]
        nu = None
    else:
        nu = _step.bound(sets.least(old), square, numbers)
        new = sets.maxima(nu)
    if _step.keeps_larger(numbers):
        new = [torch.maximum(a, b) for a, b in zip(old, new, strict=True)]
    return sets.least(new) if nu is None else nu, new


def _read(tensor: Tensor, options: Options) -> Tensor:
    """Return a tensor whose value autograd may keep after the original is written."""
    return tensor.clone() if options.differentiable else tensor
