# SPDX-License-Identifier: Apache-2.0
"""Calls that step optimizers, and what a step may leave open for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.amp import GradScaler
from torch.optim.optimizer import Optimizer

from torch_sm3.pipeline._asked import ArgumentsError
from torch_sm3.pipeline._build import Parts
from torch_sm3.pipeline._calls import Calls
from torch_sm3.pipeline._faults import ARGUMENTS, PeerFailedError
from torch_sm3.pipeline._late import Bulletin, Open
from torch_sm3.pipeline._optimize import Stepper
from torch_sm3.pipeline._outcome import Verdict, settle
from torch_sm3.pipeline._result import OptimResult
from torch_sm3.pipeline._step import LOST
from torch_sm3.pipeline._work import StepWork


class Updates(Calls):
    """Steps optimizers, at once or validated later, and ends what steps left open.

    Args:
        parts: of the runner.

    Attributes:
        steps: steps that went well.
        stepper: steps optimizers.
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.steps = 0
        self.stepper = Stepper(parts)
        # The latest step, if it did not wait for the other ranks at its end.
        self._open: Open | None = None
        self._bulletin: Bulletin | None = None
        # Whether all ranks know that all validate their optimizer steps later.
        self._later = False

    def optimize(
        self,
        optimizer: Optimizer,
        max_norm: float | None,
        scaler: GradScaler | None,
        post_validate: bool,
    ) -> OptimResult:
        """Step this rank's optimizer as a part of that of all ranks.

        Args:
            optimizer: of this rank's parameters.
            max_norm: largest norm of all gradients, or None.
            scaler: that scaled the loss, or None.
            post_validate: whether to step first and ask the others later.
        """
        if self.stepper.pending:
            self.flush()

        def act(problem: Exception | None) -> tuple[OptimResult, bool]:
            return self.stepper.step(optimizer, max_norm, scaler, problem)

        if not post_validate:
            self._wait_again()
            self._hear_others()
            result: OptimResult = self._together(act)
            return result
        if not self._later:
            # Once, since a rank that steps at once hears nobody before it goes on.
            self._hear_others()
            self._together(
                lambda problem: self.stepper.compare(max_norm, scaler, problem)
            )
            self._later = True
        self._check_open()
        with self._alone() as problem:
            if problem is not None:
                raise problem
            self._announce(evaluation=False)
            step, self._open = self._open, None
            with self._watched(training=False):
                return self.stepper.step_first(optimizer, max_norm, scaler, step)

    def _wait_again(self) -> None:
        """Leave the way of steps that are validated later, as all others must.

        A rank that stays on it is in its next step already. Within a pipeline the
        links tell such a rank's message from what is due, see :meth:`Links.tell`.
        """
        self._check_open()
        if self._later and self._parts.replicas is not None:
            with self._alone(), self._watched(training=True):
                self.stepper.wait_again()
        self._later = False

    def flush(self) -> OptimResult | None:
        """End an optimizer step that was taken first, if there is one."""
        self._hear_others()
        if not self.stepper.pending:
            return None
        result = self._together(lambda problem: (self.stepper.validate()[0], False))
        self._raise_ended()
        return result

    def _together(self, act: Callable[[Exception | None], tuple[Any, bool]]) -> Any:
        """Do something on all ranks; where it fails on one, all raise.

        Args:
            act: is told why this rank cannot; returns a result, and whether all ranks
                are known to have done it.
        """
        parts = self._parts
        self._check_open()
        with self._alone() as busy:
            self._announce(evaluation=False)
            report: tuple[Any, ...] | None = None
            cause: BaseException | None = None
            result: Any = None
            with self._watched(training=False):
                try:
                    result, known = act(busy)
                    if known:
                        return result
                except LOST:
                    raise
                except ArgumentsError as wrong:
                    report = (*self._failure(ARGUMENTS, wrong.error), -1)
                except BaseException as error:
                    cause = error
                    report = (*self._failure("OPTIM", error), -1)
                verdict = Verdict() if parts.is_hub else None
                state = report, False
                answer = settle(parts.control, parts.replicas, state, verdict)
            if answer.failures:
                raise answer.error() from _origin(cause)
        return result

    def snapshots(self) -> list[tuple[int, int]]:
        """Return the bytes of each rank's last snapshot, and those with Adam's state.

        Collective. Empty if no rank has taken one.
        """
        validator = self.stepper.validator
        own = (validator.snapshot_bytes, validator.adam_bytes) if validator else (0, 0)
        with self._alone(), self._watched(training=False):
            self._announce(evaluation=False)
            found, _ = self._parts.control.exchange(own)
        return [tuple(each) for each in found] if any(map(any, found)) else []

    # --- steps that end early ----------------------------------------------

    def _hear_others(self) -> None:
        """End the latest step on all ranks, if it has not heard the others yet."""
        if self._open is None:
            return
        self._check_open()
        step, self._open = self._open, None
        with self._alone(), self._watched(training=True):
            self._announce(evaluation=False)
            parts = self._parts
            answer = settle(
                parts.control, parts.replicas, (step.report, step.held), None
            )
        if answer.failures:
            self.stepper.failed = answer, step.cause
        self._raise_ended()

    def _raise_ended(self) -> None:
        """Raise what went wrong in a step that had ended before this was known."""
        if self.stepper.failed is None:
            return
        (answer, cause), self.stepper.failed = self.stepper.failed, None
        self.steps -= 1
        self._parts.gradients.drop()
        first, _, replica = answer.failures[0]
        mine = first.rank == self._parts.rank and replica == self._parts.replica
        raise answer.error() from cause if mine else None

    def _validate(self, work: StepWork) -> bool:
        """End the optimizer step before; return whether this step is to begin anew."""
        wrong = self.stepper.validate()[1]
        if work.after_loss is not None and not wrong:
            # All losses may be there already, and have not been told yet.
            work.after_loss(work.losses)
        return wrong


def _origin(error: BaseException | None) -> BaseException | None:
    """Return an error if it is the rank's own."""
    return None if isinstance(error, PeerFailedError) else error
