# SPDX-License-Identifier: Apache-2.0
"""What one step of SM3 works on: the lists that all implementations take."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class ResolvedCover:
    """The sets of one parameter's elements that share a number.

    Args:
        view: sizes that the parameter's elements, in logical order, are seen in.
        axes: one group of view axes per accumulator; its shape is ``view[a]`` for
            ``a`` in the group, or ``[1]`` for an empty group.
    """

    view: tuple[int, ...]
    axes: tuple[tuple[int, ...], ...]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the accumulators."""
        return [tuple(self.view[a] for a in group) or (1,) for group in self.axes]


@dataclass(frozen=True)
class Place:
    """Where a local parameter's elements lie in the whole one, for random numbers.

    Element ``idx`` has the global number ``start + sum(idx * strides)``.
    """

    ordinal: int
    start: int
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Options:
    """Options of one step, the same for all tensors of a batch."""

    lr: float | Tensor
    momentum: float = 0.0
    beta2: float | None = None
    eps: float | None = None
    weight_decay: float = 0.0
    variant: str = "II"  # or "I", or "given": the accumulators are final
    compat: str | None = None
    maximize: bool = False
    stochastic_rounding: bool = False
    seed: int = 0
    capturable: bool = False
    differentiable: bool = False
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None


@dataclass
class Batch:
    """Tensors of one step; all lists are as long as ``params``.

    ``momentum_buffers`` holds None without momentum, ``momentum_scales`` None unless
    the buffer is int8, ``compensations`` None without Kahan summation.
    """

    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    accumulators: list[list[Tensor]] = field(default_factory=list)
    momentum_buffers: list[Tensor | None] = field(default_factory=list)
    momentum_scales: list[Tensor | None] = field(default_factory=list)
    compensations: list[Tensor | None] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)
    covers: list[ResolvedCover] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
