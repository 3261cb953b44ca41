# SPDX-License-Identifier: Apache-2.0
"""A worker thread and the process groups that only it uses."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_sm3 import _ops
from torch_sm3._groups import own_group, timeout_of

# Iterations whose buckets are compared across ranks before data moves: DDP rebuilds
# its buckets after the first one.
CHECKED_ITERATIONS = 3


class Binding:
    """The library's exchange with process groups of its own, made like given ones.

    Attributes:
        exchange: ``torch.classes.torch_sm3.AdasumExchange``.
        iteration: synchronised iterations so far.
        size: number of ranks.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        timeout: timedelta | None,
        shard_group: dist.ProcessGroup | None = None,
    ) -> None:
        timeout = timeout_of(group) if timeout is None else timeout
        owned = [own_group(group, timeout)]
        if shard_group is not None:
            owned.append(own_group(shard_group, timeout))
        self.iteration = 0
        self.size = dist.get_world_size(group)
        self.exchange = _ops.adasum_exchange(
            owned[0],
            timeout,
            shard_group=owned[1] if shard_group is not None else None,
            local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "0")),
        )
        rank, name = dist.get_rank(group), owned[0].group_name
        self.place = f" [rank {rank} of {self.size}, group {name}]"
        # Also at garbage collection and at interpreter exit, where a thread that
        # completes a future would otherwise meet a dead interpreter.
        self.close = weakref.finalize(self, self._close, self.exchange, owned)

    @staticmethod
    def _close(exchange: Any, owned: list[dist.ProcessGroup]) -> None:
        exchange.close()
        for group in owned:
            # The user may have destroyed all groups before.
            with contextlib.suppress(ValueError, AssertionError):
                dist.destroy_process_group(group)

    @property
    def first_iterations(self) -> bool:
        """Whether buckets are still compared across ranks before data moves."""
        return self.iteration < CHECKED_ITERATIONS

    def submit(
        self,
        plan: Any,
        tensors: Sequence[Tensor],
        outputs: Sequence[Tensor],
        value: Any,
        what: str,
        *,
        mean: bool,
        check: str,
        metrics: bool,
        release: bool,
    ) -> tuple[int, torch.futures.Future[Any]]:
        """Queue one message; return its ticket and the future of ``value``."""
        devices: list[Any] = [tensors[0].device] if tensors[0].is_cuda else []
        # The worker passes on a finished future's value, so it needs no Python.
        ready: torch.futures.Future[Any] = torch.futures.Future()
        ready.set_result(value)
        result: torch.futures.Future[Any] = torch.futures.Future(devices=devices)
        ticket = self.exchange.submit(
            plan,
            tensors,
            outputs,
            mean,
            check,
            metrics,
            release,
            what,
            ready,
            result,
        )
        return ticket, result
