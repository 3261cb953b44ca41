# SPDX-License-Identifier: Apache-2.0
"""Run a schedule: data, losses, reductions, the optimizer and failures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.amp import GradScaler

from torch_sm3.pipeline._build import Parts
from torch_sm3.pipeline._given import Given
from torch_sm3.pipeline._options import Options
from torch_sm3.pipeline._records import Records
from torch_sm3.pipeline._reduce import Hook
from torch_sm3.pipeline._result import StepResult
from torch_sm3.pipeline._session import Session
from torch_sm3.pipeline._steppable import Steppable
from torch_sm3.pipeline.schedule import Schedule
from torch_sm3.pipeline.stage import Stage


class PipelineRunner(Steppable, Records):
    r"""Run a schedule over the ranks of a process group.

    Making a runner is collective: every rank passes the stages that it owns, and all
    compare schedule and options. The messages travel in a Gloo group of its own.

    .. math::
        L = \frac{1}{m} \sum_i \ell_i \;(\text{mean}), \qquad
        L = \sum_i \frac{n_i}{n} \ell_i \;(\text{samples}), \qquad
        L = \sum_i \ell_i \;(\text{sum}), \qquad
        L = \frac{\sum_i \ell_i}{\sum_i c_i} \;(\text{tokens})

    Gradients are those of :math:`L`, added up in microbatch order; they have the bits
    of one process that runs the same microbatches in turn. What was in ``.grad``
    before is added to and left unscaled.

    Args:
        stages: the stages of this rank.
        schedule: what every rank does; messages are added if it has none.
        group: the ranks, all of them if None; used at construction only.
        loss_fn: ``loss_fn(output, target)`` on the last stage, a scalar tensor. With
            ``tokens`` it returns the sum :math:`\ell_i` over the tokens, their count
            :math:`c_i` and, if it likes, a dict of metrics.
        loss_reduction: ``mean``, ``samples``, ``sum`` or ``tokens``. Tokens are
            counted over all microbatches and replicas; a total of 0 gives zeros.
        data_parallel: the ranks that hold the same stages of other replicas.
        reduce: how gradients are combined over replicas, once per step: ``mean``,
            ``sum``, ``adasum`` or None for not at all.
        hook: ``(state, function)``, a communication hook as of DDP that combines them
            instead, called once for each bucket and step.
        batch_dim: dimension along which batches are cut.
        timeout: longest wait for one message, in seconds, whatever the group's is.
        max_pending: sends of one link and class that may be under way at once.
        deterministic: let random numbers of a stage and microbatch depend on them, the
            step and ``seed`` only, whatever the schedule.
        seed: of a deterministic run.
        share_loss: whether all ranks learn the losses, not only the last stage's.
        trace: record when every action of the latest steps ran, for :meth:`report`
            and :meth:`save_trace`.
        link_delay: seconds by which messages from one rank to another are held back,
            as ``{(0, 1): 0.05}``: a slow link, for tests and measurements.

    Raises:
        ValueError: the same on all ranks, if the stages, the schedule or an option do
            not fit.
        ScheduleError: if the ranks hold different schedules, or one that cannot run.
        TypeError: the same on all ranks, if an argument is of another kind.
        RuntimeError: on a stage that FSDP shards under a schedule without UNSHARD.

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
        >>> torch.testing.assert_close(result.loss, whole, check_stride=False)
        >>> runner.zero_grad()
        >>> stage.module.weight.grad is None
        True
        >>> runner.close()

    1F1B: Narayanan et al., 2021, https://arxiv.org/abs/2104.04473.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        schedule: Schedule,
        *,
        group: dist.ProcessGroup | None = None,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        loss_reduction: str = "mean",
        data_parallel: dist.ProcessGroup | None = None,
        reduce: str | None = "mean",
        hook: Hook | None = None,
        batch_dim: int = 0,
        timeout: float = 60.0,
        max_pending: int = 2,
        deterministic: bool = False,
        seed: int = 0,
        share_loss: bool = True,
        trace: bool = False,
        link_delay: Mapping[tuple[int, int], float] | None = None,
    ) -> None:
        options = Options(
            loss_reduction,
            reduce,
            hook is not None,
            batch_dim,
            timeout,
            max_pending,
            deterministic,
            seed,
            share_loss,
            trace,
            link_delay,
        )
        parts = Parts(stages, schedule, group, loss_fn, options, data_parallel, hook)
        self._session = Session(parts, options, loss_fn)

    def step(
        self,
        *inputs: Any,
        target: Any = None,
        kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        microbatches: Sequence[Any] | None = None,
        targets: Sequence[Any] | None = None,
        iterator: Iterator[Any] | None = None,
        scaler: GradScaler | None = None,
        return_outputs: bool = False,
    ) -> StepResult:
        r"""Run forward and backward of one batch; gradients are added to ``.grad``.

        Ranks ignore what they do not use: inputs where there is neither stage 0 nor a
        stage with ``data``, targets where the last stage is not.

        Args:
            *inputs: arguments of stage 0, whole batches that are cut along
                ``batch_dim``.
            target: second argument of ``loss_fn``, cut in the same way.
            kwargs: keyword arguments of stages that name them, cut in the same way,
                or a list of such dicts, one for each microbatch.
            microbatches: in place of inputs the item of each microbatch, of any shape;
                a tuple or list is spread over the arguments of stage 0.
            targets: in place of a target the target of each microbatch.
            iterator: in place of both, pairs of item and target; ``next`` is called
                once for each microbatch on each rank that uses data.
            scaler: scales the loss; pass it to :meth:`optimizer_step`, too.
            return_outputs: keep the last stage's outputs.

        Returns:
            The loss, equal on every rank.

        Raises:
            PipelineError: on every rank and with equal fields, if any of them fails;
                then every ``.grad`` of the stages is None.
            ValueError: on every rank, if the data does not fit.
            RuntimeError: if the schedule has no backwards, gradients are off, or
                another runner is at work on the group.

        Example::

            >>> import torch
            >>> from torch_sm3.pipeline import PipelineRunner, Stage, plan
            >>> module = torch.nn.Linear(4, 1)
            >>> runner = PipelineRunner(
            ...     [Stage(module, index=0)], plan("none", ranks=1, microbatches=2),
            ...     loss_fn=torch.nn.functional.mse_loss)
            >>> x, y = torch.randn(6, 4), torch.randn(6, 1)
            >>> result = runner.step(x, target=y, return_outputs=True)
            >>> result.losses.shape, [output.shape[0] for output in result.outputs]
            (torch.Size([2]), [3, 3])
            >>> result = runner.step(microbatches=[x[:1], x], targets=[y[:1], y])
            >>> runner.close()
        """
        given = Given(inputs, target, kwargs, microbatches, targets, iterator)
        return self._session.run(given, return_outputs, scaler, evaluation=False)

    def eval(
        self,
        *inputs: Any,
        target: Any = None,
        kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        microbatches: Sequence[Any] | None = None,
        targets: Sequence[Any] | None = None,
        iterator: Iterator[Any] | None = None,
        return_outputs: bool = False,
    ) -> StepResult:
        r"""Run the forwards of one batch without gradients.

        The number of microbatches is that of the lists, or the schedule's, or less if
        the batch is smaller. Random numbers that it draws are given back.

        Args:
            *inputs: as for :meth:`step`.
            target: as for :meth:`step`; without it there is no loss.
            kwargs: as for :meth:`step`.
            microbatches: as for :meth:`step`, in any number.
            targets: as for :meth:`step`.
            iterator: as for :meth:`step`.
            return_outputs: keep the last stage's outputs.

        Returns:
            The loss, equal on every rank.

        Raises:
            PipelineError: on every rank and with equal fields, if any of them fails.
            ValueError: on every rank, if the data does not fit.

        Example::

            >>> import torch
            >>> from torch_sm3.pipeline import PipelineRunner, Stage, plan
            >>> module = torch.nn.Linear(4, 1)
            >>> runner = PipelineRunner(
            ...     [Stage(module, index=0)], plan("none", ranks=1, microbatches=2),
            ...     loss_fn=torch.nn.functional.mse_loss)
            >>> x, y = torch.randn(6, 4), torch.randn(6, 1)
            >>> runner.eval(x, target=y).losses.shape
            torch.Size([2])
            >>> runner.eval(microbatches=[x] * 5, targets=[y] * 5).losses.shape
            torch.Size([5])
            >>> module.weight.grad is None
            True
            >>> runner.close()
        """
        given = Given(inputs, target, kwargs, microbatches, targets, iterator)
        return self._session.evaluate(given, return_outputs)

    def close(self) -> None:
        r"""End the links and give the process groups back. Idempotent.

        An optimizer step that was not validated yet stands, and nobody hears of a
        failure that was still to be raised; call :meth:`flush` before.
        """
        self._session.close()
