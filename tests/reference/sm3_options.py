# SPDX-License-Identifier: Apache-2.0
"""What the oracles of SM3 are told: options, covers, places of elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

#: A view and the groups of its axes that keep an accumulator.
Cover = tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]


@dataclass(frozen=True)
class Options:
    """Options of one run; a dtype is given by its name."""

    lr: float = 0.1
    momentum: float = 0.0
    beta2: float | None = None
    eps: float | None = None
    weight_decay: float = 0.0
    maximize: bool = False
    variant: str = "II"
    compat: str | None = None
    grad_scale: float | None = None
    momentum_dtype: str | None = None
    stochastic_rounding: bool = False
    kahan: bool = False
    seed: int = 0

    def __str__(self) -> str:
        """Name what differs from the defaults, for the names of tests."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        named = [
            f"{f.name}={values[f.name]}"
            for f in fields(self)
            if values[f.name] != f.default
        ]
        return ",".join(named) or "plain"


def default_cover(shape: Sequence[int], compat: str | None = None) -> Cover:
    """Return the cover that a parameter of ``shape`` has unless told otherwise."""
    view = tuple(n for n in shape if n != 1)
    everything = (tuple(range(len(view))),)
    if len(view) < 2 or 0 in view:
        return view, everything
    if compat is None and sum(view) >= math.prod(view):
        return view, everything
    return view, tuple((a,) for a in range(len(view)))


@dataclass(frozen=True)
class Place:
    """Element ``idx`` has the number ``start + sum(idx * strides)``."""

    ordinal: int
    start: int
    strides: tuple[int, ...]

    @staticmethod
    def whole(shape: Sequence[int], ordinal: int = 0) -> Place:
        """Return the place of a parameter that is not sharded."""
        shape = tuple(shape)
        strides = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
        return Place(ordinal, 0, strides)

    def numbers(self, shape: Sequence[int]) -> np.ndarray:
        """Return the number of every element."""
        total = np.full(tuple(shape), self.start, np.int64)
        for along, stride in zip(np.indices(tuple(shape)), self.strides, strict=True):
            total = total + along * stride
        return total
