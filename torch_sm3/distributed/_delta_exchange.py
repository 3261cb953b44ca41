# SPDX-License-Identifier: Apache-2.0
"""Changes of parameters on their way: taken off, combined over ranks, put back."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_sm3 import _ops
from torch_sm3.distributed._delta_layers import Bucket, real
from torch_sm3.distributed._state import AdasumState

# One bucket is stepped while one travels and one waits to travel.
_IN_FLIGHT = 2


def starts_of(params: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of parameters."""
    return [real(param).clone() for param in params]


def restore(params: Sequence[Tensor], starts: Sequence[Tensor]) -> None:
    """Set parameters to what they were."""
    for param, start in zip(params, starts, strict=True):
        real(param).copy_(start)


class Flights:
    """Combine the changes of buckets, a few at a time, in order.

    Args:
        op: of messages.
        state: what the changes are combined by.
    """

    def __init__(self, op: str, state: AdasumState) -> None:
        self._op = op
        self._state = state
        self._queue: deque[tuple[Bucket, list[Tensor], Any]] = deque()

    def send(self, bucket: Bucket, starts: Sequence[Tensor]) -> None:
        """Take the changes since ``starts`` off the parameters and send them.

        Until they come back combined, parameters are what they were at the start, so
        they are equal on all ranks whatever happens.
        """
        flat = torch.empty(bucket.numel, dtype=bucket.dtype, device=bucket.device)
        changes: list[Tensor] = []
        at = 0
        for param, start in zip(bucket.params, starts, strict=True):
            change = flat[at : at + start.numel()].view(start.shape)
            change.copy_(real(param)).sub_(start)
            changes.append(change)
            at += start.numel()
        restore(bucket.params, starts)
        names = [layer.name for layer in bucket.layers]
        future = self._state._all_reduce(self._op, changes, names, bucket.params)
        self._queue.append((bucket, changes, future))
        while len(self._queue) > _IN_FLIGHT:
            self._land()

    def land(self) -> None:
        """Wait for all changes and add them to the parameters."""
        while self._queue:
            self._land()

    def _land(self) -> None:
        bucket, changes, future = self._queue.popleft()
        future.wait()
        for param, change in zip(bucket.params, changes, strict=True):
            add(real(param), change)


def add(target: Tensor, change: Tensor) -> None:
    """Add a change to a parameter, in place, with a single rounding.

    Args:
        target: of any floating dtype.
        change: of the target's dtype or a wider one.
    """
    if target.dtype == change.dtype:
        target.add_(change)
        return
    rows = torch.stack([target.to(change.dtype).flatten(), change.flatten()])
    ones = torch.ones(1, 2, dtype=torch.float64, device=rows.device)
    # Exact in float64, and from there to 16 bits directly.
    total = _ops.adasum_combine(rows, ones, [rows.shape[1]], dtype=target.dtype)
    target.copy_(total.view(target.shape))
