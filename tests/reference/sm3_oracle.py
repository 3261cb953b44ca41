# SPDX-License-Identifier: Apache-2.0
"""SM3-II written twice from the formulas: float64 NumPy, and one torch op per rounding.

The first says what is right, the second which bits are right.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch


@dataclass
class Options:
    """Hyper-parameters of one run."""

    lr: float = 0.1
    momentum: float = 0.0
    beta2: float | None = None
    eps: float = 1e-30
    weight_decay: float = 0.0
    maximize: bool = False


def cover_axes(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return, for each accumulator, the axes of the tensor that it keeps."""
    real = [d for d, n in enumerate(shape) if n != 1]
    sizes = [shape[d] for d in real]
    if len(real) < 2 or sum(sizes) >= math.prod(sizes):
        return [tuple(real)]
    return [(d,) for d in real]


@dataclass
class NumpySM3:
    """One parameter in float64, every element visited through whole-array maxima."""

    w: np.ndarray
    options: Options
    mu: list[np.ndarray] = field(default_factory=list)
    m: np.ndarray | None = None

    def __post_init__(self) -> None:
        self.axes = cover_axes(self.w.shape)
        for kept in self.axes:
            shape = [n if d in kept else 1 for d, n in enumerate(self.w.shape)]
            self.mu.append(np.zeros(shape))
        self.m = np.zeros_like(self.w)

    def step(self, g: np.ndarray) -> np.ndarray:
        """Do one step and return the new bound nu of every element."""
        o = self.options
        g = -g if o.maximize else g
        keep, add = (1.0, 1.0) if o.beta2 in (None, 1.0) else (o.beta2, 1 - o.beta2)
        least = np.full(self.w.shape, np.inf)
        for mu in self.mu:
            least = np.minimum(least, mu)
        nu = keep * least + add * g**2
        with np.errstate(divide="ignore", invalid="ignore"):
            u = np.where(nu + o.eps == 0, 0.0, g / np.sqrt(nu + o.eps))
        for i, kept in enumerate(self.axes):
            others = tuple(d for d in range(self.w.ndim) if d not in kept)
            self.mu[i] = nu.max(axis=others, keepdims=True) if nu.size else self.mu[i]
        self.m = u if o.momentum == 0 else o.momentum * self.m + (1 - o.momentum) * u
        self.w = (1 - o.lr * o.weight_decay) * self.w - o.lr * self.m
        return nu


class RoundedSM3:
    """One parameter with one torch op per rounding, so that bits can be compared."""

    def __init__(self, w: torch.Tensor, options: Options) -> None:
        self.w, self.o = w.clone(), options
        self.c = torch.float64 if w.dtype == torch.float64 else torch.float32
        self.axes = cover_axes(tuple(w.shape))
        self.mu = [
            torch.zeros(
                [n if d in kept else 1 for d, n in enumerate(w.shape)], dtype=self.c
            )
            for kept in self.axes
        ]
        self.m = torch.zeros_like(w)

    def number(self, x: float) -> torch.Tensor:
        return torch.tensor(x, dtype=torch.float64).to(self.c)

    def step(self, grad: torch.Tensor) -> None:
        o, one = self.o, torch.tensor(1.0, dtype=self.c)
        g = grad.to(self.c)
        g = torch.neg(g) if o.maximize else g
        finite = torch.isfinite(g)
        limit = torch.tensor(torch.finfo(self.c).max, dtype=self.c)
        # The largest number whose square is finite.
        root = torch.tensor(math.sqrt(torch.finfo(self.c).max)).to(self.c)
        root = root if torch.isfinite(root * root) else torch.nextafter(root, one)
        clamped = torch.clamp(torch.where(finite, g, torch.zeros_like(g)), -root, root)
        least = self.mu[0]
        for mu in self.mu[1:]:
            least = torch.minimum(least, mu)
        square = torch.mul(clamped, clamped)
        if o.beta2 is not None and o.beta2 < 1:
            nu = torch.mul(least, self.number(o.beta2))
            nu = torch.add(nu, torch.mul(square, self.number(1 - o.beta2)))
        else:
            nu = torch.add(least, square)
        nu = torch.minimum(nu, limit)
        d = torch.add(nu, self.number(o.eps))
        # NumPy's root is correctly rounded; torch's on the CPU is not always.
        root_of_d = torch.from_numpy(np.asarray(np.sqrt(d.numpy())))
        u = torch.where(d == 0, torch.zeros_like(d), clamped / root_of_d)
        u = torch.where(finite, u, torch.full_like(u, torch.nan))
        if nu.numel():
            for i, kept in enumerate(self.axes):
                others = [n for n in range(nu.ndim) if n not in kept]
                self.mu[i] = nu.amax(dim=others, keepdim=True) if others else nu
        if o.momentum > 0:
            u = torch.add(
                torch.mul(self.m.to(self.c), self.number(o.momentum)),
                torch.mul(u, self.number(1 - o.momentum)),
            )
            self.m = u.to(self.m.dtype)
        decay = one - self.number(o.lr) * self.number(o.weight_decay)
        w = torch.mul(self.w.to(self.c), decay)
        self.w = torch.sub(w, torch.mul(u, self.number(o.lr))).to(self.w.dtype)
