# SPDX-License-Identifier: Apache-2.0
"""The outcome of a step, the same on every rank."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from torch_sm3.pipeline._batch import Batch
from torch_sm3.pipeline._faults import ARGUMENTS, Failure, PipelineError

# Wrong arguments are raised on all ranks as what they are on one.
_ARGUMENT_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error for error in (ValueError, TypeError, RuntimeError)
}


class Answer(NamedTuple):
    """What the rank of the last stage tells all others.

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
    def of(cls, reports: list[tuple[Any, bool]], batch: Batch) -> Answer:
        """Decide the outcome.

        Args:
            reports: of each rank its failure with the action's index, or None, and
                whether it held gradients before the step.
            batch: the losses.
        """
        failed = [(Failure(*r[:-1]), int(r[-1])) for r, _ in reports if r is not None]
        failed.sort(key=lambda f: (f[0].stage, f[0].microbatch, f[1], f[0].rank))
        if failed:
            held = any(had for _, had in reports)
            return cls([failure for failure, _ in failed], held, None, None)
        return cls([], False, *batch.reduced())

    def packed(self) -> tuple[Any, ...]:
        """Return the answer as a value that travels."""
        failures = tuple(tuple(failure) for failure in self.failures)
        return failures, self.lost_gradients, self.loss, self.losses

    @classmethod
    def read(cls, value: tuple[Any, ...]) -> Answer:
        """Read what :meth:`packed` wrote."""
        failures, lost_gradients, loss, losses = value
        return cls([Failure(*f) for f in failures], lost_gradients, loss, losses)

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
