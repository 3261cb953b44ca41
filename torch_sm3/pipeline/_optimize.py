# SPDX-License-Identifier: Apache-2.0
"""The optimizer's step of a rank: with all ranks at once, or validated later."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.amp import GradScaler
from torch.optim.optimizer import Optimizer

from torch_sm3.pipeline._asked import (
    MIXED,
    ArgumentsError,
    asked_for,
    check_alike,
    unlike_arguments,
    wrong_arguments,
)
from torch_sm3.pipeline._build import Parts
from torch_sm3.pipeline._faults import PeerFailedError
from torch_sm3.pipeline._late import Open
from torch_sm3.pipeline._outcome import Answer, Verdict, agreed
from torch_sm3.pipeline._precision import (
    Decision,
    apply,
    factor_of,
    forget,
    judged,
    record,
    shrink,
    squares,
    unscale,
    unscaled,
)
from torch_sm3.pipeline._result import OptimResult
from torch_sm3.pipeline.validate import PostValidator


class _Pending(NamedTuple):
    """A step that was taken and is still to be validated."""

    validator: PostValidator
    scaler: GradScaler | None
    scaler_state: dict[str, Any]
    max_norm: float | None
    value: tuple[Any, ...]
    tickets: list[int]
    problem: BaseException | None
    step: Open | None


class Stepper:
    """Steps the optimizers of a runner.

    Args:
        parts: of the runner.

    Attributes:
        loss_scale: the scale after the last step with a scaler.
        validator: of the last step that was validated later.
        failed: the failures of a step that had ended without hearing the other ranks,
            with this rank's own cause, once :meth:`validate` has heard of them.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._pending: _Pending | None = None
        self.loss_scale: float | None = None
        self.validator: PostValidator | None = None
        self.failed: tuple[Answer, BaseException | None] | None = None

    @property
    def pending(self) -> bool:
        """Whether a step is still to be validated; alike on all ranks."""
        return self._pending is not None

    def step(
        self,
        optimizer: Optimizer,
        max_norm: float | None,
        scaler: GradScaler | None,
        problem: BaseException | None,
    ) -> tuple[OptimResult, bool]:
        """Step as all ranks decide. Collective.

        Args:
            optimizer: of this rank's parameters.
            max_norm: largest norm of all gradients, or None.
            scaler: that scaled the loss, or None.
            problem: why this rank cannot step.

        Returns:
            What became of it, and whether all ranks know of each other that they
            stepped; otherwise the last word is still to be had.

        Raises:
            ArgumentsError: if the arguments are wrong, or other than elsewhere.
            PeerFailedError: if another rank failed.
        """
        wrong = wrong_arguments(optimizer, max_norm)
        problem = problem or (None if wrong is None else ArgumentsError(wrong))
        asked = asked_for(max_norm, scaler, post_validate=False)
        plain = max_norm is None and scaler is None
        found, sums = False, None
        try:
            if problem is None and plain:
                optimizer.step()
            elif problem is None:
                found, sums = self._measure(optimizer, max_norm, scaler)
        except BaseException as error:
            problem = error
        value = problem is not None, found, tuple(sums or ()), None, False, asked
        decision, unlike = self._decide(value)
        if decision.stop:
            if scaler is not None:
                forget(scaler, optimizer)
            if unlike is not None:
                raise ArgumentsError(unlike)
            raise problem or PeerFailedError("the optimizer of another rank failed")
        if plain:
            return OptimResult(True, None), True
        shrink(self._parts.gradients.parameters(), factor_of(decision, max_norm))
        apply(optimizer, scaler, decision.skip)
        return self._result(decision, scaler), False

    def compare(
        self,
        max_norm: float | None,
        scaler: GradScaler | None,
        problem: BaseException | None,
    ) -> tuple[None, bool]:
        """Learn that all ranks are to step first. Collective, as is :meth:`step`.

        Args:
            max_norm: largest norm of all gradients, or None.
            scaler: that scaled the loss, or None.
            problem: why this rank cannot step.

        Returns:
            Nothing, and that all ranks know of each other.

        Raises:
            ArgumentsError: if the arguments are other than elsewhere.
            PeerFailedError: if another rank cannot step.
        """
        asked = asked_for(max_norm, scaler, post_validate=True)
        value = problem is not None, False, (), None, False, asked
        decision, unlike = self._decide(value)
        if unlike is not None:
            raise ArgumentsError(unlike)
        if decision.stop:
            raise problem or PeerFailedError("the optimizer of another rank failed")
        return None, True

    def _decide(self, value: tuple[Any, ...]) -> tuple[Decision, ValueError | None]:
        """Ask all ranks of all replicas what they found and were asked for.

        Args:
            value: of this rank.
        """
        values, _ = self._parts.control.exchange(value)
        unlike, norm = unlike_arguments(values), value[-1][0]
        decision = judged(
            values, self._parts.replicas, norm is not None, unlike is not None
        )
        if decision.mixed and unlike is None:
            unlike = ValueError(MIXED)
        return decision, unlike

    def wait_again(self) -> None:
        """Learn that all replicas step together again. Collective over replicas.

        Raises:
            GroupLostError: if another replica goes on validating later. It is in its
                next step, where it hears of this; the calls do not meet any more.
        """
        value = (
            False,
            False,
            (),
            None,
            False,
            asked_for(None, None, post_validate=False),
        )
        check_alike(judged([value], self._parts.replicas, False, False))

    def step_first(
        self,
        optimizer: Optimizer,
        max_norm: float | None,
        scaler: GradScaler | None,
        step: Open | None,
    ) -> OptimResult:
        """Step as if nothing had to be clipped or skipped, and begin to ask.

        Args:
            optimizer: of this rank's parameters.
            max_norm: largest norm of all gradients, or None.
            scaler: that scaled the loss, or None.
            step: the one before, if it has not heard the other ranks yet.
        """
        if self.validator is None or self.validator.optimizer is not optimizer:
            self.validator = PostValidator(optimizer)
        found, sums = False, None
        problem: BaseException | None = wrong_arguments(optimizer, max_norm)
        state: dict[str, Any] = {}
        failed = step is not None and step.failed
        try:
            if not failed and problem is None:
                found, sums = self._measure(optimizer, max_norm, scaler)
                self.validator.step(apply=not found)
                if scaler is not None and scaler.is_enabled():
                    state = scaler.state_dict()
                    record(optimizer, scaler, skip=False)
                    scaler.update()
        except BaseException as error:
            problem = error
        stop = failed or problem is not None
        how = (None, False) if step is None else (step.report, step.held)
        asked = asked_for(max_norm, scaler, post_validate=True)
        value = stop, found, tuple(sums or ()), *how, asked
        tickets = self._parts.control.post(value)
        self._pending = _Pending(
            self.validator, scaler, state, max_norm, value, tickets, problem, step
        )
        return OptimResult(True, None)

    def validate(self) -> tuple[OptimResult | None, bool]:
        """End the step that was taken first. Collective.

        Returns:
            What became of it, and whether it was wrong: then it has been done again,
            or ``failed`` says why there was nothing to do.

        Raises:
            Exception: the optimizer's own, if it failed here.
            PeerFailedError: if it failed on another rank.
            GroupLostError: if another replica steps at once again.
        """
        if self._pending is None:
            return None, False
        pending, self._pending = self._pending, None
        values = self._parts.control.complete(pending.value, pending.tickets)
        unlike = unlike_arguments(values)
        decision = judged(
            values,
            self._parts.replicas,
            pending.max_norm is not None,
            unlike is not None,
        )
        check_alike(decision)
        factor = factor_of(decision, pending.max_norm)
        if decision.stop:
            self._stop(pending, values, unlike)
            return None, True
        if not decision.skip and factor == 1:
            pending.validator.confirm()
            return self._result(decision, pending.scaler), False
        scaler, optimizer = pending.scaler, pending.validator.optimizer
        with pending.validator.taken_back():
            if scaler is not None and pending.scaler_state:
                scaler.load_state_dict(pending.scaler_state)
                unscaled(scaler, optimizer)
            shrink(self._parts.gradients.parameters(), factor)
            apply(optimizer, scaler, decision.skip)
        return self._result(decision, scaler), True

    def _stop(
        self, pending: _Pending, values: list[Any], unlike: Exception | None
    ) -> None:
        """Take a step back that must not be, since a rank failed in it or before it.

        Raises:
            Exception: the optimizer's own, if it failed here.
            PeerFailedError: if it failed on another rank.
        """
        replicas = self._parts.replicas
        answer = agreed([value[3:5] for value in values], replicas, Verdict())
        scaler, validator = pending.scaler, pending.validator
        if validator.pending:
            with validator.taken_back():
                pass
        if scaler is not None:
            if pending.scaler_state:
                scaler.load_state_dict(pending.scaler_state)
            forget(scaler, validator.optimizer)
        if answer.failures:
            own = None if pending.step is None else pending.step.cause
            self.failed = answer, own
            return
        failed = PeerFailedError("the optimizer of another rank failed")
        raise unlike or pending.problem or failed

    def _measure(
        self, optimizer: Optimizer, max_norm: float | None, scaler: GradScaler | None
    ) -> tuple[bool, list[tuple[int, float]] | None]:
        """Unscale; return whether there is an infinity here, and sums of squares."""
        found, sums = False, None
        if scaler is not None:
            found = unscale(scaler, optimizer)
        if max_norm is not None:
            gradients = self._parts.gradients
            sums = squares(self._parts.stages, gradients.counted_elsewhere())
        return found, sums

    def _result(self, decision: Decision, scaler: GradScaler | None) -> OptimResult:
        if scaler is not None and scaler.is_enabled():
            self.loss_scale = scaler.get_scale()
        return OptimResult(not decision.skip, decision.norm)
