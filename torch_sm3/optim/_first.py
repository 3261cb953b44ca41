# SPDX-License-Identifier: Apache-2.0
"""The first phase of SM3-I on its own: accumulators before any weight moves."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_sm3 import _ops
from torch_sm3.optim import _step
from torch_sm3.optim._batch import Options
from torch_sm3.optim._fused import Entry, encode_cover, is_fusable
from torch_sm3.optim._numbers import numbers_of
from torch_sm3.optim._plan import Work
from torch_sm3.optim._sets import sets_of


def accumulate(work: Work, options: Options) -> None:
    """Update the accumulators of one call from its gradients, and nothing else.

    As the rule is monotone in the squares, the maximum of the results over processes
    is the result of the maximum of the squares.

    Args:
        work: parameters with dense gradients.
        options: of the step.
    """
    for entry, grad in zip(work.entries, work.grads, strict=True):
        if not entry.param.numel():
            continue
        numbers = numbers_of(options, entry.param)
        skip = _step.Skip(options, entry.param.device)
        squares = _maxima(entry, grad, options)
        for old, square in zip(entry.accumulators, squares, strict=True):
            new = _step.bound(old, square, numbers)
            if _step.keeps_larger(numbers):
                new = torch.maximum(old, new)
            skip.write(old, new)


def _maxima(entry: Entry, grad: Tensor, options: Options) -> list[Tensor]:
    """Return the largest square of each set, 0 where no element lies here."""
    cover, param = entry.cover, entry.param
    if param.dtype == torch.float64:
        grad = grad.double()
    is_whole = math.prod(cover.view) == param.numel()
    if is_whole and is_fusable(grad):
        return _ops.sm3_maxima([grad], encode_cover(cover), options.grad_scale)
    g, _ = _step.scaled_gradient(grad, numbers_of(options, param))
    return sets_of(param, cover, entry.place).maxima(g * g)
