# SPDX-License-Identifier: Apache-2.0
"""SM3 for engines that hand over gradients instead of setting ``param.grad``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_sm3.optim._sm3 import SM3


class FunctionalSM3:
    """SM3 as ``torch.distributed.optim`` wants it.

    DDP's fused optimizer, ``DistributedOptimizer`` and ``ZeroRedundancyOptimizer`` with
    ``overlap_with_ddp=True`` make it by themselves where they are given
    :class:`torch_sm3.SM3`, once ``torch_sm3.distributed`` is imported.

    Args:
        params: parameters; more may come by :meth:`step_param`.
        args: options of :class:`torch_sm3.SM3`.
        _allow_empty_param_list: no parameters are no error.
        kwargs: options of :class:`torch_sm3.SM3`.

    Raises:
        ValueError: for no parameters, and as :class:`torch_sm3.SM3`.

    Example:
        >>> from torch_sm3.distributed import FunctionalSM3
        >>> weight = torch.zeros(2, 3)
        >>> FunctionalSM3([weight], lr=0.1).step([torch.ones(2, 3)])
        >>> weight[0]
        tensor([-0.1000, -0.1000, -0.1000])
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        *args: Any,
        _allow_empty_param_list: bool = False,
        **kwargs: Any,
    ) -> None:
        if not params and not _allow_empty_param_list:
            raise ValueError("optimizer got an empty parameter list")
        # The one group that engines read and write options of.
        group: dict[str, Any] = {"params": list(params)}
        self._optimizer = SM3([group], *args, **kwargs)
        self.param_group = self._optimizer.param_groups[0]
        self._ordinals: dict[Tensor, int] = {}

    @property
    def state(self) -> Any:
        """State by parameter, as of :class:`torch_sm3.SM3`."""
        return self._optimizer.state

    def step(self, gradients: Sequence[Tensor | None]) -> None:
        """Do one step.

        Args:
            gradients: one for each parameter; None leaves it as it is.

        Raises:
            ValueError: for another number of gradients.
        """
        params = self.param_group["params"]
        if len(params) != len(gradients):
            raise ValueError(
                f"FunctionalSM3.step: expected {len(params)} gradients, but got "
                f"{len(gradients)} (argument 'gradients')"
            )
        self._step(zip(params, gradients, strict=True))

    def step_param(self, param: Tensor, grad: Tensor | None) -> None:
        """Do one step on one parameter, which need not be known.

        Args:
            param: the parameter.
            grad: its gradient; None does nothing.
        """
        if param not in self._numbered():
            self.param_group["params"].append(param)
            self._optimizer._known_messages = None
        self._step([(param, grad)])

    def _numbered(self) -> dict[Tensor, int]:
        params = self.param_group["params"]
        if len(self._ordinals) != len(params):
            self._ordinals = {param: i for i, param in enumerate(params)}
        return self._ordinals

    @torch.no_grad()
    def _step(self, pairs: Any) -> None:
        ordinals, optimizer = self._numbered(), self._optimizer
        optimizer._settle()
        works = [
            work
            for param, grad in pairs
            if grad is not None
            for work in optimizer._works_of(
                param, self.param_group, ordinals[param], grad
            )
        ]
        optimizer._run(works)


def register() -> None:
    """Tell ``torch.distributed.optim`` of :class:`FunctionalSM3`."""
    from torch.distributed.optim.utils import register_functional_optim

    register_functional_optim(SM3, FunctionalSM3)
