# SPDX-License-Identifier: Apache-2.0
"""The functional form of SM3: one step on explicit lists."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_sm3.optim._batch import Options, Place
from torch_sm3.optim._cover import Cover
from torch_sm3.optim._fused import Entry
from torch_sm3.optim._gather import path_of
from torch_sm3.optim._options import DEFAULTS, check_group, make_plain
from torch_sm3.optim._plan import Work
from torch_sm3.optim._resolve import resolve
from torch_sm3.optim._scaling import learning_rate, on
from torch_sm3.optim._sm3 import run


def sm3(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    accumulators: Iterable[Sequence[Tensor]],
    momentum_buffers: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: float | Tensor,
    momentum: float = 0.0,
    beta2: float | None = None,
    eps: float | None = None,
    weight_decay: float = 0.0,
    variant: str = "II",
    compat: str | None = None,
    cover: str | Cover = "auto",
    maximize: bool = False,
    momentum_scales: Sequence[Tensor | None] | None = None,
    compensations: Sequence[Tensor | None] | None = None,
    stochastic_rounding: bool = False,
    seed: int = 0,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    foreach: bool | None = None,
    fused: bool | None = None,
    capturable: bool = False,
    differentiable: bool = False,
) -> None:
    r"""Do one step of SM3 on explicit lists; the functional form of :class:`SM3`.

    Args:
        params: parameters, updated in place.
        grads: their gradients, dense, never written.
        accumulators: for each parameter the list that
            ``torch.ops.torch_sm3.sm3_accumulators`` makes, updated in place.
        momentum_buffers: one per parameter, or empty without momentum.
        steps: one int64 scalar per parameter, counted up.
        lr: learning rate.
        momentum: see :class:`SM3`, as all that are not explained here.
        beta2: see :class:`SM3`.
        eps: see :class:`SM3`.
        weight_decay: see :class:`SM3`.
        variant: see :class:`SM3`.
        compat: see :class:`SM3`.
        cover: see :class:`SM3`.
        maximize: see :class:`SM3`.
        momentum_scales: of int8 momentum buffers, one per parameter or None.
        compensations: of Kahan summation, one per parameter or None.
        stochastic_rounding: see :class:`SM3`.
        seed: see :class:`SM3`; parameters are numbered by their place in the list.
        grad_scale: gradients are divided by it.
        found_inf: nothing is changed where it is not 0.
        foreach: see :class:`SM3`.
        fused: see :class:`SM3`.
        capturable: see :class:`SM3`.
        differentiable: see :class:`SM3`.

    Raises:
        ValueError: if counts, shapes, dtypes or devices do not fit, or an option is
            out of its range.
        RuntimeError: for a sparse gradient.

    Example:
        >>> weight, grad = torch.zeros(2, 3), torch.ones(2, 3)
        >>> state = torch.ops.torch_sm3.sm3_accumulators(weight)
        >>> step = torch.zeros((), dtype=torch.int64)
        >>> torch_sm3.sm3([weight], [grad], [state], [], [step], lr=0.1)
        >>> weight[0], step
        (tensor([-0.1000, -0.1000, -0.1000]), tensor(1))
    """
    if any(grad.layout != torch.strided for grad in grads):
        raise RuntimeError("sm3: expected dense gradients, but got a sparse one")
    group = {
        **DEFAULTS,
        "lr": lr,
        "momentum": momentum,
        "beta2": beta2,
        "eps": eps,
        "weight_decay": weight_decay,
        "variant": variant,
        "compat": compat,
        "cover": cover,
        "maximize": maximize,
        "stochastic_rounding": stochastic_rounding,
        "seed": seed,
        "foreach": foreach,
        "fused": fused,
        "capturable": capturable,
        "differentiable": differentiable,
    }
    make_plain(group)
    check_group(group)
    nothing = [None] * len(params)
    columns = (
        params,
        grads,
        list(accumulators),
        momentum_buffers if momentum > 0 else nothing,
        nothing if momentum_scales is None else momentum_scales,
        nothing if compensations is None else compensations,
        steps,
    )
    if len({len(column) for column in columns}) > 1:
        raise ValueError(
            "sm3: expected lists of one length, but got "
            f"{[len(column) for column in columns]}"
        )
    for work in _works(group, zip(*columns, strict=True)):
        options = Options(
            **{key: group[key] for key in _PASSED},
            lr=learning_rate(lr, work.device, differentiable),
            grad_scale=on(grad_scale, work.device),
            found_inf=on(found_inf, work.device),
        )
        run(work, options)


_PASSED = (
    "momentum",
    "beta2",
    "eps",
    "weight_decay",
    "variant",
    "compat",
    "maximize",
    "stochastic_rounding",
    "seed",
    "capturable",
    "differentiable",
)


def _works(group: dict[str, Any], rows: Iterable[tuple[Any, ...]]) -> list[Work]:
    works: dict[tuple[torch.device, str], Work] = {}
    for ordinal, (param, grad, sums, momentum, scale, lost, step) in enumerate(rows):
        path = path_of(group, param)
        key = (param.device, path)
        work = works.setdefault(key, Work(group, param.device, path, [], []))
        strides = torch.empty(param.shape, device="meta").stride()
        entry = Entry(
            owner=param,
            param=param,
            accumulators=list(sums),
            momentum_buffer=momentum,
            momentum_scale=scale,
            compensation=lost,
            step=step,
            cover=resolve(group["cover"], param.shape, group["compat"]),
            place=Place(ordinal, 0, strides),
            automatic=group["cover"] == "auto",
        )
        work.entries.append(entry)
        work.grads.append(grad)
    return list(works.values())
