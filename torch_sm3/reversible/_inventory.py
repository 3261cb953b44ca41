# SPDX-License-Identifier: Apache-2.0
"""What is below the layers of one F, and what calls have learned about it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

#: Attributes that every module has.
_STANDARD = frozenset(nn.Module().__dict__)


class Inventory:
    """All modules, buffers and gradient-requiring tensors below some layers.

    It is taken anew for every first run: parameters may be replaced between two calls,
    and one flat walk costs less than a single small kernel.
    """

    __slots__ = ("_links", "buffers", "modules", "owned")

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        modules = list(layers)
        seen = set(modules)
        owned: dict[int, Tensor] = {}
        buffers: list[tuple[nn.Module, str, Tensor]] = []
        links: list[tuple[dict[str, Any], str, Any]] = []

        for module in modules:  # grows while it is walked
            for name, child in module._modules.items():
                if child is not None and child not in seen:
                    seen.add(child)
                    modules.append(child)
                    links.append((module._modules, name, child))
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.requires_grad:
                    owned[id(parameter)] = parameter
                    links.append((module._parameters, name, parameter))
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    if buffer.requires_grad:
                        owned[id(buffer)] = buffer
                        links.append((module._buffers, name, buffer))
                    else:
                        buffers.append((module, name, buffer))
            # Weights that a wrapper made and set as plain attributes, for instance
            # in the replicas of nn.DataParallel.
            attributes = module.__dict__
            for name in attributes.keys() - _STANDARD:
                value = attributes[name]
                if isinstance(value, Tensor) and value.requires_grad:
                    owned[id(value)] = value
                    links.append((attributes, name, value))
        self.modules = modules
        self.owned = list(owned.values())
        self.buffers = buffers
        self._links = links

    def drop_results(self) -> None:
        """Drop computed attributes that a run of the layers has replaced.

        They were results of an earlier run, which a module keeps to be looked at.
        """
        gone = {
            id(value)
            for home, name, value in self._links
            if isinstance(value, Tensor)
            and not value.is_leaf
            and home.get(name) is not value
        }
        if gone:
            self.owned = [tensor for tensor in self.owned if id(tensor) not in gone]
            self._links = [link for link in self._links if id(link[2]) not in gone]

    def stands(self) -> bool:
        """Tell whether modules and tensors are still those that were found."""
        for home, name, value in self._links:
            if home.get(name) is not value and not is_sharded(value):
                return False
        return True

    def flags(self) -> tuple[bool, ...]:
        """Return the training flag of every module."""
        return tuple([module.training for module in self.modules])


def is_sharded(tensor: Tensor) -> bool:
    """Tell whether a parameter is a shard, in whose place others come to be used."""
    # Nothing can be sharded while the module that shards is not imported.
    tensors: Any = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(tensor, tensors.DTensor)


class Learned:
    """What the first calls taught about one F; plain data, so it pickles."""

    def __init__(self) -> None:
        #: For each training-flag pattern, positions of the buffers that F changes.
        self.changed: dict[tuple[Any, ...], tuple[int, ...]] = {}
        #: Shape of a tensor that F needs the gradient of and nothing declares; empty
        #: if there is none, None until F's graph was searched.
        self.undeclared: tuple[Any, ...] | None = None
        #: Whether F returned other bits with grad than without; None: not known yet.
        self.grad_matters: bool | None = None
        #: For each training-flag pattern, whether F drew random numbers on a CUDA
        #: device.
        self.draws_on_cuda: dict[tuple[bool, ...], bool] = {}
