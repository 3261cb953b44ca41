# SPDX-License-Identifier: Apache-2.0
"""One step, eval or optimizer step after the other, and how each ends."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch.amp import GradScaler

from torch_sm3.pipeline._asked import wrong_scaler
from torch_sm3.pipeline._attempts import Attempts
from torch_sm3.pipeline._data import Feed, count_of
from torch_sm3.pipeline._given import Given, check_kwargs
from torch_sm3.pipeline._loss import Losses, guarded
from torch_sm3.pipeline._outcome import Answer
from torch_sm3.pipeline._random import kept
from torch_sm3.pipeline._result import StepResult
from torch_sm3.pipeline._step import StepRun
from torch_sm3.pipeline._work import Seeds, StepWork
from torch_sm3.pipeline.schedule import Action
from torch_sm3.pipeline.trace import Trace


class Session(Attempts):
    """Runs what the face asks for and knows what became of it."""

    def trace(self, everywhere: bool) -> Trace | None:
        """Bring what all ranks recorded together.

        Args:
            everywhere: whether all ranks get it, not only rank 0.
        """
        self._check_open()
        self._tracing.check()
        self._hear_others()
        with self._alone() as problem, self._watched(training=False):
            self._announce(evaluation=False)
            trace = self._tracing.collect(everywhere)
        if problem is not None:
            raise problem
        return trace

    def timings(self) -> list[tuple[Action, float, float]]:
        """Return how long the actions of the latest step waited and ran."""
        return self._tracing.latest()

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear the gradients of this rank's stages."""
        for stage in self._parts.stages.values():
            stage.module.zero_grad(set_to_none)

    def evaluate(self, given: Given, keep: bool) -> StepResult:
        """Run forwards only.

        Args:
            given: the data.
            keep: whether to keep the outputs.
        """
        if self.stepper.pending:
            self.flush()
        with torch.no_grad(), kept(self._parts.devices):
            return self.run(given, keep, None, evaluation=True)

    def run(
        self, given: Given, keep: bool, scaler: GradScaler | None, evaluation: bool
    ) -> StepResult:
        """Run a step or an eval.

        Args:
            given: the data.
            keep: whether to keep the outputs.
            scaler: scales the loss, or None.
            evaluation: whether it is an eval.
        """
        parts = self._parts
        self._check_open()
        self._hear_others()
        if not evaluation and not parts.training:
            raise RuntimeError(
                "step: expected a schedule with backwards, but got kind forward; "
                "call eval instead"
            )
        with self._alone() as problem:
            self._announce(evaluation)
            count = parts.microbatches
            if evaluation:
                count, wrong = self._count(given)
                problem = problem or wrong
            work = self._work(scaler, evaluation)
            try:
                if problem is not None:
                    raise problem
                self._fill(work, given, scaler, count, evaluation)
                work.losses = self._losses(work, count, keep)
            except Exception as error:
                if parts.links is None and parts.replicas is None:
                    raise
                problem = error
            with self._watched(not evaluation):
                run, answer = self._attempts(work, problem, evaluation, count, keep)
            self._raise_ended()
            if answer.failures:
                if not evaluation:
                    parts.gradients.drop()
                problem = None
                _raise(answer, run)
        self.steps += not evaluation
        return self._result(answer, work.losses, evaluation)

    def _work(self, scaler: GradScaler | None, evaluation: bool) -> StepWork:
        parts = self._parts
        return StepWork(
            parts.stages,
            len(parts.placement) - 1,
            parts.gradients,
            scaler,
            self._seeds(evaluation),
            self._validate,
        )

    def _fill(
        self,
        work: StepWork,
        given: Given,
        scaler: GradScaler | None,
        count: int,
        evaluation: bool,
    ) -> None:
        """Check and cut what this rank uses; a wrong argument stops all ranks."""
        parts, options = self._parts, self._options
        if not evaluation and not torch.is_grad_enabled():
            raise RuntimeError(
                "step: expected gradients to be on, but got torch.no_grad(); call "
                "eval for a forward without gradients"
            )
        check_kwargs(given.kwargs, parts.kwargs)
        if (wrong := wrong_scaler("step", scaler)) is not None:
            raise wrong
        work.feed = Feed(given, parts.needs, count, options.batch_dim, not evaluation)
        work.feed.replays = self.stepper.pending

    def _result(self, answer: Answer, losses: Losses, evaluation: bool) -> StepResult:
        known = answer.verdict
        counted = self._options.loss_reduction == "tokens" and answer.total is not None
        loss, each = known.loss, known.losses
        if not evaluation:
            loss, each = guarded(loss, each)
        return StepResult(
            loss,
            each,
            losses.outputs,
            int(answer.total or 0) if counted else None,
            known.metrics,
        )

    def _count(self, given: Given) -> tuple[int, Exception | None]:
        """Agree on the number of microbatches of an eval; stage 0's rank decides.

        Returns:
            The number, and why this rank cannot go on with it.
        """
        parts, problem = self._parts, None
        own: int | None = None
        try:
            own = count_of(
                given, parts.needs, parts.microbatches, self._options.batch_dim
            )
        except Exception as error:
            problem = error
        count = own or parts.microbatches
        if parts.links is None:
            return count, problem
        with self._watched(training=False):
            heard = parts.control.announce(count, parts.placement)
        if problem is None and own not in (None, heard):
            problem = ValueError(
                f"eval: expected {heard} microbatches as on the rank of stage 0, but "
                f"got {own} (argument 'targets')"
            )
        return heard, problem

    def _seeds(self, evaluation: bool) -> Seeds | None:
        if not self._options.deterministic:
            return None
        return Seeds(self._options.seed, self.steps, evaluation, self._parts.devices)


def _raise(answer: Answer, run: StepRun) -> NoReturn:
    """Raise the error of a step; what was raised on this rank is its cause.

    An exception holds its frames. None of these may hold it, or the batch would stay
    until a garbage collection.
    """
    cause, run.cause = run.cause_of(answer.failures[0].failure), None
    raise answer.error() from cause
