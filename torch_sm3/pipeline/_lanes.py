# SPDX-License-Identifier: Apache-2.0
"""How tensors of a device travel: one communicator for each directed link."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from torch_sm3._groups import group_of_ranks

# Communicators match messages by their order only: each direction has its own.
_BACKEND = "nccl"


class Lanes(NamedTuple):
    """The links of a rank by which tensors of its device travel.

    Attributes:
        device: of the tensors, on this rank.
        links: sending and receiving rank of each.
        groups: for each link, the two ranks, the sender first.
        routes: number of routes whose values travel so.
    """

    device: torch.device
    links: list[tuple[int, int]]
    groups: list[dist.ProcessGroup]
    routes: int

    def close(self, lost: bool) -> None:
        """Give the groups back.

        Args:
            lost: whether a rank is gone, so that what is under way may never end.
        """
        for group in self.groups:
            try:
                if lost:
                    group.abort()
                dist.destroy_process_group(group)
            except (AssertionError, ValueError, RuntimeError):
                # All groups were destroyed before this runner was closed.
                pass


def directed_links(
    placement: Sequence[int], routes: Iterable[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Return the pairs of ranks between which values or gradients travel, in order.

    Args:
        placement: rank of each stage.
        routes: source and target stage of values that skip stages.
    """
    stages = [*((s, s + 1) for s in range(len(placement) - 1)), *routes]
    ends = [(placement[a], placement[b]) for a, b in stages]
    return sorted({link for a, b in ends if a != b for link in ((a, b), (b, a))})


def device_of(modules: Iterable[torch.nn.Module]) -> torch.device:
    """Return the CUDA device of a rank's weights, the current one if it has none.

    Args:
        modules: the rank's stages.

    Returns:
        The first CUDA device, or the CPU if all weights are there.
    """
    found = [t.device for m in modules for t in (*m.parameters(), *m.buffers())]
    for device in found:
        if device.type == "cuda":
            return device
    if found or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def make_lanes(
    frames: dist.ProcessGroup,
    links: Iterable[tuple[int, int]],
    device: torch.device,
    routes: int,
    timeout: timedelta,
    backend: str = _BACKEND,
) -> Lanes | None:
    """Make the groups of this rank's links; collective over the ranks of a group.

    All ranks make them in ascending order. So of the links that are not made yet the
    least has both its ends waiting for it, and ranks never wait for each other over
    unlike ones, whatever links the schedule uses first.

    Args:
        frames: the ranks.
        links: all directed links, the same on all ranks.
        device: of this rank's tensors.
        routes: number of routes of the schedule.
        timeout: of the groups.
        backend: of the groups.

    Returns:
        None if no link begins or ends here.
    """
    world = dist.get_process_group_ranks(frames)
    rank = dist.get_rank(frames)
    own = sorted(link for link in links if rank in link)
    groups = [group_of_ranks([world[a], world[b]], timeout, backend) for a, b in own]
    return Lanes(device, own, groups, routes) if own else None


def open_lanes(
    group: dist.ProcessGroup | None,
    frames: dist.ProcessGroup,
    placement: Sequence[int],
    routes: Sequence[tuple[int, int]],
    modules: Iterable[torch.nn.Module],
    timeout: timedelta,
) -> Lanes | None:
    """Make lanes where both ends of a link compute on CUDA and the backend is NCCL.

    Collective over the ranks.

    Args:
        group: what the user gave for the ranks.
        frames: the same ranks, for headers.
        placement: rank of each stage.
        routes: source and target stage of values that skip stages.
        modules: the stages of this rank.
        timeout: of the groups.
    """
    if f"cuda:{_BACKEND}" not in dist.get_backend_config(group).split(","):
        return None
    device = device_of(modules)
    on_cuda = [False] * dist.get_world_size(frames)
    dist.all_gather_object(on_cuda, device.type == "cuda", group=frames)
    links = [
        link
        for link in directed_links(placement, routes)
        if all(on_cuda[rank] for rank in link)
    ]
    return make_lanes(frames, links, device, len(routes), timeout)
