# SPDX-License-Identifier: Apache-2.0
"""One step of SM3 on arrays: what the for-loop and the sparse path share.

Every function issues one torch op per rounding and changes nothing in place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_sm3.optim._batch import Options
from torch_sm3.optim._numbers import Numbers
from torch_sm3.optim._root import square_root
from torch_sm3.optim._storage import round_stochastically


def scaled_gradient(grad: Tensor, numbers: Numbers) -> tuple[Tensor, Tensor]:
    """Return the gradient, clamped to a finite square, and where it is finite.

    Other elements are 0, as they must not enter an accumulator.
    """
    g = grad.to(numbers.dtype)
    if numbers.factor is not None:
        g = g * numbers.factor
    finite = torch.isfinite(g)
    g = torch.where(finite, g, torch.zeros_like(g))
    return g.clamp(-numbers.root_max, numbers.root_max), finite


def bound(old: Tensor, square: Tensor, numbers: Numbers) -> Tensor:
    """Return the old value plus the square, or their average."""
    if numbers.keep is None:
        return (old + square).clamp(max=numbers.largest)
    kept, added = old * numbers.keep, square * numbers.add
    return (kept + added).clamp(max=numbers.largest)


def direction(g: Tensor, finite: Tensor, nu: Tensor, numbers: Numbers) -> Tensor:
    """Return g / sqrt(nu + eps), 0 for 0 / 0, NaN where the gradient is not finite."""
    inner = nu + numbers.eps
    empty = inner == 0
    # No root of 0 is taken: its derivative is infinite.
    root = square_root(torch.where(empty, torch.ones_like(inner), inner))
    if numbers.outside:
        root = root + numbers.outside
    void = nu == 0 if numbers.preset.guard else empty
    u = torch.where(void, torch.zeros_like(g), g / root)
    return torch.where(finite, u, torch.full_like(u, torch.nan))


def averaged(momentum: Tensor, u: Tensor, numbers: Numbers) -> Tensor:
    """Return the new momentum."""
    return momentum * numbers.momentum + u * numbers.one_minus_momentum


def moved(w: Tensor, m: Tensor, numbers: Numbers) -> Tensor:
    """Return the new weight in the computing type."""
    kept = w if numbers.decay is None else w * numbers.decay
    return kept - m * numbers.lr


def moved_with_compensation(
    w: Tensor, m: Tensor, compensation: Tensor, numbers: Numbers
) -> tuple[Tensor, Tensor]:
    """Return the new weight and what its rounding lost (Kahan), both rounded.

    Args:
        w: weight in the computing type, held exactly by the parameter's type.
        m: momentum.
        compensation: what earlier roundings lost; its dtype is the parameter's.
        numbers: of the step.
    """
    change = -(m * numbers.lr) - w * numbers.lr_decay
    change = change + compensation.to(numbers.dtype)
    weight = (w + change).to(compensation.dtype)
    lost = change - (weight.to(numbers.dtype) - w)
    return weight, lost.to(compensation.dtype)


def rounded_weight(w: Tensor, dtype: torch.dtype, bits: Tensor | None) -> Tensor:
    """Round a new weight for its parameter, stochastically if there are random bits."""
    if bits is not None and dtype == torch.bfloat16:
        return round_stochastically(w, bits)
    return w.to(dtype)


def keeps_larger(numbers: Numbers) -> bool:
    """Tell whether an accumulator never decreases although squares are averaged."""
    return numbers.keep is not None and numbers.preset.keep_larger


class Skip:
    """Whether a step is to be skipped: known on the CPU, else decided on the device.

    Args:
        options: of the step.
        device: of the tensors that are written.
    """

    def __init__(self, options: Options, device: torch.device) -> None:
        self.known = False
        self._flag: Tensor | None = None
        if options.found_inf is None:
            return
        flag = options.found_inf.reshape(()) != 0
        if flag.device.type == "cpu" and not options.capturable:
            self.known = bool(flag)
        else:
            self._flag = flag.to(device)

    @property
    def undecided(self) -> bool:
        """Whether only the device knows."""
        return self._flag is not None

    def choose(self, old: Tensor, new: Tensor) -> Tensor:
        """Return what is to be written where ``old`` stands."""
        new = new.to(old.dtype)
        if self._flag is None:
            return new
        return torch.where(self._flag.to(old.device), old, new)

    def write(self, target: Tensor, value: Tensor) -> None:
        """Overwrite ``target``, unless the step is skipped."""
        target.copy_(value if self._flag is None else self.choose(target, value))
