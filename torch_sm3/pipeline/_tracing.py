# SPDX-License-Identifier: Apache-2.0
"""What a runner records of its steps."""

from __future__ import annotations

from collections.abc import Sequence

from torch_sm3.pipeline._build import Parts
from torch_sm3.pipeline._recorder import Recorder
from torch_sm3.pipeline._step import StepRun
from torch_sm3.pipeline.schedule import Action
from torch_sm3.pipeline.trace import Trace, collect


class Tracing:
    """Records the steps of one rank if that is wanted.

    Args:
        parts: of the runner.
        wanted: whether steps are traced.
        max_pending: messages of a link that may be under way.
    """

    def __init__(self, parts: Parts, wanted: bool, max_pending: int) -> None:
        self._parts = parts
        self._max_pending = max_pending
        self._recorder = Recorder(parts.schedule, parts.rank) if wanted else None

    def of(self, evaluation: bool) -> bool:
        """Tell whether a run is traced; steps are, evals are not."""
        return self._recorder is not None and not evaluation

    def add(self, number: int, row: Sequence[Action], run: StepRun) -> None:
        """Keep what a run stamped.

        Args:
            number: of the call, equal on all ranks.
            row: what the rank ran.
            run: the run.
        """
        if self._recorder is not None:
            self._recorder.add(number, row, run.stamps())

    def latest(self) -> list[tuple[Action, float, float]]:
        """Return the actions of the latest step, how long they waited and ran."""
        self.check()
        assert self._recorder is not None, "checked before"
        if not self._recorder.steps:
            return []
        stamps = self._recorder.steps[-1]
        row = self._parts.schedule.actions(self._parts.rank)
        columns = zip(row, stamps.begin, stamps.ready, stamps.end, strict=True)
        return [
            (action, 1e-9 * (ready - begin), 1e-9 * (end - ready))
            for action, begin, ready, end in columns
            if begin
        ]

    def check(self) -> None:
        """Refuse to tell what nobody recorded."""
        if self._recorder is None:
            raise RuntimeError(
                "PipelineRunner: expected trace=True for reports and traces, but got "
                "False (argument 'trace')"
            )

    def collect(self, everywhere: bool) -> Trace | None:
        """Bring what all ranks recorded together, on rank 0 or everywhere."""
        assert self._recorder is not None, "checked before"
        parts = self._parts
        return collect(
            self._recorder,
            parts.schedule,
            parts.rank,
            parts.links,
            everywhere,
            self._max_pending,
        )
