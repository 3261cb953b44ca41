# SPDX-License-Identifier: Apache-2.0
"""Loss scaling by torch's GradScaler, for gradients that come layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class Scale:
    """The loss scale of one step.

    The scaler sees one flag in place of all gradients: it asks for them at once, and
    they are never there at once.

    Args:
        scaler: a ``torch.amp.GradScaler``; None, or one that is disabled, scales
            nothing.
        device: of the gradients.
    """

    def __init__(self, scaler: Any, device: torch.device) -> None:
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._found = torch.zeros((), device=device)
        self._factor: Tensor | None = None
        if self._scaler is not None:
            one = torch.ones((), device=device)
            self._factor = self._scaler.scale(one)

    @property
    def is_on(self) -> bool:
        """Whether gradients are scaled."""
        return self._factor is not None

    def cotangent(self, loss: Tensor, weight: float) -> Tensor:
        """Return the gradient of what is minimised with respect to a loss.

        Args:
            loss: of one microbatch.
            weight: of the microbatch in the mean.
        """
        result = torch.full_like(loss, weight)
        return result if self._factor is None else result * self._factor.to(loss.dtype)

    def unscale(self, grads: Sequence[Tensor]) -> None:
        """Divide gradients by the scale, in place, and note non-finite values."""
        if self._factor is None:
            return
        inverse = self._factor.double().reciprocal().float()
        groups: dict[torch.dtype, list[Tensor]] = {}
        for grad in grads:
            values = grad._values() if grad.is_sparse else grad
            groups.setdefault(values.dtype, []).append(values)
        for group in groups.values():
            # What GradScaler.unscale_ itself calls.
            torch._amp_foreach_non_finite_check_and_unscale_(
                group, self._found, inverse
            )

    def finish(self, agree: Callable[[Tensor], Tensor]) -> bool:
        """Tell the scaler what was found, once a step.

        Args:
            agree: returns the largest of all ranks' flags.

        Returns:
            Whether the step is to be skipped.
        """
        if self._scaler is None:
            return False
        found = agree(self._found)
        flag = torch.zeros_like(found).requires_grad_()
        flag.grad = torch.where(found > 0, torch.inf, 0.0).to(found)
        self._scaler.step(torch.optim.SGD([flag], lr=0.0))
        self._scaler.update()
        return bool(found)
