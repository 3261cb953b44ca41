# SPDX-License-Identifier: Apache-2.0
"""The learning rate schedule of SM3's authors: a power, then constant."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer


def _expect(condition: bool, expected: str, value: object, name: str) -> None:
    if not condition:
        raise ValueError(
            f"WarmupConstantLR: expected {expected}, but got {value} "
            f"(argument {name!r})"
        )


class WarmupConstantLR(LRScheduler):
    r"""Raises the learning rate by a power, holds it, and may let it fall at the end.

    For step :math:`t = 1, 2, \dots` the base learning rate is multiplied by

    .. math::
        \min\bigl(1, (t / W)^p\bigr) \cdot
        \begin{cases}
        1 & t \le T - C \\
        (T - t + 1) / C & T - C < t \le T \\
        0 & t > T
        \end{cases}

    with :math:`W` warm-up steps, power :math:`p`, :math:`T` steps in all and
    :math:`C = \mathrm{round}(\text{cooldown\_fraction} \cdot T)`, so no step is spent
    at learning rate 0. The sum of squares in SM3 lowers its steps by itself: about 5 %
    of the steps of warm-up and a constant rate after it are enough, and a cool-down of
    10 % can help.

    Args:
        optimizer: any optimizer; learning rate tensors are written in place.
        warmup_steps: :math:`W`, 0 for none.
        power: :math:`p`.
        total_steps: :math:`T`, None for no end.
        cooldown_fraction: share of ``total_steps`` in which the rate falls.
        last_epoch: steps done by an earlier run, less one; -1 to begin.

    Raises:
        ValueError: for numbers out of their range, a fraction without
            ``total_steps``, or a warm-up that overlaps the cool-down.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = torch_sm3.SM3([weight], lr=1.0)
        >>> scheduler = torch_sm3.WarmupConstantLR(optimizer, warmup_steps=4)
        >>> rates = []
        >>> for _ in range(5):
        ...     rates += scheduler.get_last_lr()
        ...     optimizer.step()
        ...     scheduler.step()
        >>> rates
        [0.0625, 0.25, 0.5625, 1.0, 1.0]

    Source: appendix of Anil, Gupta, Koren, Singer, "Memory-Efficient Adaptive
    Optimization", arXiv 1901.11150, which uses a quadratic warm-up.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_steps: int,
        *,
        power: float = 2.0,
        total_steps: int | None = None,
        cooldown_fraction: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        _expect(warmup_steps >= 0, "a count >= 0", warmup_steps, "warmup_steps")
        _expect(power > 0, "a number > 0", power, "power")
        fraction = cooldown_fraction
        _expect(0 <= fraction < 1, "a share in [0, 1)", fraction, "cooldown_fraction")
        _expect(
            total_steps is not None or fraction == 0,
            "a count with cooldown_fraction > 0",
            total_steps,
            "total_steps",
        )
        # Halves go up, as in C++.
        cooldown = 0 if total_steps is None else int(fraction * total_steps + 0.5)
        _expect(
            total_steps is None or warmup_steps + cooldown <= total_steps,
            f"at least {warmup_steps} warm-up + {cooldown} cool-down steps",
            total_steps,
            "total_steps",
        )
        self.warmup_steps = warmup_steps
        self.power = power
        self.total_steps = total_steps
        self.cooldown_steps = cooldown
        super().__init__(optimizer, last_epoch)

    def factor(self, t: int) -> float:
        """Return what step ``t`` multiplies the base learning rate by.

        Args:
            t: count of the step, from 1.
        """
        factor = 1.0
        if t < self.warmup_steps:
            factor = (t / self.warmup_steps) ** self.power
        if self.total_steps is None or t <= self.total_steps - self.cooldown_steps:
            return factor
        if t > self.total_steps:
            return 0.0
        return factor * ((self.total_steps - t + 1) / self.cooldown_steps)

    def get_lr(self) -> list[Any]:
        """Return the learning rates of the step to come, one for each group."""
        factor = self.factor(self.last_epoch + 1)
        return [base * factor for base in self.base_lrs]

    # For ``step(epoch)``, which torch still accepts.
    _get_closed_form_lr = get_lr
