# SPDX-License-Identifier: Apache-2.0
"""Which messages of a step the metrics are made of."""

from __future__ import annotations

import contextlib
from typing import Any, TypeAlias

import torch

from torch_sm3.distributed._metrics import AdasumMetrics, step_metrics
from torch_sm3.distributed._plans import Layout

_Entry: TypeAlias = tuple[int, Layout, torch.futures.Future[Any]]


class Log:
    """Tickets of the running step and of the last one that was measured.

    The library keeps the outcome of a ticket until it is asked for or forgotten.
    """

    def __init__(self) -> None:
        self._running: list[_Entry] = []
        self._last: list[_Entry] = []
        self._step = 0
        self._leaves: set[int] = set()
        self._ready: AdasumMetrics | None = None

    def add(
        self, ticket: int, layout: Layout, result: torch.futures.Future[Any]
    ) -> None:
        """Note a message of the running step."""
        self._running.append((ticket, layout, result))

    def end_step(self, step: int, exchange: Any, leaves: set[int]) -> None:
        """Make the running step, if it was measured, the last one.

        Args:
            step: its number.
            exchange: whose tickets these are.
            leaves: of how many leaves a whole Gram matrix may be.
        """
        if not self._running:
            return
        exchange.forget(self._running[0][0])
        self._last, self._running = self._running, []
        self._step, self._leaves, self._ready = step, leaves, None

    def read(self, exchange: Any) -> AdasumMetrics | None:
        """Return the metrics of the last measured step; waits for its messages."""
        if self._last:
            outcomes = []
            for ticket, layout, result in self._last:
                result.wait()
                outcomes.append((_keys(layout), exchange.outcome(ticket)))
            self._last = []
            self._ready = step_metrics(self._step, outcomes, self._leaves)
        return self._ready

    def keep(self, metrics: AdasumMetrics | None) -> None:
        """Take over what another log has read."""
        self._ready = metrics

    def leave(self, exchange: Any) -> None:
        """Take what is known before the exchange goes; waits for nothing."""
        if all(result.done() for _, _, result in self._last):
            # A message that failed has no outcome.
            with contextlib.suppress(RuntimeError):
                self.read(exchange)
        self._last, self._running = [], []


def _keys(layout: Layout) -> list[Any]:
    keys: list[Any] = []
    for i, (name, ref) in enumerate(zip(layout.names, layout.refs, strict=True)):
        parameter = ref()
        # Of a tensor that is gone and had no name only its place is left.
        keys.append(name or (i if parameter is None else parameter))
    return keys
