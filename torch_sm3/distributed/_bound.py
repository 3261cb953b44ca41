# SPDX-License-Identifier: Apache-2.0
"""How a state finds its process group, at once or at first use."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from torch_sm3.distributed._binding import Binding
from torch_sm3.distributed._group import resolve, resolve_shards
from torch_sm3.distributed._reduction import Reduction


class Bound:
    """A reduction and the worker that is bound to a process group, or to none yet.

    Attributes:
        process_group: the group that was given, or the default group; None while the
            state is closed or unbound.
        shard_group: the one that was given.
        timeout: the one that was given.
    """

    process_group: dist.ProcessGroup | None = None
    shard_group: dist.ProcessGroup | None = None
    timeout: timedelta | None
    _reduction: Reduction
    _binding: Binding | None = None
    _closed = False
    _uses_default: bool
    _size: int

    def _bind(self, op: str, process_group: Any, shard_group: Any) -> Binding:
        group, shards = self._resolve(op, process_group, shard_group)
        default = dist.distributed_c10d._get_default_group()
        self._uses_default = group is default and shards is None
        self._size = dist.get_world_size(group)
        binding = Binding(group, self.timeout, shards)
        try:
            self._reduction.algorithm(binding)
        except Exception:
            binding.close()
            raise
        self.process_group, self.shard_group = group, shards
        self._binding = binding
        self._closed = False
        return binding

    def _resolve(
        self, op: str, process_group: Any, shard_group: Any
    ) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
        group = resolve(op, process_group)
        shards = resolve_shards(op, group, shard_group)
        self._reduction.options.check_ranks(op, dist.get_world_size(group))
        return group, shards

    def _bound(self, op: str) -> Binding:
        if self._binding is not None:
            return self._binding
        if self._closed:
            raise RuntimeError(
                f"{op}: expected an open state, but got one after close()"
            )
        ready = self._uses_default and dist.is_initialized()
        if not ready or dist.get_world_size() != self._size:
            raise RuntimeError(
                f"{op}: expected a state that is bound to a process group, but got an "
                f"unpickled one of {self._size} ranks; call its rebind(process_group)"
            )
        return self._bind(op, None, None)
