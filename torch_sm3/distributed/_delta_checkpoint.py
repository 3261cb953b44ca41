# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of delta mode: the wrapped optimizer's, and what lies between steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import Optimizer

from torch_sm3.distributed._delta_group import Group
from torch_sm3.distributed._delta_layers import Layer, Layout, real
from torch_sm3.distributed._delta_shared import SharingOptimizer
from torch_sm3.distributed._state import AdasumState


class CheckpointedDelta(SharingOptimizer):
    """Add what a step leaves behind, ``state_dict`` and ``load_state_dict``.

    Args:
        optimizer: the wrapped one.
        process_group: as of :class:`AdasumOptimizer`.
        state: as there.
        names: names of parameters.
        bucket_bytes: as there.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        process_group: dist.ProcessGroup | None,
        state: AdasumState | None,
        names: dict[Tensor, str],
        bucket_bytes: int,
    ) -> None:
        super().__init__(optimizer)
        self._owns_state = state is None
        #: What combines the updates.
        self.adasum_state = AdasumState(process_group) if state is None else state
        self._group = Group(self.adasum_state)
        self._layout = Layout(names, bucket_bytes)
        # Since the last combination: steps, and the parameters before the first.
        self._local_steps = 0
        self._starts: dict[Tensor, Tensor] | None = None
        self._consolidated = not optimizer.state

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state dict and what delta mode adds.

        Nothing is communicated. ``"consolidated"`` tells whether all ranks return the
        same; where not, each saves its own. Between combinations (``combine_every``)
        the parameters' start values are part of it.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        own: dict[str, Any] = {"local_steps": self._local_steps}
        if self._starts is not None:
            own["starts"] = [self._starts[x.param] for x in self._layout.layers]
        if self._owns_state:
            own["adasum"] = self.adasum_state.state_dict()
        full: dict[str, Any] = {
            **self._wrapped.state_dict(),
            "consolidated": self._consolidated or self._group.size == 1,
            "delta": own,
        }
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, full)
            full = full if changed is None else changed
        return full

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, or the wrapped optimizer's own.

        Args:
            state_dict: is not modified.

        Raises:
            ValueError: if it was saved between combinations of other parameters, or
                the wrapped optimizer refuses it.
        """
        full = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, full)
            full = full if changed is None else changed
        own = full.pop("delta", {})
        consolidated = bool(full.pop("consolidated", False))
        starts = check_starts(own.get("starts"), self._layout.layers)
        self._wrapped.load_state_dict(full)
        self._starts, self._consolidated = starts, consolidated
        self._local_steps = own.get("local_steps", 0)
        if self._owns_state and "adasum" in own:
            self.adasum_state.load_state_dict(own["adasum"])
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)


def check_starts(
    saved: Sequence[Tensor] | None, layers: Sequence[Layer]
) -> dict[Tensor, Tensor] | None:
    """Return saved start values by parameter, copied to where they are.

    Args:
        saved: in the order of the layers, None if there are none.
        layers: of the optimizer that loads them.

    Raises:
        ValueError: if they are of other parameters.
    """
    if saved is None:
        return None
    wanted = [tuple(real(layer.param).shape) for layer in layers]
    found = [tuple(start.shape) for start in saved]
    if found != wanted:
        raise ValueError(
            "AdasumOptimizer.load_state_dict: expected start values of shapes "
            f"{wanted}, but got {found} (argument 'state_dict')"
        )
    return {
        layer.param: start.to(layer.param.device, real(layer.param).dtype, copy=True)
        for layer, start in zip(layers, saved, strict=True)
    }
