# SPDX-License-Identifier: Apache-2.0
"""Collectives of a runner's own groups, with a limit on every wait."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torch_sm3.pipeline._faults import GroupLostError
from torch_sm3.pipeline._links import new_group


class Collective:
    """A Gloo group that only one runner uses.

    Args:
        group: the ranks.
        timeout: longest wait, in seconds.

    Attributes:
        group: the group.
        rank: this rank in it.
        size: number of its ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout: float) -> None:
        self.group = new_group(group, timeout)
        self.rank = dist.get_rank(self.group)
        self.size = dist.get_world_size(self.group)
        self._ranks = dist.get_process_group_ranks(self.group)
        self._limit = timedelta(seconds=timeout)

    def wait(self, work: Any) -> None:
        """Wait for a collective that was started.

        Raises:
            GroupLostError: if a rank is gone or silent.
        """
        try:
            work.wait(self._limit)
        except RuntimeError as error:
            raise GroupLostError(
                f"a rank of its replicas or ties ended or was silent for "
                f"{self._limit.total_seconds():g} s"
            ) from error

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

    def send(self, tensor: torch.Tensor, rank: int, tag: int) -> Any:
        """Start to send a tensor to a rank of the group."""
        return self._peer(dist.isend, tensor, rank, tag)

    def receive(self, tensor: torch.Tensor, rank: int, tag: int) -> Any:
        """Start to receive a tensor of a rank of the group."""
        return self._peer(dist.irecv, tensor, rank, tag)

    def close(self) -> None:
        """Give the group back."""
        try:
            dist.destroy_process_group(self.group)
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
            raise GroupLostError("a rank of its replicas ended") from error

    def _peer(
        self, function: Callable[..., Any], tensor: torch.Tensor, rank: int, tag: int
    ) -> Any:
        try:
            return function(tensor, self._ranks[rank], group=self.group, tag=tag)
        except RuntimeError as error:
            raise GroupLostError(f"rank {rank} of its ties ended") from error
