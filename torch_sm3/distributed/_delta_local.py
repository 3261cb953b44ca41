# SPDX-License-Identifier: Apache-2.0
"""The wrapped optimizer's step on some parameters, and what it may change."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer


class Gradients:
    """Hide all gradients, and show those of some parameters at a time.

    An optimizer passes over parameters without a gradient. Their groups stay whole:
    one that looks after state by them, or counts their places, sees no difference.

    Args:
        groups: of the optimizer.
    """

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        self._held = {p: p.grad for group in groups for p in group["params"]}

    def __enter__(self) -> Gradients:
        for param in self._held:
            param.grad = None
        return self

    def __exit__(self, *_: object) -> None:
        for param, grad in self._held.items():
            param.grad = grad

    @contextmanager
    def of(self, params: Sequence[Tensor]) -> Iterator[None]:
        """Show the gradients of some parameters."""
        for param in params:
            param.grad = self._held[param]
        try:
            yield
        finally:
            for param in params:
                # The step may have freed it.
                self._held[param], param.grad = param.grad, None


@contextmanager
def hooks_once(optimizer: Optimizer) -> Iterator[None]:
    """Run an optimizer's step hooks around several of its steps, not in each."""
    before = optimizer._optimizer_step_pre_hooks
    after = optimizer._optimizer_step_post_hooks
    for hook in list(before.values()):
        hook(optimizer, (optimizer,), {})
    optimizer._optimizer_step_pre_hooks = OrderedDict()
    optimizer._optimizer_step_post_hooks = OrderedDict()
    try:
        yield
    finally:
        optimizer._optimizer_step_pre_hooks = before
        optimizer._optimizer_step_post_hooks = after
    for done in list(after.values()):
        done(optimizer, (optimizer,), {})


class GroupValues:
    """Remember the options of groups, to see whether a step has changed any.

    Args:
        groups: of the optimizer.
    """

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        self._values = [
            {key: _remembered(value) for key, value in group.items() if key != "params"}
            for group in groups
        ]

    def check(self, groups: Sequence[dict[str, Any]]) -> None:
        """Compare.

        Raises:
            RuntimeError: naming what has changed.
        """
        for index, (old, group) in enumerate(zip(self._values, groups, strict=True)):
            for key in sorted(old.keys() | (group.keys() - {"params"})):
                now = _remembered(group[key]) if key in group else None
                if key not in old or not _equal(old[key], now):
                    raise RuntimeError(
                        "AdasumOptimizer.step: expected a wrapped step that changes "
                        f"parameters and their state alone, but got another {key!r} in "
                        f"group {index}; such an optimizer needs whole=True (argument "
                        "'whole')"
                    )


def _remembered(value: Any) -> Any:
    if isinstance(value, Tensor):
        # Its counter tells of changes in place without a look at the device.
        return value, value._version
    return copy.deepcopy(value) if isinstance(value, (list, dict, set)) else value


def _equal(old: Any, now: Any) -> bool:
    if isinstance(old, tuple) and old and isinstance(old[0], Tensor):
        return isinstance(now, tuple) and now[0] is old[0] and now[1:] == old[1:]
    return now is old or bool(now == old)
