# SPDX-License-Identifier: Apache-2.0
"""Data-parallel training of a small MLP, all ranks simulated in one process.

The task is fixed: points around forty centers in 32 dimensions, four centers to each
of ten classes, with so much noise that gradients of a batch of 64 are mostly noise
near the target. Every rank draws batches of its own and never sees a sample twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim.optimizer import Optimizer

import torch_sm3

ops = torch.ops.torch_sm3

CLASSES, CENTERS, INPUTS, HIDDEN, NOISE = 10, 4, 32, 64, 1.5
SHAPES = (
    (INPUTS, HIDDEN),
    (HIDDEN,),
    (HIDDEN, HIDDEN),
    (HIDDEN,),
    (HIDDEN, CLASSES),
    (CLASSES,),
)
SIZES = [math.prod(shape) for shape in SHAPES]
#: Loss that ends a run, where about 0.35 can be reached, and what of the smooth
#: loss each step keeps.
TARGET, KEEP = 0.8, 0.9


@dataclass(frozen=True)
class Method:
    """An optimizer and what of it is combined over ranks.

    Attributes:
        name: in tables.
        make: builds it from parameters and a learning rate.
        delta: updates are combined by Adasum instead of gradients.
        start: learning rate to look around for the best one.
    """

    name: str
    make: Callable[[Sequence[Tensor], float], Optimizer]
    delta: bool
    start: float


METHODS = {
    "sgd": Method(
        "SGD momentum 0.9, hook",
        lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9),
        False,
        0.02,
    ),
    "sm3": Method(
        "SM3, delta mode", lambda params, lr: torch_sm3.SM3(params, lr=lr), True, 0.1
    ),
    "adam": Method(
        "Adam, delta mode",
        lambda params, lr: torch.optim.Adam(params, lr=lr, fused=True),
        True,
        0.005,
    ),
}


def combine(rows: Tensor, mode: str) -> Tensor:
    """Return what every rank ends with, for the flat rows of all ranks."""
    coefficients = ops.adasum_coefficients(ops.adasum_gram(rows, SIZES), mode)
    return ops.adasum_combine(rows, coefficients, SIZES)


def views(flat: Tensor) -> list[Tensor]:
    """Cut the last dimension into the layers."""
    parts = flat.split(SIZES, dim=-1)
    return [
        part.unflatten(-1, shape) for part, shape in zip(parts, SHAPES, strict=True)
    ]


class Simulation:
    """One training run on several ranks.

    Args:
        method: optimizer.
        mode: how ranks are combined: "tree" is Adasum, "mean" the plain all-reduce of
            gradients for every method.
        ranks: number of ranks.
        batch: samples of a rank and step.
        lr: learning rate.
        seed: of weights and batches.
    """

    def __init__(
        self, method: Method, mode: str, ranks: int, batch: int, lr: float, seed: int
    ) -> None:
        self.mode, self.ranks, self.batch = mode, ranks, batch
        task = torch.Generator().manual_seed(0)
        self.centers = torch.randn(CLASSES, CENTERS, INPUTS, generator=task)
        self.generator = torch.Generator().manual_seed(1 + seed)
        # One row of parameters per rank that has an optimizer of its own.
        self.delta = method.delta and mode != "mean" and ranks > 1
        self.start = self._weights()
        self.own = self.start.repeat(ranks if self.delta else 1, 1)
        self.grads = torch.zeros_like(self.own)
        params = []
        for row, grad in zip(self.own, self.grads, strict=True):
            for value, its_grad in zip(views(row), views(grad), strict=True):
                params.append(torch.nn.Parameter(value))
                params[-1].grad = its_grad
        self.optimizer = method.make(params, lr)

    def _weights(self) -> Tensor:
        parts = []
        for shape in SHAPES:
            scale = math.sqrt(2 / shape[0]) if len(shape) == 2 else 0.0
            parts.append(scale * torch.randn(shape, generator=self.generator).flatten())
        return torch.cat(parts)

    def _draw(self) -> tuple[Tensor, Tensor]:
        size = (self.ranks, self.batch)
        classes = torch.randint(CLASSES, size, generator=self.generator)
        centers = torch.randint(CENTERS, size, generator=self.generator)
        noise = torch.randn(*size, INPUTS, generator=self.generator)
        return self.centers[classes, centers] + NOISE * noise, classes

    def step(self) -> float:
        """Do one step of all ranks; return their mean loss before it."""
        weights = self.start.repeat(self.ranks, 1).requires_grad_()
        x, classes = self._draw()
        w1, b1, w2, b2, w3, b3 = views(weights)
        hidden = torch.baddbmm(b1.unsqueeze(1), x, w1).relu()
        hidden = torch.baddbmm(b2.unsqueeze(1), hidden, w2).relu()
        logits = torch.baddbmm(b3.unsqueeze(1), hidden, w3)
        loss = cross_entropy(logits.flatten(0, 1), classes.flatten(), reduction="sum")
        loss = loss / self.batch
        (gradients,) = torch.autograd.grad(loss, [weights])
        if self.delta:
            self.grads.copy_(gradients)
            self.own.copy_(self.start.expand_as(self.own))
            self.optimizer.step()
            self.start = self.start + combine(self.own - self.start, self.mode)
        else:
            self.grads[0] = combine(gradients, self.mode)
            self.optimizer.step()
            self.start = self.own[0].clone()
        return float(loss.detach()) / self.ranks


def curve(simulation: Simulation, limit: int) -> list[float]:
    """Return the smooth loss of each step, up to the target or the limit."""
    smooth: list[float] = []
    for _ in range(limit):
        loss = simulation.step()
        if not math.isfinite(loss):
            break
        smooth.append(KEEP * smooth[-1] + (1 - KEEP) * loss if smooth else loss)
        if smooth[-1] < TARGET:
            break
    return smooth
