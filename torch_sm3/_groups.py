# SPDX-License-Identifier: Apache-2.0
"""Process groups of our own, for whoever must not send through the user's."""

from __future__ import annotations

import hashlib
from datetime import timedelta
from typing import Any

import torch.distributed as dist


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return the timeout of a group's first backend."""
    devices = sorted(group._device_types, key=lambda device: device.type)
    return group._get_backend(devices[0]).options._timeout


def own_group(
    group: dist.ProcessGroup | None,
    timeout: timedelta | None = None,
    backend: str | None = None,
) -> dist.ProcessGroup:
    """Make a process group of the ranks of another; collective over these ranks.

    Args:
        group: whose ranks and order the new one has; the default group if None.
        timeout: of the new group, that of ``group`` if None.
        backend: of the new group, that of ``group`` if None.

    Returns:
        A group for ``torch.distributed.destroy_process_group``.
    """
    group = group or dist.distributed_c10d._get_default_group()
    return group_of_ranks(
        dist.get_process_group_ranks(group),
        timeout_of(group) if timeout is None else timeout,
        backend or dist.get_backend_config(group),
    )


def group_of_ranks(
    ranks: list[int], timeout: timedelta, backend: str
) -> dist.ProcessGroup:
    """Make a process group of some ranks; collective over these.

    ``torch.distributed.new_group(use_local_synchronization=True)`` would do, but it
    names groups by a counter of this process, so that ranks that made unlike groups
    before wait for each other under different names. Here the ranks count together, in
    the store of the default group, and torch's counter stays as it is.

    Args:
        ranks: of the default group, in the order of the new one.
        timeout: of the new group.
        backend: of the new group.

    Returns:
        A group for ``torch.distributed.destroy_process_group``.
    """
    c10d: Any = dist.distributed_c10d
    digest = hashlib.sha256(",".join(map(str, ranks)).encode()).hexdigest()[:12]
    store = c10d._get_default_store()
    arrived = store.add(f"torch_sm3/{digest}/arrived", 1)
    name = f"torch_sm3_{digest}_{(arrived - 1) // len(ranks)}"
    # Nobody counts for the next group before all have counted for this one.
    if arrived % len(ranks) == 0:
        store.set(f"{name}/ready", "yes")
    store.wait([f"{name}/ready"], timeout)
    default = c10d._get_default_group()
    bound = default.bound_device_id
    # NCCL would split the default communicator, for which all its ranks are needed.
    default.bound_device_id = None
    try:
        own, _ = c10d._new_process_group_helper(
            len(ranks),
            ranks.index(dist.get_rank()),
            ranks,
            dist.Backend(backend),
            store,
            name,
            timeout=timeout,
            group_desc="torch_sm3",
        )
    finally:
        default.bound_device_id = bound
    assert isinstance(own, dist.ProcessGroup), "this rank is one of them"
    c10d._world.pg_group_ranks[own] = {rank: i for i, rank in enumerate(ranks)}
    return own
