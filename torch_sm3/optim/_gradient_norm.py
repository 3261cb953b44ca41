# SPDX-License-Identifier: Apache-2.0
"""The norm of all gradients, of which only one exists at a time."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.utils._foreach_utils import (
    _group_tensors_by_device_and_dtype,
    _has_foreach_support,
)

from torch_sm3.optim._placements import local
from torch_sm3.optim._scaling import nonfinite_in


class GradientNorm:
    """Collects what ``torch.nn.utils.clip_grad_norm_`` needs, with its bits.

    Args:
        looks_for_nonfinite: also flag elements that are NaN or infinite.
    """

    def __init__(self, looks_for_nonfinite: bool) -> None:
        self._norms: dict[Tensor, Tensor] = {}
        self._looks = looks_for_nonfinite
        #: Not 0 if an element was not finite; None without gradients.
        self.found: Tensor | None = None

    def add(self, param: Tensor) -> None:
        """Take the gradient of a parameter into account."""
        grad = param.grad
        assert grad is not None, "called when there is one"
        if _has_foreach_support([grad], grad.device):
            self._norms[param] = torch._foreach_norm([grad])[0]
        else:
            self._norms[param] = torch.linalg.vector_norm(grad)
        if self._looks:
            found = nonfinite_in([local(grad)], grad.device)
            old = self.found
            self.found = found if old is None else old + found.to(old.device)

    def total(self, order: Iterable[Tensor]) -> Tensor:
        """Return the norm of all gradients.

        Args:
            order: of the parameters, in which the norms are added.
        """
        norms = [self._norms[param] for param in order if param in self._norms]
        if not norms:
            return torch.tensor(0.0)
        first = norms[0].device
        groups = _group_tensors_by_device_and_dtype([[*norms]]).values()
        listed = [
            n.to(first) for ([group], _) in groups for n in group if n is not None
        ]
        total = torch.linalg.vector_norm(torch.stack(listed))
        # Of DTensors a sum over processes, which each use would repeat.
        return total.full_tensor() if hasattr(total, "full_tensor") else total
