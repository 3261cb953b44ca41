# SPDX-License-Identifier: Apache-2.0
"""Runs through the rows of a step, until one of them counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_sm3.pipeline._agree import Options
from torch_sm3.pipeline._build import Parts
from torch_sm3.pipeline._faults import ARGUMENTS
from torch_sm3.pipeline._late import Bulletin, Open, verdict_of
from torch_sm3.pipeline._loss import Losses
from torch_sm3.pipeline._outcome import Answer, settle
from torch_sm3.pipeline._random import Surroundings
from torch_sm3.pipeline._rows import with_validation
from torch_sm3.pipeline._step import StepRun
from torch_sm3.pipeline._tracing import Tracing
from torch_sm3.pipeline._updates import Updates
from torch_sm3.pipeline._work import StepWork


class Attempts(Updates):
    """Runs a step, and again where the optimizer step before it was wrong.

    Args:
        parts: of the runner.
        options: of the runner.
        loss_fn: of the last stage.
    """

    def __init__(
        self, parts: Parts, options: Options, loss_fn: Callable[[Any, Any], Any] | None
    ) -> None:
        super().__init__(parts)
        self._tracing = Tracing(parts, options.trace, options.max_pending)
        self._options = options
        self._loss_fn = loss_fn

    def _losses(self, work: StepWork, count: int, keep: bool) -> Losses:
        options = self._options
        return Losses(
            self._loss_fn,
            options.loss_reduction,
            options.batch_dim,
            count,
            work.feed.targets,
            keep and self._parts.is_hub,
        )

    def _attempts(
        self,
        work: StepWork,
        problem: Exception | None,
        evaluation: bool,
        count: int,
        keep: bool,
    ) -> tuple[StepRun, Answer]:
        """Run once, and again where the optimizer step before was wrong."""
        parts = self._parts
        before = self._surroundings() if self.stepper.pending else None
        early = before is not None and parts.links is not None
        while True:
            self._bulletin = None
            if early:
                self._bulletin = Bulletin(
                    parts, self._options.share_loss, lambda: self.stepper.pending
                )
            run = StepRun(parts.machines, not evaluation, self._tracing.of(evaluation))
            run.work = work
            if problem is not None:
                run.fail(self._failure(ARGUMENTS, problem), -1, problem)
            answer = self._go(run, work, evaluation, count)
            if answer is None and self.stepper.failed is not None:
                answer = self.stepper.failed[0]
            if answer is not None:
                return run, answer
            assert before is not None, "only a pending step begins anew"
            before.restore()
            self._announce(evaluation)
            if problem is None:
                work.losses = self._losses(work, count, keep)

    def _go(
        self, run: StepRun, work: StepWork, evaluation: bool, count: int
    ) -> Answer | None:
        """Run the row and bring all ranks to one outcome; None to begin anew."""
        parts = self._parts
        gradients = parts.gradients
        held = not evaluation and gradients.present()
        row = parts.forward_row(count) if evaluation else parts.row
        bulletin = self._bulletin
        if bulletin is not None and parts.is_hub and not run.failed:
            work.after_loss = bulletin.publish
        if not evaluation:
            gradients.begin()
        own = with_validation(row) if self.stepper.pending else row
        run.run(own)
        if run.anew:
            gradients.restore()
            return None
        if self._tracing.of(evaluation):
            self._tracing.add(self._calls, own, run)
        if not evaluation:
            gradients.agree()
            run.attempt(self._failure("REDUCE_GRAD", None), len(row), gradients.wait)
        if bulletin is not None and (early := bulletin.answer()) is not None:
            self._open = Open(run.report(), held, run.failed, run.cause)
            if run.failed:
                gradients.drop()
            else:
                gradients.finish(self._divisor(early))
            return early
        verdict = None
        if parts.is_hub and not run.failed:
            verdict = verdict_of(work.losses)
        answer = settle(
            parts.control,
            None if evaluation else parts.replicas,
            (run.report(), held),
            verdict,
            self._options.share_loss,
        )
        if not evaluation and not answer.failures:
            gradients.finish(self._divisor(answer))
        return answer

    def _divisor(self, answer: Answer) -> float | None:
        """Return what gradients are to be divided by, None if by nothing."""
        if self._options.loss_reduction == "tokens":
            assert answer.total is not None, "a step has a loss"
            return answer.total / self._parts.shrink
        return answer.verdict.total

    def _surroundings(self) -> Surroundings:
        modules = [stage.module for stage in self._parts.stages.values()]
        return Surroundings(modules, self._parts.devices)
