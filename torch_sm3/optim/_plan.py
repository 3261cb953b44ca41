# SPDX-License-Identifier: Apache-2.0
"""What stays the same from step to step, and the check that it still does.

A step on thousands of small tensors costs what Python costs for each of them. The
lists are therefore made once; before each step they are compared, by identity and
without a Python loop, with what they were made from.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor

from torch_sm3.optim._fused import Entry, Lists
from torch_sm3.optim._options import SHAPING


def same(one: list[Any], other: list[Any]) -> bool:
    """Tell whether two lists hold the same objects."""
    return len(one) == len(other) and all(map(is_, one, other))


def unique(params: Iterable[Tensor]) -> list[Tensor]:
    """Return parameters in their order, each once."""
    return list({id(param): param for param in params}.values())


@dataclass
class Lane:
    """Parameters of one group and one device that go through one implementation."""

    group: dict[str, Any]
    device: torch.device
    path: str  # "fused", "foreach" or "loop"
    owners: list[Tensor] = field(default_factory=list)
    ordinals: list[int] = field(default_factory=list)
    # None where entries are made anew at each step, see SM3._entry.
    entries: list[Entry] | None = None
    # For a step in which every owner has a dense gradient.
    whole: Lists | None = None


@dataclass
class Work:
    """One call of one implementation in one step."""

    group: dict[str, Any]
    device: torch.device
    path: str
    entries: list[Entry]
    grads: list[Tensor]
    whole: Lists | None = None
    # One coalesced gradient.
    sparse: bool = False

    @property
    def owners(self) -> list[Tensor]:
        """The parameters of the optimizer that the call updates."""
        if self.whole is not None:
            return self.whole.params
        return [entry.owner for entry in self.entries]


def _options_of(group: dict[str, Any]) -> tuple[Any, ...]:
    return (*[group[key] for key in SHAPING], group["momentum"] > 0)


def _states(state: dict[Any, Any]) -> list[dict[str, Any]]:
    return [one for one in state.values() if type(one) is dict]


@dataclass
class Plan:
    """The lanes of an optimizer, with what they were made from."""

    lanes: list[Lane]
    # Parameters without state, which get it with their first gradient.
    waiting: list[Tensor]
    _groups: list[dict[str, Any]]
    _params: list[list[Tensor]]
    _options: list[tuple[Any, ...]]
    _keys: list[Any]
    _states: list[dict[str, Any]]
    _values: list[Any]
    _owners: list[Tensor]
    _devices: list[torch.device]

    @classmethod
    def of(
        cls,
        groups: list[dict[str, Any]],
        state: dict[Any, Any],
        lanes: list[Lane],
        waiting: list[Tensor],
    ) -> Plan:
        """Return the plan of an optimizer as it is now."""
        states = _states(state)
        owners = [owner for lane in lanes for owner in lane.owners]
        return cls(
            lanes,
            waiting,
            list(groups),
            [list(group["params"]) for group in groups],
            [_options_of(group) for group in groups],
            list(state),
            states,
            list(chain.from_iterable(map(dict.values, states))),
            owners,
            [owner.device for owner in owners],
        )

    def holds(self, groups: list[dict[str, Any]], state: dict[Any, Any]) -> bool:
        """Tell whether nothing has changed that the lanes depend on."""
        if not same(groups, self._groups) or not same(list(state), self._keys):
            return False
        for group, params, options in zip(
            groups, self._params, self._options, strict=True
        ):
            if not same(group["params"], params) or _options_of(group) != options:
                return False
        states = _states(state)
        return (
            same(states, self._states)
            and same(list(chain.from_iterable(map(dict.values, states))), self._values)
            and [owner.device for owner in self._owners] == self._devices
            and all(param.grad is None for param in self.waiting)
        )
