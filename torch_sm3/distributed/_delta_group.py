# SPDX-License-Identifier: Apache-2.0
"""The ranks of delta mode, for what is not a change of parameters."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from torch_sm3.distributed._state import AdasumState


class Group:
    """The process group behind a state, which may come, go and change.

    Args:
        state: the state.
    """

    def __init__(self, state: AdasumState) -> None:
        self._state = state

    @property
    def handle(self) -> dist.ProcessGroup:
        """The user's process group; RuntimeError where the state is closed."""
        # An unpickled state finds the default group at its first use.
        self._state._bound("AdasumOptimizer")
        group = self._state.process_group
        assert group is not None, "a bound state has a group"
        return group

    @property
    def size(self) -> int:
        """Number of ranks."""
        return dist.get_world_size(self.handle)

    def swap(self, own: Tensor, what: str) -> Tensor:
        """Return a small CPU tensor of every rank, stacked; collective.

        Args:
            own: of equal shape on all ranks.
            what: of messages.
        """
        return self._state._swap(own, what)
