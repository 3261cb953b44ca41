# SPDX-License-Identifier: Apache-2.0
"""What a runner remembers of its steps: state, reports, traces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch_sm3.pipeline._session import Session
from torch_sm3.pipeline.costs import Costs
from torch_sm3.pipeline.report import StepReport, report
from torch_sm3.pipeline.schedule import Action


class Records:
    r"""Tell what became of the steps of a runner."""

    _session: Session

    def state_dict(self) -> dict[str, Any]:
        r"""Return what a resumed run needs besides parameters and optimizer.

        Returns:
            The number of steps, on which the random numbers of a deterministic run
            depend, and the loss scale that all ranks agreed on, None without one.
        """
        return {
            "steps": self._session.steps,
            "loss_scale": self._session.stepper.loss_scale,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        r"""Go on from what :meth:`state_dict` returned.

        Args:
            state_dict: the same on all ranks.

        Raises:
            ValueError: if it is no such state.
        """
        known = self.state_dict().keys()
        if not isinstance(state_dict, Mapping) or state_dict.keys() != known:
            got = sorted(state_dict) if isinstance(state_dict, Mapping) else state_dict
            raise ValueError(
                f"load_state_dict: expected keys {sorted(known)}, but got {got!r} "
                "(argument 'state_dict')"
            )
        self._session.steps = int(state_dict["steps"])
        self._session.stepper.loss_scale = state_dict["loss_scale"]

    def report(self, costs: Costs | None = None) -> StepReport:
        r"""Tell where the time and the memory of the latest complete step went.

        Collective; needs ``trace=True``.

        Args:
            costs: to predict with, those of the trace itself if None.

        Returns:
            Busy, bubble, waiting and peak of every rank, measured and predicted side
            by side, and the bytes of the last snapshot for post-validation beside
            those with Adam; ``print`` shows a table. Equal on all ranks.

        Raises:
            RuntimeError: if nothing was traced.
            ValueError: if no step has run to its end.

        Example::

            >>> import torch
            >>> from torch_sm3.pipeline import PipelineRunner, Stage, plan
            >>> runner = PipelineRunner(
            ...     [Stage(torch.nn.Linear(4, 1), 0)], plan("none", 1, 2),
            ...     loss_fn=torch.nn.functional.mse_loss, trace=True)
            >>> result = runner.step(torch.randn(6, 4), target=torch.randn(6, 1))
            >>> said = runner.report()
            >>> len(said.measured), said.largest_stage
            (1, 0)
            >>> 0 < said.measured[0].busy <= said.makespan
            True
            >>> runner.close()
        """
        trace = self._session.trace(everywhere=True)
        assert trace is not None, "all ranks get it"
        snapshots = self._session.snapshots()
        return replace(report(trace, costs), snapshots=snapshots)

    def timings(self) -> list[tuple[Action, float, float]]:
        r"""Return how long the actions of this rank took in its latest step.

        Not collective. Needs ``trace=True``.

        Returns:
            For each action that ran: the action, the seconds that it waited for what
            it needs, and the seconds that it ran.

        Raises:
            RuntimeError: if nothing was traced.

        Example::

            >>> import torch
            >>> from torch_sm3.pipeline import PipelineRunner, Stage, plan
            >>> runner = PipelineRunner(
            ...     [Stage(torch.nn.Linear(4, 1), 0)], plan("none", 1, 2),
            ...     loss_fn=torch.nn.functional.mse_loss, trace=True)
            >>> result = runner.step(torch.randn(6, 4), target=torch.randn(6, 1))
            >>> [action.text for action, waited, ran in runner.timings() if ran > 0][:3]
            ['0F0', '0B0', '0F1']
            >>> runner.close()
        """
        return self._session.timings()

    def save_trace(self, path: str | Path, costs: Costs | None = None) -> None:
        r"""Write the latest steps as JSON for ui.perfetto.dev.

        Collective; rank 0 writes. Needs ``trace=True``.
        :func:`torch_sm3.pipeline.trace.load_trace` reads costs back from the file.

        Args:
            path: the file.
            costs: to predict with, those of the trace itself if None.

        Raises:
            RuntimeError: if nothing was traced.

        Example::

            >>> import tempfile
            >>> from torch_sm3.pipeline.trace import load_trace
            >>> import torch
            >>> from torch_sm3.pipeline import PipelineRunner, Stage, plan
            >>> runner = PipelineRunner(
            ...     [Stage(torch.nn.Linear(4, 1), 0)], plan("none", 1, 2),
            ...     loss_fn=torch.nn.functional.mse_loss, trace=True)
            >>> result = runner.step(torch.randn(6, 4), target=torch.randn(6, 1))
            >>> with tempfile.NamedTemporaryFile(suffix=".json") as file:
            ...     runner.save_trace(file.name)
            ...     costs = load_trace(file.name)
            >>> costs.F[0] > 0
            True
            >>> runner.close()
        """
        trace = self._session.trace(everywhere=False)
        if trace is not None:
            trace.save(path, costs)
