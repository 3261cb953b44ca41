# SPDX-License-Identifier: Apache-2.0
"""A worker thread and the process group that only it uses."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torch_sm3 import _ops
from torch_sm3.distributed._group import own_group, timeout_of


class Binding:
    """A worker thread with a process group of its own, made like a given one."""

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta | None) -> None:
        if timeout is None:
            timeout = timeout_of(group)
        own = own_group(group, timeout)
        self.size = dist.get_world_size(group)
        self.iteration = 0
        self.exchange = _ops.adasum_exchange(own, timeout)
        # Also at garbage collection and at interpreter exit, where a thread that
        # completes a future would otherwise meet a dead interpreter.
        self.close = weakref.finalize(self, self._close, self.exchange, own)

    @staticmethod
    def _close(exchange: Any, group: dist.ProcessGroup) -> None:
        exchange.close()
        # The user may have destroyed all groups before.
        with contextlib.suppress(ValueError, AssertionError):
            dist.destroy_process_group(group)

    def submit(
        self,
        op: str,
        tensors: Sequence[torch.Tensor],
        sizes: Sequence[int],
        mode: str,
        scale: float,
        value: Any,
        check: bool = True,
        release: bool = False,
    ) -> torch.futures.Future[Any]:
        """Queue one bucket; return the future of ``value``."""
        # The worker passes on a finished future's value, so it needs no Python.
        ready: torch.futures.Future[Any] = torch.futures.Future()
        ready.set_result(value)
        result: torch.futures.Future[Any] = torch.futures.Future()
        plan = _ops.adasum_plan(list(sizes), mode=mode, scale=scale)
        checks = "layout" if check else "off"
        self.exchange.submit(
            plan, tensors, [], False, checks, False, release, op, ready, result
        )
        return result
