# SPDX-License-Identifier: Apache-2.0
"""An optimizer that has the groups and the state of another one."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer


class SharingOptimizer(Optimizer):
    """Hand over to a wrapped optimizer everything but the step.

    Args:
        optimizer: the wrapped one.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._wrapped = optimizer
        # The hooks of the base class, without groups of its own.
        super().__setstate__({})

    def __getstate__(self) -> dict[str, Any]:
        # As in the base class hooks stay behind, and what a schedule has put over step.
        return {
            key: value
            for key, value in self.__dict__.items()
            if key != "step" and not key.startswith("_optimizer_")
        }

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the wrapped optimizer."""
        return self._wrapped.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self._wrapped.param_groups = value

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """The state of the wrapped optimizer."""
        return self._wrapped.state

    @state.setter
    def state(self, value: defaultdict[Tensor, Any]) -> None:
        self._wrapped.state = value

    @property
    def defaults(self) -> dict[str, Any]:
        """The options of the wrapped optimizer's groups that do not set them."""
        return self._wrapped.defaults

    @defaults.setter
    def defaults(self, value: dict[str, Any]) -> None:
        self._wrapped.defaults = value

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer.

        The next step, on every rank, compares its parameters or broadcasts them.

        Args:
            param_group: as the wrapped optimizer takes it.
        """
        self._wrapped.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters.

        Args:
            set_to_none: free them instead of filling them with zeros.
        """
        self._wrapped.zero_grad(set_to_none)
