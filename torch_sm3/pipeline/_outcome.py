# SPDX-License-Identifier: Apache-2.0
"""The outcome of a step, the same on every rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from torch_sm3.pipeline._faults import ARGUMENTS, Failure, PipelineError

# Wrong arguments are raised on all ranks as what they are on one.
_ARGUMENT_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error for error in (ValueError, TypeError, RuntimeError)
}


class Answer(NamedTuple):
    """How a step ended.

    Attributes:
        failures: all failures of the step, that of the least stage, microbatch and
            action first.
        lost_gradients: whether gradients of earlier steps went with a failed one.
        loss: the loss of the step.
        losses: the loss of each microbatch.
    """

    failures: list[Failure]
    lost_gradients: bool
    loss: torch.Tensor | None
    losses: torch.Tensor | None

    @classmethod
    def of(
        cls,
        reports: Iterable[tuple[Any, bool]],
        loss: torch.Tensor | None,
        losses: torch.Tensor | None,
    ) -> Answer:
        """Decide the outcome; equal on every rank, in whatever order reports come.

        Args:
            reports: of each rank its failure with the action's index, or None, and
                whether it held gradients before the step.
            loss: the loss of the step.
            losses: the loss of each microbatch.
        """
        reports = list(reports)
        failed = [(Failure(*r[:-1]), int(r[-1])) for r, _ in reports if r is not None]
        failed.sort(key=lambda f: (f[0].stage, f[0].microbatch, f[1], f[0].rank))
        if failed:
            held = any(had for _, had in reports)
            return cls([failure for failure, _ in failed], held, None, None)
        return cls([], False, loss, losses)

    def error(self) -> Exception:
        """Return the error to raise; there must be a failure."""
        first = self.failures[0]
        if first.action == ARGUMENTS and first.error_type in _ARGUMENT_ERRORS:
            return _ARGUMENT_ERRORS[first.error_type](first.message)
        note = (
            "; gradients of earlier steps were lost with those of this one"
            if self.lost_gradients
            else ""
        )
        others = tuple(str(failure) for failure in self.failures[1:])
        return PipelineError(first, others, note)
