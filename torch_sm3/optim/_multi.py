# SPDX-License-Identifier: Apache-2.0
"""SM3 with ``torch._foreach`` functions: few launches for many tensors.

Two lists of temporaries are alive at a time, each a copy of the model in the
computing type; masks and roots are made tensor by tensor.
"""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from torch_sm3.optim._batch import Batch, Options
from torch_sm3.optim._numbers import Numbers, computing_type, numbers_of
from torch_sm3.optim._root import square_root
from torch_sm3.optim._sets import sets_of
from torch_sm3.optim._single import single_tensor_sm3
from torch_sm3.optim._step import Skip, bound, keeps_larger

_PLAIN = (Tensor, torch.nn.Parameter)


def multi_tensor_sm3(batch: Batch, options: Options) -> None:
    """Do one step of SM3 on dense gradients, all tensors of a kind at a time.

    The bits are those of :func:`single_tensor_sm3`, which also takes over what has
    no foreach form: tensor subclasses, int8 momentum, Kahan summation, stochastic
    rounding and a step that only the device knows to be skipped.

    Args:
        batch: parameters, gradients and state.
        options: of the step.
    """
    groups: dict[object, Batch] = {}
    for i in range(len(batch.params)):
        kind = _kind(batch, i, options)
        into = groups.setdefault(kind, Batch())
        for field in fields(Batch):
            getattr(into, field.name).append(getattr(batch, field.name)[i])
    for kind, group in groups.items():
        if kind is None:
            single_tensor_sm3(group, options)
        else:
            _step_group(group, options)


def _kind(batch: Batch, i: int, options: Options) -> object:
    """Return what tensors of one foreach call share, or None for the for-loop."""
    param, grad, buffer = batch.params[i], batch.grads[i], batch.momentum_buffers[i]
    plain = type(param) in _PLAIN and type(grad) in _PLAIN
    odd = batch.compensations[i] is not None or batch.momentum_scales[i] is not None
    undecided = Skip(options, param.device).undecided
    # Nothing is gained for empty tensors.
    if (
        not plain
        or odd
        or options.stochastic_rounding
        or undecided
        or not param.numel()
    ):
        return None
    momentum = None if buffer is None else buffer.dtype
    return param.device, param.dtype, grad.dtype, momentum, batch.steps[i].device


def _step_group(batch: Batch, options: Options) -> None:
    if Skip(options, batch.params[0].device).known:
        return
    numbers = numbers_of(options, computing_type(batch.params[0]))
    torch._foreach_add_(batch.steps, 1)
    u = [torch.empty_like(param, dtype=numbers.dtype) for param in batch.params]
    nu = _accumulate(batch, u, options.variant, numbers)
    _directions(batch, nu, u, numbers)
    scratch = nu
    if numbers.preset.decay_first and numbers.weight_decay:
        torch._foreach_copy_(scratch, batch.params)
        torch._foreach_mul_(scratch, numbers.weight_decay)
        torch._foreach_add_(u, scratch)
    buffers = [buffer for buffer in batch.momentum_buffers if buffer is not None]
    if buffers:
        torch._foreach_copy_(scratch, buffers)
        torch._foreach_mul_(scratch, numbers.momentum)
        torch._foreach_mul_(u, numbers.one_minus_momentum)
        torch._foreach_add_(u, scratch)
        torch._foreach_copy_(buffers, u)
    torch._foreach_mul_(u, numbers.lr)
    torch._foreach_copy_(scratch, batch.params)
    if numbers.decay is not None:
        torch._foreach_mul_(scratch, numbers.decay)
    torch._foreach_sub_(scratch, u)
    torch._foreach_copy_(batch.params, scratch)


def _load_gradients(into: list[Tensor], batch: Batch, bad: float, n: Numbers) -> None:
    """Write the scaled gradients, with ``bad`` where they are not finite."""
    torch._foreach_copy_(into, batch.grads)
    if n.factor is not None:
        torch._foreach_mul_(into, n.factor)
    for g in into:
        broken = ~torch.isfinite(g)
        g.clamp_(-n.root_max, n.root_max).masked_fill_(broken, bad)


def _accumulate(
    batch: Batch, scratch: list[Tensor], variant: str, numbers: Numbers
) -> list[Tensor]:
    """Update the accumulators and return nu, in memory of its own."""
    lists = zip(batch.params, batch.covers, batch.places, strict=True)
    sets = [sets_of(param, cover, place) for param, cover, place in lists]
    if variant != "given":
        _load_gradients(scratch, batch, 0.0, numbers)
        torch._foreach_mul_(scratch, scratch)
    if variant == "I":
        for one, old, square in zip(sets, batch.accumulators, scratch, strict=True):
            squares = one.maxima(square)
            pairs = zip(old, squares, strict=True)
            _store(old, [bound(a, b, numbers) for a, b in pairs], numbers)
    least = zip(sets, batch.accumulators, strict=True)
    nu = [one.least(old).clone() for one, old in least]
    if variant == "II":
        if numbers.keep is not None:
            torch._foreach_mul_(nu, numbers.keep)
            torch._foreach_mul_(scratch, numbers.add)
        torch._foreach_add_(nu, scratch)
        torch._foreach_clamp_max_(nu, numbers.largest)
        for one, old, now in zip(sets, batch.accumulators, nu, strict=True):
            _store(old, one.maxima(now), numbers)
    return nu


def _store(old: list[Tensor], new: list[Tensor], numbers: Numbers) -> None:
    for a, b in zip(old, new, strict=True):
        a.copy_(torch.maximum(a, b) if keeps_larger(numbers) else b)


def _directions(
    batch: Batch, nu: list[Tensor], u: list[Tensor], numbers: Numbers
) -> None:
    """Write the preconditioned gradients to ``u``; ``nu`` becomes scratch memory."""
    _load_gradients(u, batch, torch.nan, numbers)
    if numbers.preset.guard:
        for one, g in zip(nu, u, strict=True):
            g.masked_fill_((one == 0) & ~torch.isnan(g), 0.0)
    torch._foreach_add_(nu, numbers.eps)
    for one, g in zip(nu, u, strict=True):
        empty = one == 0
        g.masked_fill_(empty & ~torch.isnan(g), 0.0)
        one.copy_(square_root(one)).masked_fill_(empty, 1.0)
    if numbers.outside:
        torch._foreach_add_(nu, numbers.outside)
    torch._foreach_div_(u, nu)
