# SPDX-License-Identifier: Apache-2.0
"""The outcome of a step, the same on every rank of every replica."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from torch_sm3.pipeline._collective import Collective
from torch_sm3.pipeline._control import Control
from torch_sm3.pipeline._faults import (
    ARGUMENTS,
    Failure,
    PeerFailedError,
    PipelineError,
    replica_note,
)

# Wrong arguments are raised on all ranks as what they are on one.
_ARGUMENT_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error for error in (ValueError, TypeError, RuntimeError)
}


class Verdict(NamedTuple):
    """What the rank of the last stage knows of a step.

    Attributes:
        loss: the loss of the step.
        losses: the loss of each microbatch.
        metrics: the dicts that ``loss_fn`` returned.
        total: what gradients are to be divided by, None if by nothing.
    """

    loss: torch.Tensor | None = None
    losses: torch.Tensor | None = None
    metrics: list[Any] | None = None
    total: float | None = None


class Ranked(NamedTuple):
    """A failure, the position of its action in the row, and its replica."""

    failure: Failure
    position: int
    replica: int

    @property
    def key(self) -> tuple[int, int, int, int, int]:
        """What decides which of several failures is reported."""
        first, position, replica = self
        return first.stage, first.microbatch, position, first.rank, replica


class Answer(NamedTuple):
    """How a step ended.

    Attributes:
        failures: all failures of the step, that of the least stage, microbatch and
            action first.
        lost_gradients: whether gradients of earlier steps went with a failed one.
        verdict: of a step that went well.
        total: sum of the totals of all replicas.
    """

    failures: list[Ranked]
    lost_gradients: bool
    verdict: Verdict
    total: float | None = None

    def error(self) -> Exception:
        """Return the error to raise; there must be a failure."""
        first, _, replica = self.failures[0]
        if first.action == ARGUMENTS and first.error_type in _ARGUMENT_ERRORS:
            return _ARGUMENT_ERRORS[first.error_type](first.message)
        note = replica_note(replica)
        if self.lost_gradients:
            note += "; gradients of earlier steps were lost with those of this one"
        others = tuple(str(other.failure) for other in self.failures[1:])
        return PipelineError(first, others, note, replica)


def settle(
    control: Control,
    replicas: Collective | None,
    report: tuple[tuple[Any, ...] | None, bool],
    verdict: Verdict | None,
    share: bool = True,
) -> Answer:
    """Decide the outcome; equal on every rank, in whatever order reports come.

    Args:
        control: to the ranks of this pipeline.
        replicas: the ranks with the same stages, or None.
        report: this rank's failure with the action's index, or None, and whether it
            held gradients before the step.
        verdict: on the rank of the last stage, if it did not fail.
        share: whether the others learn the losses.
    """
    told = verdict
    if verdict is not None and not share:
        told = Verdict(total=verdict.total)
    reports, heard = control.exchange(report, None if told is None else tuple(told))
    known = verdict or (Verdict() if heard is None else Verdict(*heard))
    return agreed(reports, replicas, known)


def agreed(
    reports: Iterable[tuple[tuple[Any, ...] | None, bool]],
    replicas: Collective | None,
    known: Verdict,
) -> Answer:
    """Decide the outcome of what all ranks of this pipeline reported.

    Args:
        reports: of each rank its failure and whether it held gradients.
        replicas: the ranks with the same stages, or None; then this is collective.
        known: of the rank of the last stage.
    """
    mine = 0 if replicas is None else replicas.rank
    reports = list(reports)
    failures = [
        Ranked(Failure(*failed[:-1]), failed[-1], mine)
        for failed, _ in reports
        if failed is not None
    ]
    held = any(had for _, had in reports)
    total = known.total
    if replicas is not None:
        word = replicas.total([float(bool(failures)), total or 0.0])
        total = None if total is None else word[1]
        if word[0]:
            found = replicas.gather(([tuple(f) for f in failures], held))
            failures = [
                Ranked(Failure(*f), *rest) for fs, _ in found for f, *rest in fs
            ]
            held = any(had for _, had in found)
    if failures:
        return Answer(_sorted(failures), held, Verdict())
    return Answer([], False, known, total)


def _sorted(failures: Iterable[Ranked]) -> list[Ranked]:
    """Order failures, those that only follow from others left out."""
    ranked = sorted(failures, key=lambda ranked: ranked.key)
    origins = [r for r in ranked if r.failure.error_type != PeerFailedError.__name__]
    return origins or ranked
