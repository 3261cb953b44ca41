# SPDX-License-Identifier: Apache-2.0
"""Collectives of a runner's own groups, with a limit on every wait."""

from __future__ import annotations

import ctypes
import math
import pickle
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torch_sm3.pipeline._faults import GroupLostError, LinksLostError
from torch_sm3.pipeline._links import Links, new_group
from torch_sm3.pipeline._notice import Notice

# Longest wait without looking at signals, in seconds.
_SLICE = 0.2


class Collective:
    """A Gloo group that only one runner uses.

    Args:
        group: the ranks.
        timeout: longest wait, in seconds.
        links: whose loss ends a wait for all, or None.

    Attributes:
        rank: this rank in it.
        size: number of its ranks.
        notice: what ended the runner, once any of its ranks knows; None if there is no
            such place.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, timeout: float, links: Links | None
    ) -> None:
        self._links = links
        self._group: dist.ProcessGroup | None = new_group(group, timeout)
        self.rank = dist.get_rank(self.group)
        self.size = dist.get_world_size(self.group)
        self._ranks = dist.get_process_group_ranks(self.group)
        self._limit = timedelta(seconds=timeout)
        self.notice: Notice | None = None
        # Works that nobody waits for any more.
        self._left: list[Any] = []

    @property
    def group(self) -> dist.ProcessGroup:
        """The group."""
        assert self._group is not None, "not closed yet"
        return self._group

    def wait(self, work: Any) -> None:
        """Wait for a collective that was started, in slices that serve Ctrl-C.

        Raises:
            GroupLostError: if a rank is gone or silent.
            LinksLostError: if the links are lost meanwhile.
        """
        try:
            self.until(work.get_future(), self._limit.total_seconds())
        except BaseException:
            self._left.append(work)
            raise
        try:
            work.wait()
        except RuntimeError as error:
            raise self._lost() from error

    def until(self, future: Any, seconds: float = math.inf) -> None:
        """Wait until a future is done, in slices that serve Ctrl-C.

        Args:
            future: of this or another group with the same ranks.
            seconds: longest wait.

        Raises:
            GroupLostError: if that is too short, or a rank is known to be gone.
            LinksLostError: if the links are lost meanwhile.
        """
        done = threading.Event()
        future.add_done_callback(lambda _: done.set())
        end = time.monotonic() + seconds
        while not done.wait(_SLICE):
            if self._links is not None and self._links.failure() is not None:
                # The other ranks learn of it by their own links.
                raise LinksLostError
            if self.notice is not None and self.notice.read() is not None:
                # A rank with which nothing is shared but the notice is gone.
                raise self._lost()
            if time.monotonic() > end:
                raise GroupLostError(
                    f"one of the ranks {self._others()} of the world, with the same "
                    f"stages, was silent for {seconds:g} s",
                    "TimeoutError",
                )

    def _others(self) -> list[int]:
        return [rank for rank in self._ranks if rank != self._ranks[self.rank]]

    def _lost(self) -> GroupLostError:
        return GroupLostError(
            f"one of the ranks {self._others()} of the world, with the same stages, "
            "ended or left the pipeline",
            replica=1 - self.rank if self.size == 2 else None,
        )

    def start_sum(self, tensor: torch.Tensor) -> Any:
        """Start to replace a tensor by its sum over the ranks."""
        return self._call(dist.all_reduce, tensor, dist.ReduceOp.SUM)

    def maximum(self, values: list[float]) -> list[float]:
        """Return the largest of each value over the ranks."""
        return self._small(values, dist.ReduceOp.MAX)

    def total(self, values: list[float]) -> list[float]:
        """Return the sum of each value over the ranks."""
        return self._small(values, dist.ReduceOp.SUM)

    def gather(self, value: Any) -> list[Any]:
        """Return a value of each rank, pickled on the way."""
        own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = [0.0] * self.size
        sizes[self.rank] = float(own.numel())
        sizes = self.total(sizes)
        padded = torch.zeros(int(max(sizes)), dtype=torch.uint8)
        padded[: own.numel()] = own
        parts = [torch.empty_like(padded) for _ in sizes]
        self.wait(dist.all_gather(parts, padded, group=self.group, async_op=True))
        pairs = zip(parts, sizes, strict=True)
        return [pickle.loads(p[: int(n)].numpy().tobytes()) for p, n in pairs]

    def close(self) -> None:
        """Give the group back."""
        group, self._group = self._group, None
        if group is None:
            return
        if not all(work.is_completed() for work in self._left):
            # Gloo cannot abort a collective, and the end of its group would wait for
            # a rank that may be silent for ever. So this one has no end.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        try:
            dist.destroy_process_group(group)
        except (AssertionError, ValueError, RuntimeError):
            # All groups were destroyed before this runner was closed.
            pass

    def _small(self, values: list[float], op: Any) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64)
        self.wait(self._call(dist.all_reduce, tensor, op))
        return tensor.tolist()

    def _call(self, function: Callable[..., Any], tensor: torch.Tensor, op: Any) -> Any:
        try:
            return function(tensor, op, group=self.group, async_op=True)
        except RuntimeError as error:
            raise self._lost() from error
