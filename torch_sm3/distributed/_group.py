# SPDX-License-Identifier: Apache-2.0
"""Process groups: the one that was meant, and one of our own."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist


def resolve(op: str, group: Any) -> dist.ProcessGroup:
    """Return the group, the default one for None; ValueError without this rank."""
    if group is None:
        # torch's own error where no group was initialised.
        return dist.distributed_c10d._get_default_group()
    if not isinstance(group, dist.ProcessGroup):
        # What torch.distributed.new_group gives to ranks outside.
        raise ValueError(
            f"{op}: expected a process group that contains rank {dist.get_rank()}, but "
            f"got {group!r} (argument 'process_group')"
        )
    return group


def own_group(
    group: dist.ProcessGroup,
    timeout: timedelta | None = None,
    backend: str | None = None,
) -> tuple[Any, bool]:
    """Make a process group of the ranks of another; collective over them.

    Args:
        group: whose ranks and order the new one has.
        timeout: of the new group, torch's default if None.
        backend: of the new group, that of ``group`` if None.

    Returns:
        The group, and whether it leaves out ranks of the world.
    """
    ranks = dist.get_process_group_ranks(group)
    # Rank order is part of the result; torch sorts unless told otherwise.
    order: dict[str, Any] = {} if ranks == sorted(ranks) else {"sort_ranks": False}
    subset = len(ranks) < dist.get_world_size()
    own = dist.new_group(
        ranks,
        timeout=timeout,
        backend=backend or dist.get_backend_config(group),
        use_local_synchronization=subset,
        **order,
    )
    return own, subset
