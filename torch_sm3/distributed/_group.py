# SPDX-License-Identifier: Apache-2.0
"""Process groups: the one that was meant."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from torch_sm3.distributed._options import refuse


def resolve(op: str, group: Any, argument: str = "process_group") -> dist.ProcessGroup:
    """Return the group, the default one for None; ValueError without this rank."""
    if group is None:
        # torch's own error where no group was initialised.
        return dist.distributed_c10d._get_default_group()
    if not isinstance(group, dist.ProcessGroup):
        # What torch.distributed.new_group gives to ranks outside.
        expected = f"a process group that contains rank {dist.get_rank()}"
        refuse(op, expected, repr(group), argument)
    return group


def resolve_shards(
    op: str, group: dist.ProcessGroup, shard_group: Any
) -> dist.ProcessGroup | None:
    """Return the shard group; ValueError if it shares more than this rank."""
    if shard_group is None:
        return None
    resolve(op, shard_group, "shard_group")
    replicas = dist.get_process_group_ranks(group)
    shards = dist.get_process_group_ranks(shard_group)
    both = sorted(set(replicas) & set(shards))
    if both != [dist.get_rank()]:
        refuse(
            op,
            f"a group that shares rank {dist.get_rank()} alone with process_group "
            f"{replicas}",
            f"{shards}, which shares {both}",
            "shard_group",
        )
    return shard_group
