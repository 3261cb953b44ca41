# SPDX-License-Identifier: Apache-2.0
"""Stages of every kind, for the tests of the backward in two parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from helpers.pipeline_layers import (
    Apply,
    Attention,
    Checkpointed,
    D,
    Reversible,
    Scale,
    Transformer,
)
from torch import Tensor, nn


def _frozen(module: nn.Module, *names: str) -> nn.Module:
    for name in names:
        module.get_parameter(name).requires_grad_(False)
    return module


def _in_place(m: Any, x: Tensor) -> Tensor:
    x += 1
    x[:, 1:3].mul_(2)  # a CopySlices node
    y = m.a(x).mul_(3)
    y[0] = m.w
    y.relu_()
    return m.b(y).add_(m.w)


def _shared_transpose(m: Any, x: Tensor) -> Tensor:
    # Kept from microbatch to microbatch, with its graph.
    if m.kept is None:
        m.kept = m.w.t()
    return torch.tanh(x @ m.kept) * m.scale.view(1, -1) @ m.kept


def _tokens(x: Tensor) -> Tensor:
    return (x.detach()[:, 0].abs() * 9).long() % 10


def _embedding(sparse: bool = False) -> nn.Module:
    return Apply(
        lambda m, x: m.b(torch.tanh(m.a(m.e(_tokens(x))))),
        e=nn.Embedding(10, D, sparse=sparse),
        a=nn.Linear(D, D),
        b=nn.Linear(D, D),
    )


def _shared_sum(m: Any, x: Tensor) -> Tensor:
    if m.kept is None:
        m.kept = m.w + torch.ones(D)
    return (x * m.kept + m.kept) @ m.v


def _shared_view(m: Any, x: Tensor) -> Tensor:
    if m.kept is None:
        m.kept = m.w.view(1, -1)
    return (x * m.kept) @ m.v


def _two_outputs(m: Any, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    h = torch.tanh(m.a(x))
    return h, m.b(h) + y, m.a.weight * 2, x, torch.arange(3), y.detach()


def _autocast(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return m.b(F.gelu(m.a(x)) @ m.b.weight).float()


def _hooked(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h.register_hook(lambda grad: grad * 2)
    h.retain_grad()
    y = m.b(torch.sin(h))
    y.grad_fn.register_prehook(lambda grads: (grads[0] * 3,))
    z = m.c(y)
    # Sees all gradients that the node finds, and changes one of them.
    z.grad_fn.register_hook(lambda found, _: tuple(5 * grad for grad in found))
    return z


class Case(NamedTuple):
    """A stage, the shapes of its inputs and whether anything is left for ``weight``."""

    make: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...] = ((4, D),)
    splits: bool = True


def _w(*shape: int) -> Tensor:
    return torch.randn(shape) / 2


def _linear() -> nn.Module:
    return nn.Linear(D, D)


ZOO: dict[str, Case] = {
    "linear": Case(_linear),
    "linear_3d": Case(_linear, ((2, 3, D),)),
    "linear_no_bias": Case(lambda: nn.Linear(D, 5, bias=False), ((2, 3, D),)),
    "two_linears": Case(lambda: nn.Sequential(_linear(), nn.Tanh(), _linear())),
    "layer_norm": Case(lambda: nn.LayerNorm(D), splits=False),
    "norms": Case(
        lambda: nn.Sequential(
            nn.LayerNorm(D), _linear(), nn.BatchNorm1d(D), _linear(), nn.RMSNorm(D)
        )
    ),
    "group_norm": Case(
        lambda: nn.Sequential(nn.Conv1d(4, 6, 1), nn.GroupNorm(2, 6)), ((2, 4, 5),)
    ),
    "conv1d": Case(lambda: nn.Conv1d(3, 4, 3, padding=1), ((2, 3, 7),)),
    "conv2d": Case(
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2, bias=False)
        ),
        ((2, 2, 8, 8),),
    ),
    "conv_transpose": Case(
        lambda: nn.ConvTranspose2d(2, 3, 3, stride=2), ((2, 2, 4, 4),)
    ),
    "conv3d": Case(lambda: nn.Conv3d(1, 2, 2), ((1, 1, 4, 4, 4),)),
    "attention": Case(Attention, ((2, 5, D),)),
    "multihead": Case(
        lambda: Apply(
            lambda m, x: m.a(x, x, x, need_weights=False)[0],
            a=nn.MultiheadAttention(D, 2, batch_first=True),
        ),
        ((2, 5, D),),
    ),
    "transformer": Case(
        lambda: nn.Sequential(Transformer(0.1), Transformer(0.1)), ((2, 5, D),)
    ),
    "lstm": Case(
        lambda: Apply(lambda m, x: m.a(x)[0], a=nn.LSTM(D, D, batch_first=True)),
        ((2, 5, D),),
        splits=False,
    ),
    "bilinear": Case(lambda: nn.Bilinear(D, D, 3), ((4, D), (4, D)), splits=False),
    "used_twice_in_a_row": Case(lambda: Apply(lambda m, x: x @ m.w @ m.w, w=_w(D, D))),
    "used_four_times": Case(
        lambda: Apply(lambda m, x: x @ m.w @ m.w.t() @ (m.w * m.w) @ m.w, w=_w(D, D))
    ),
    "used_in_parallel": Case(
        lambda: Apply(lambda m, x: x @ m.w + torch.tanh(x) @ m.w + x @ m.w, w=_w(D, D))
    ),
    "used_by_all_kinds": Case(
        lambda: Apply(
            lambda m, x: Scale.apply(Scale.apply(x @ m.a, m.w) @ m.a + m.w, m.w) * m.w,
            a=_w(D, D),
            w=_w(D),
        )
    ),
    "whole_between_parts": Case(
        lambda: Apply(
            lambda m, x: (x @ m.a) * m.a.sum() @ m.a * m.a[0] @ m.a, a=_w(D, D)
        )
    ),
    "batched": Case(
        lambda: Apply(
            lambda m, x: torch.baddbmm(m.b, torch.bmm(x, m.w), m.w),
            w=_w(2, D, D),
            b=_w(D),
        ),
        ((2, 3, D),),
    ),
    "vectors": Case(
        lambda: Apply(
            lambda m, x: torch.addmv(m.b, x, m.w) + x.mv(m.w), w=_w(D), b=_w(4)
        )
    ),
    "in_place": Case(lambda: Apply(_in_place, a=_linear(), b=_linear(), w=_w(D))),
    "no_weights": Case(lambda: Apply(lambda m, x: torch.tanh(x) * 2), splits=False),
    "identity": Case(lambda: Apply(lambda m, x: x), splits=False),
    "frozen_all": Case(lambda: _frozen(_linear(), "weight", "bias"), splits=False),
    "frozen_some": Case(
        lambda: _frozen(
            nn.Sequential(_linear(), nn.Tanh(), _linear(), _linear()),
            "0.weight",
            "2.bias",
            "3.weight",
            "3.bias",
        )
    ),
    "views": Case(
        lambda: Apply(
            lambda m, x: (m.a(x).view(2, 2, D).transpose(0, 1)[..., 1:], m.a.weight[0]),
            a=_linear(),
        )
    ),
    "custom_function": Case(
        lambda: Apply(lambda m, x: Scale.apply(x, m.w), w=_w(D)), splits=False
    ),
    "custom_and_linear": Case(
        lambda: Apply(lambda m, x: m.a(Scale.apply(m.a(x), m.w)), a=_linear(), w=_w(D))
    ),
    "reversible": Case(Reversible, splits=False),
    "reversible_between": Case(
        lambda: nn.Sequential(_linear(), Reversible(), _linear())
    ),
    "autocast": Case(lambda: Apply(_autocast, a=_linear(), b=_linear())),
    "dropout": Case(lambda: nn.Sequential(_linear(), nn.Dropout(0.3), _linear())),
    "weight_norm": Case(
        lambda: nn.Sequential(
            torch.nn.utils.parametrizations.weight_norm(_linear()), nn.Tanh(), _linear()
        )
    ),
    "shared_transpose": Case(
        lambda: Apply(_shared_transpose, w=_w(D, D), scale=_w(D), kept=None)
    ),
    "shared_sum": Case(lambda: Apply(_shared_sum, w=_w(D), v=_w(D, D), kept=None)),
    "shared_view": Case(lambda: Apply(_shared_view, w=_w(D), v=_w(D, D), kept=None)),
    "outputs": Case(
        lambda: Apply(_two_outputs, a=_linear(), b=_linear()), ((4, D), (4, D))
    ),
    "one_output_twice": Case(
        lambda: Apply(lambda m, x: [m.a(x)] * 2, a=_linear()),
    ),
    "unused_input": Case(
        lambda: Apply(lambda m, x, y: m.a(x), a=_linear()), ((4, D), (3,))
    ),
    "embedding": Case(_embedding),
    "embedding_sparse": Case(lambda: _embedding(sparse=True)),
    "embedding_tied": Case(
        lambda: Apply(
            lambda m, x: torch.tanh(m.e(_tokens(x)) @ m.w + x.sum()) @ m.e.weight.t(),
            e=nn.Embedding(10, D),
            w=_w(D, D),
        )
    ),
    "only_weights": Case(
        lambda: Apply(lambda m, x: torch.tanh(m.w @ m.w), w=_w(D, D)),
    ),
    "hooks": Case(
        lambda: Apply(_hooked, a=_linear(), b=_linear(), c=_linear()),
    ),
}
for _reentrant in (False, True):
    _mode = "reentrant" if _reentrant else "nonreentrant"
    ZOO[f"checkpoint_{_mode}"] = Case(
        lambda reentrant=_reentrant: Checkpointed(
            nn.Sequential(_linear(), nn.Dropout(0.2), nn.Tanh(), _linear()), reentrant
        ),
        splits=False,
    )
    ZOO[f"checkpoint_{_mode}_between"] = Case(
        lambda reentrant=_reentrant: nn.Sequential(
            _linear(),
            Checkpointed(Transformer(0.1), reentrant),
            nn.Tanh(),
            Checkpointed(nn.Sequential(nn.LayerNorm(D), _linear()), reentrant),
            _linear(),
        ),
        ((2, 5, D),),
    )
