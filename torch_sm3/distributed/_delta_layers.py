# SPDX-License-Identifier: Apache-2.0
"""The parameters of an optimizer as Adasum's layers, cut into buckets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy


@dataclass(frozen=True)
class Layer:
    """A parameter and what messages call it."""

    param: Tensor
    name: str


@dataclass
class Bucket:
    """Layers of one device whose changes travel as one buffer."""

    device: torch.device
    #: Of the changes: float32, or float64 for float64 parameters.
    dtype: torch.dtype
    layers: list[Layer] = field(default_factory=list)
    numel: int = 0

    def add(self, layer: Layer) -> None:
        """Append a layer."""
        self.layers.append(layer)
        self.numel += real(layer.param).numel()

    @property
    def params(self) -> list[Tensor]:
        """The parameters of the layers."""
        return [layer.param for layer in self.layers]


def real(tensor: Tensor) -> Tensor:
    """Return a tensor without its graph, a complex one as pairs of real numbers."""
    plain = tensor.detach()
    return torch.view_as_real(plain) if plain.is_complex() else plain


def change_dtype(param: Tensor) -> torch.dtype:
    """Return the dtype in which a parameter's change is computed and sent."""
    return torch.float64 if real(param).dtype == torch.float64 else torch.float32


def cut(layers: Iterable[Layer], bucket_bytes: int) -> list[Bucket]:
    """Cut layers, in their order, into buckets of one device and dtype each.

    Args:
        layers: all layers.
        bucket_bytes: limit of a bucket's changes; a larger layer has its own bucket.
    """
    buckets: list[Bucket] = []
    open_ones: dict[tuple[torch.device, torch.dtype], Bucket] = {}
    for layer in layers:
        dtype = change_dtype(layer.param)
        key = layer.param.device, dtype
        bucket = open_ones.get(key)
        numel = real(layer.param).numel()
        if bucket is None or (bucket.numel + numel) * dtype.itemsize > bucket_bytes:
            bucket = open_ones[key] = Bucket(*key)
            buckets.append(bucket)
        bucket.add(layer)
    return buckets


class Layout:
    """What of an optimizer's parameters takes part, and how it is cut.

    A parameter takes part from when it first requires a gradient. It then stays, also
    frozen: momentum may move it still, and all ranks must agree on the buckets.

    Args:
        names: names of parameters, for messages and for ``exclude``.
        bucket_bytes: see :func:`cut`.
    """

    def __init__(self, names: dict[Tensor, str], bucket_bytes: int) -> None:
        self.buckets: list[Bucket] = []
        self.layers: list[Layer] = []
        self._names = names
        self._bucket_bytes = bucket_bytes
        self._devices: list[torch.device] = []

    def refresh(self, groups: Sequence[dict[str, Any]]) -> list[Layer]:
        """Follow the groups; return the layers that were not there before."""
        known = {layer.param for layer in self.layers}
        layers = [
            Layer(param, self._name(param, group, g, i))
            for g, group in enumerate(groups)
            for i, param in enumerate(group["params"])
            if param in known or (param.requires_grad and not is_lazy(param))
        ]
        devices = [layer.param.device for layer in layers]
        if devices == self._devices and _same(layers, self.layers):
            return []
        self.layers, self._devices = layers, devices
        self.buckets = cut(layers, self._bucket_bytes)
        return [layer for layer in layers if layer.param not in known]

    def _name(self, param: Tensor, group: dict[str, Any], g: int, i: int) -> str:
        if param in self._names:
            return self._names[param]
        # torch's own, of an optimizer that was given named parameters.
        names = group.get("param_names")
        return str(names[i]) if names else f"parameter {i} of group {g}"


def _same(one: list[Layer], other: list[Layer]) -> bool:
    return len(one) == len(other) and all(
        a.param is b.param for a, b in zip(one, other, strict=True)
    )
