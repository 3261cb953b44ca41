# SPDX-License-Identifier: Apache-2.0
"""The ranks of delta mode, for what is not a change of parameters."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from torch_sm3.distributed._state import AdasumState


class Group:
    """The process group behind a state.

    Args:
        state: the state.
        handle: the user's process group, the default one if None.
    """

    def __init__(self, state: AdasumState, handle: dist.ProcessGroup | None) -> None:
        self._state = state
        self._handle = handle

    @property
    def handle(self) -> dist.ProcessGroup | None:
        """The user's process group, None for the default one."""
        return self._handle

    @property
    def size(self) -> int:
        """Number of ranks."""
        return dist.get_world_size(self._handle)

    def swap(self, own: Tensor, what: str) -> Tensor:
        """Return a small CPU tensor of every rank, stacked; collective.

        Args:
            own: of equal shape on all ranks.
            what: of messages.
        """
        rows = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(rows, own, group=self._handle)
        return torch.stack(rows)
