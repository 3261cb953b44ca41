# SPDX-License-Identifier: Apache-2.0
"""Gradients of one rank: kept apart, tied, reduced, divided and put back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from torch_sm3.pipeline._reduce import Reducer
from torch_sm3.pipeline._ties import Tie
from torch_sm3.pipeline.stage import Stage


class Gradients:
    """What happens to ``.grad`` around the backwards of a step.

    Gradients that were there before are set aside, wherever those of the step are
    changed as a whole, and added at the end.

    Args:
        stages: the stages of this rank.
        ties: tied weights with members on this rank, by number.
        reducer: of the data-parallel replicas, or None.
        apart: whether the gradients of a step are changed as a whole.
    """

    def __init__(
        self,
        stages: Iterable[Stage],
        ties: dict[int, Tie],
        reducer: Reducer | None,
        apart: bool,
    ) -> None:
        self._modules = [stage.module for stage in stages]
        self._ties = ties
        self._reducer = reducer
        self._apart = apart
        self._held: list[tuple[torch.nn.Parameter, torch.Tensor]] = []

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Yield each parameter of the rank once."""
        seen = set()
        for module in self._modules:
            for parameter in module.parameters():
                if parameter not in seen:
                    seen.add(parameter)
                    yield parameter

    def present(self) -> bool:
        """Whether any parameter has a gradient."""
        return any(parameter.grad is not None for parameter in self.parameters())

    def begin(self) -> None:
        """Set the gradients of earlier steps aside."""
        self._held = []
        if self._reducer is not None:
            self._reducer.begin()
        if not self._apart:
            return
        for parameter in self.parameters():
            if parameter.grad is not None:
                self._held.append((parameter, parameter.grad))
                parameter.grad = None

    def collective(self, op: str, stage: int, number: int, failed: bool) -> None:
        """Do REDUCE_GRAD of a stage, or TIE_REDUCE of a tied weight.

        Args:
            op: the operation.
            stage: the stage.
            number: of the tied weight.
            failed: whether this rank failed; it takes part in the agreement only.

        Raises:
            PeerFailedError: if another member has failed.
            GroupLostError: if one is gone.
        """
        if op == "TIE_REDUCE":
            if number in self._ties:
                self._ties[number].reduce(failed)
        elif op == "REDUCE_GRAD" and self._reducer is not None:
            self._reducer.start(stage, failed)

    def agree(self) -> None:
        """Learn from the other replicas whether there is anything to wait for."""
        if self._reducer is not None:
            self._reducer.agree()

    def wait(self) -> None:
        """Wait for the reductions; their results become the gradients."""
        if self._reducer is not None:
            self._reducer.finish(keep=True)

    def finish(self, total: float | None) -> None:
        """Divide, and add the gradients of earlier steps.

        Args:
            total: what to divide by, None for nothing; 0 makes zeros.
        """
        if total is not None or self._held:
            self._finish(total)

    @torch.no_grad()
    def _finish(self, total: float | None) -> None:
        if total is not None:
            for parameter in self.parameters():
                if parameter.grad is not None:
                    if total == 0:
                        parameter.grad.zero_()
                    else:
                        parameter.grad.div_(total)
        for parameter, before in self._held:
            if parameter.grad is not None:
                before.add_(parameter.grad)
            parameter.grad = before
        self._held = []

    def restore(self) -> None:
        """Undo :meth:`begin` where no backward has run."""
        for parameter, before in self._held:
            parameter.grad = before
        self._held = []

    def drop(self, wait: bool = True) -> None:
        """Throw all gradients away after a failed step.

        Args:
            wait: for reductions that other replicas take part in.
        """
        if self._reducer is not None and wait:
            self._reducer.finish(keep=False)
        self._held = []
        for parameter in self.parameters():
            parameter.grad = None

    def counted_elsewhere(self) -> list[torch.nn.Parameter]:
        """Return the tied weights whose norm counts on a lower stage."""
        return [p for tie in self._ties.values() for p in tie.repeated]
