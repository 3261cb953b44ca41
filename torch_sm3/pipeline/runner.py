# SPDX-License-Identifier: Apache-2.0
"""Run a schedule: forward, backward, messages, losses and failures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from torch_sm3.pipeline._agree import Options, agree, forward_of, steps_of
from torch_sm3.pipeline._batch import Batch, cut, weights
from torch_sm3.pipeline._faults import (
    ARGUMENTS,
    Failure,
    LinksLostError,
    PipelineError,
    lost_error,
)
from torch_sm3.pipeline._links import Links, new_group
from torch_sm3.pipeline._outcome import Answer
from torch_sm3.pipeline._step import StepRun
from torch_sm3.pipeline.schedule import Schedule
from torch_sm3.pipeline.stage import Stage


@dataclass
class StepResult:
    r"""Hold what a step or an eval gave.

    Attributes:
        loss: the loss after ``loss_reduction``, a scalar tensor of equal bits on
            every rank; None without ``loss_fn``.
        losses: the loss of each microbatch, on every rank; None without ``loss_fn``.
        outputs: the last stage's output for each microbatch, detached, on the rank
            of the last stage and if ``return_outputs`` was set; otherwise None.
    """

    loss: torch.Tensor | None
    losses: torch.Tensor | None
    outputs: list[Any] | None


class PipelineRunner:
    r"""Run a schedule over the ranks of a process group.

    Making a runner is collective: every rank passes the stages that it owns, and all
    compare schedule and options. The messages travel in a Gloo group of its own.

    .. math::
        L = \frac{1}{m} \sum_i \ell_i \;(\text{mean}), \qquad
        L = \sum_i \frac{n_i}{n} \ell_i \;(\text{samples}), \qquad
        L = \sum_i \ell_i \;(\text{sum})

    Gradients are those of :math:`L`, added up in microbatch order; they have the bits
    of one process that runs the same microbatches in turn.

    Args:
        stages: the stages of this rank.
        schedule: what every rank does; messages are added if it has none.
        group: the ranks, all of them if None; used at construction only.
        loss_fn: ``loss_fn(output, target)`` on the last stage, a scalar tensor.
        loss_reduction: ``mean``, ``samples`` or ``sum``.
        batch_dim: dimension along which batches are cut.
        timeout: longest wait for one message, in seconds, whatever the group's is.
        max_pending: sends of one link and class that may be under way at once.

    Raises:
        ValueError: the same on all ranks, if the stages, the schedule or an option do
            not fit.
        ScheduleError: if the ranks hold different schedules, or one that cannot run.

    Example::

        >>> import torch
        >>> from torch_sm3.pipeline import PipelineRunner, Stage, plan
        >>> _ = torch.manual_seed(0)
        >>> stage = Stage(torch.nn.Linear(4, 1), index=0)
        >>> runner = PipelineRunner(
        ...     [stage], plan("none", ranks=1, microbatches=3),
        ...     loss_fn=torch.nn.functional.mse_loss, loss_reduction="samples",
        ... )
        >>> x, y = torch.randn(8, 4), torch.randn(8, 1)
        >>> result = runner.step(x, target=y)
        >>> whole = torch.nn.functional.mse_loss(stage.module(x), y)
        >>> torch.testing.assert_close(result.loss, whole.detach())
        >>> runner.close()

    1F1B: Narayanan et al., 2021, https://arxiv.org/abs/2104.04473.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        schedule: Schedule,
        *,
        group: dist.ProcessGroup | None = None,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
        loss_reduction: str = "mean",
        batch_dim: int = 0,
        timeout: float = 60.0,
        max_pending: int = 2,
    ) -> None:
        if not isinstance(schedule, Schedule):
            raise TypeError(
                "PipelineRunner: expected a Schedule, but got "
                f"{type(schedule).__name__} (argument 'schedule')"
            )
        options = Options(loss_reduction, batch_dim, timeout, max_pending)
        distributed = dist.is_available() and dist.is_initialized()
        size = dist.get_world_size(group) if distributed else 1
        own_group = new_group(group, timeout) if size > 1 else None
        self._rank = dist.get_rank(own_group) if own_group is not None else 0
        try:
            lowered = agree(
                own_group, self._rank, size, stages, schedule, loss_fn, options
            )
        except BaseException:
            if own_group is not None:
                dist.destroy_process_group(own_group)
            raise
        self._placement = schedule.placement
        self._microbatches = schedule.microbatches
        self._actions = steps_of(lowered, self._rank)
        self._training = any(op == "B" for op, _, _ in self._actions)
        self._eval_actions = steps_of(forward_of(schedule).lower(), self._rank)
        self._modules = {stage.index: stage.module for stage in stages}
        self._loss_fn = loss_fn
        self._options = options
        self._hub = self._placement[-1]
        self._peers = [rank for rank in range(size) if rank != self._rank]
        self._steps = 0
        self._closed = False
        self._lost: Failure | None = None
        self._links: Links | None = None
        if own_group is not None:
            first = [self._placement.index(rank) for rank in range(size)]
            self._links = Links(own_group, timeout, max_pending, self._hub, first)

    def step(
        self, *inputs: Any, target: Any = None, return_outputs: bool = False
    ) -> StepResult:
        r"""Run forward and backward of one batch; gradients are added to ``.grad``.

        Args:
            *inputs: arguments of stage 0, whole batches that are cut along
                ``batch_dim``; ranks that do not hold stage 0 ignore them.
            target: second argument of ``loss_fn``, cut in the same way; ranks that do
                not hold the last stage ignore it.
            return_outputs: keep the last stage's outputs.

        Returns:
            The loss, equal on every rank.

        Raises:
            PipelineError: on every rank and with equal fields, if any of them fails;
                then every ``.grad`` of the stages is None.
            ValueError: on every rank, if the batch does not fit.
            RuntimeError: if the schedule has no backwards, or gradients are off.
        """
        return self._run(inputs, target, return_outputs, evaluation=False)

    def eval(
        self, *inputs: Any, target: Any = None, return_outputs: bool = False
    ) -> StepResult:
        r"""Run the forwards of one batch without gradients.

        Args:
            *inputs: as for :meth:`step`.
            target: as for :meth:`step`; without it there is no loss.
            return_outputs: keep the last stage's outputs.

        Returns:
            The loss, equal on every rank.

        Raises:
            PipelineError: on every rank and with equal fields, if any of them fails.
            ValueError: on every rank, if the batch does not fit.
        """
        with torch.no_grad():
            return self._run(inputs, target, return_outputs, evaluation=True)

    def close(self) -> None:
        r"""End the links and give the process group back. Idempotent."""
        self._closed = True
        if self._links is not None:
            self._links.close()

    # --- one run -----------------------------------------------------------

    def _run(
        self, inputs: tuple[Any, ...], target: Any, keep: bool, evaluation: bool
    ) -> StepResult:
        if self._closed:
            raise RuntimeError(
                "PipelineRunner: expected an open runner, but got close()"
            )
        if self._lost is not None:
            raise lost_error(self._lost)
        if not evaluation and not self._training:
            raise RuntimeError(
                "step: expected a schedule with backwards, but got kind forward; "
                "call eval instead"
            )
        self._steps += 1
        if self._links is not None:
            self._links.begin(self._steps, evaluation)
        had_gradients = not evaluation and any(
            parameter.grad is not None for parameter in self._parameters()
        )
        run = StepRun(
            self._rank, self._placement, self._modules, self._links, not evaluation
        )
        batch = Batch(self._loss_fn, keep and self._rank == self._hub)
        try:
            self._prepare(run, batch, inputs, target)
            run.run(self._eval_actions if evaluation else self._actions)
            answer = self._conclude(run, batch, had_gradients)
        except BaseException as error:
            if not evaluation:
                self._drop_gradients()
            if self._links is None:
                raise
            raise self._give_up(error) from error
        if answer.failures:
            if not evaluation:
                self._drop_gradients()
            raise answer.error() from run.cause_of(answer.failures[0])
        return StepResult(answer.loss, answer.losses, batch.outputs)

    def _prepare(
        self, run: StepRun, batch: Batch, inputs: tuple[Any, ...], target: Any
    ) -> None:
        """Check and cut what this rank uses; a wrong argument stops all ranks."""
        m, dim = self._microbatches, self._options.batch_dim
        try:
            if run.training and not torch.is_grad_enabled():
                raise RuntimeError(
                    "step: expected gradients to be on, but got torch.no_grad(); call "
                    "eval for a forward without gradients"
                )
            if 0 in self._modules:
                run.inputs, _ = cut(inputs, m, dim, "inputs")
            if self._rank == self._hub:
                if target is None and run.training:
                    raise ValueError(
                        "step: expected a target for loss_fn, but got None "
                        "(argument 'target')"
                    )
                if target is not None and self._loss_fn is not None:
                    batch.targets, sizes = cut(target, m, dim, "target")
                    batch.weights = weights(self._options.loss_reduction, sizes)
                run.finish, run.weights = batch.finish, batch.weights
        except Exception as error:
            if self._links is None:
                raise
            stage = self._placement.index(self._rank)
            failure = Failure(
                self._rank, stage, 0, ARGUMENTS, type(error).__name__, str(error)
            )
            run.fail(failure, -1, error)

    def _conclude(self, run: StepRun, batch: Batch, had_gradients: bool) -> Answer:
        """Bring all ranks to the same outcome: failures, or the loss.

        Each rank reports to the hub, the rank of the last stage, which tells all. Of
        two ranks each tells the other at once, since nobody else has to be heard.
        """
        report = run.report(), had_gradients
        loss, losses = (None, None) if run.failed else batch.reduced()
        if self._links is None:
            return Answer.of([report], loss, losses)
        alone = len(self._peers) == 1
        if self._rank != self._hub:
            self._links.tell(self._hub, report)
            reports, loss, losses = self._links.hear(self._hub)
            return Answer.of([*reports, report] if alone else reports, loss, losses)
        if alone:
            self._links.tell(self._peers[0], ((report,), loss, losses))
        reports = [report, *(self._links.hear(peer) for peer in self._peers)]
        if not alone:
            for peer in self._peers:
                self._links.tell(peer, (tuple(reports), loss, losses))
        return Answer.of(reports, loss, losses)

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        for module in self._modules.values():
            yield from module.parameters()

    def _drop_gradients(self) -> None:
        for parameter in self._parameters():
            parameter.grad = None

    def _give_up(self, error: BaseException) -> PipelineError:
        """Return the error of a step after which the links are of no use any more."""
        assert self._links is not None, "only links are lost"
        if not isinstance(error, LinksLostError):
            stage = self._placement.index(self._rank)
            self._links.fail(
                Failure(self._rank, stage, 0, "", type(error).__name__, str(error))
            )
        failure = self._links.failure()
        assert failure is not None, "the links are lost"
        self._lost = failure
        # The alarm must leave before this process may end.
        self._links.flush(1.0)
        return lost_error(failure)
