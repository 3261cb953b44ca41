# SPDX-License-Identifier: Apache-2.0
"""The check after which ranks cannot talk to each other any more."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers.sm3_ranks import Check
from helpers.sm3_twins import Twin
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard


def nobody_waits_for_ever(rank: int, folder: str) -> None:
    # Not by a message: Gloo's connections end with a timeout.
    store = dist.distributed_c10d._get_default_store()
    group = dist.new_group(timeout=timedelta(seconds=2))
    # By its name, as DTensor's caches put one mesh in the place of an equal one.
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("impatient",))
    twin = Twin([torch.randn(6, 5)], [(mesh, [Shard(0)])])
    twin.other.init_state()
    if rank == 0:
        twin.set_grads(0)
        twin.other.step()
        with pytest.raises(RuntimeError):
            twin.other.state_dict()
        # Waited for once: what is there can be read.
        assert twin.other.state_dict()["state"][0]["step"] == 1
        store.set("told", "yes")
    else:
        store.wait(["told"])


CHECKS: dict[int, list[Check]] = {2: [nobody_waits_for_ever], 3: [], 4: []}
