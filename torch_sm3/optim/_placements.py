# SPDX-License-Identifier: Apache-2.0
"""DTensors without importing their module: what lies on which process."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: Ranges ``[start, stop)`` of one dimension, in order, none of them empty.
Runs = tuple[tuple[int, int], ...]


class Cut(NamedTuple):
    """How one dimension of a mesh cuts the pieces of a dimension of a tensor.

    Args:
        mesh_dim: of the mesh.
        pieces: how many; the size of the mesh in that dimension.
        factor: cut into so many parts first, each of which is dealt out: what torch
            calls a strided shard, of a dimension that others cut before.
    """

    mesh_dim: int
    pieces: int
    factor: int


@dataclass(frozen=True)
class Spread:
    """Where the elements of a DTensor are.

    Args:
        shape: of the whole.
        cuts: per dimension of the tensor, in the order of the mesh.
        coordinate: of this process in the mesh.
    """

    shape: tuple[int, ...]
    cuts: tuple[tuple[Cut, ...], ...]
    coordinate: tuple[int, ...]

    def runs(self, dim: int, coordinate: Sequence[int] | None = None) -> Runs:
        """Return the ranges of a dimension at a coordinate, this process's if None."""
        at = self.coordinate if coordinate is None else coordinate
        runs: Runs = ((0, self.shape[dim]),) if self.shape[dim] else ()
        for cut in self.cuts[dim]:
            runs = _piece(runs, cut, at[cut.mesh_dim])
        return runs

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Sizes of the part on this process."""
        return tuple(length(self.runs(dim)) for dim in range(len(self.shape)))

    def all_runs(self, dim: int) -> Iterator[Runs]:
        """Yield the ranges of a dimension at every coordinate of the mesh."""
        cuts = self.cuts[dim]
        for at in product(*(range(cut.pieces) for cut in cuts)):
            whole = dict(zip((cut.mesh_dim for cut in cuts), at, strict=True))
            yield self.runs(dim, [whole.get(d, 0) for d in range(len(self.coordinate))])

    @property
    def mesh_dims(self) -> tuple[int, ...]:
        """Dimensions of the mesh that cut the tensor, in order."""
        return tuple(sorted(cut.mesh_dim for cuts in self.cuts for cut in cuts))

    def take(self, whole: Tensor) -> Tensor:
        """Return the part of a whole tensor on this process."""
        for dim, cuts in enumerate(self.cuts):
            if cuts:
                parts = [whole.narrow(dim, a, b - a) for a, b in self.runs(dim)]
                whole = torch.cat(parts or [whole.narrow(dim, 0, 0)], dim)
        return whole


def length(runs: Iterable[tuple[int, int]]) -> int:
    """Return how many elements ranges hold."""
    return sum(stop - start for start, stop in runs)


def _piece(runs: Runs, cut: Cut, number: int) -> Runs:
    """Return the elements of ranges that one process gets, as ``torch.chunk`` cuts."""
    total = length(runs)
    part = math.ceil(total / cut.factor)
    found: list[tuple[int, int]] = []
    for first in range(0, total, part or 1):
        inside = min(part, total - first)
        size = math.ceil(inside / cut.pieces)
        start = min(number * size, inside)
        stop = min(start + size, inside)
        found += _between(runs, first + start, first + stop)
    return _joined(found)


def _between(runs: Runs, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the elements of ranges from the ``start``-th to before the ``stop``-th."""
    before = 0
    for low, high in runs:
        a, b = max(start - before, 0), min(stop - before, high - low)
        if a < b:
            yield low + a, low + b
        before += high - low


def _joined(runs: Sequence[tuple[int, int]]) -> Runs:
    joined: list[tuple[int, int]] = []
    for start, stop in runs:
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    return tuple(joined)


def is_dtensor(tensor: object) -> bool:
    """Tell whether a tensor is a DTensor; torch's module for them is heavy."""
    if type(tensor) in (Tensor, torch.nn.Parameter):
        return False
    # Whoever has one has imported it.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Any) -> Tensor:
    """Return the part of a DTensor on this process, other tensors as they are."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def spread_of(tensor: Any, shape: Sequence[int], placements: Sequence[Any]) -> Spread:
    """Return where a DTensor with a parameter's mesh would be.

    Args:
        tensor: the parameter.
        shape: of the whole other tensor.
        placements: of the other tensor.

    Raises:
        ValueError: for a parameter whose elements are sums over processes, or on a
            process outside its mesh.
    """
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(
            f"SM3: expected parameters on meshes that contain this process, but got "
            f"one on {mesh} (argument 'params')"
        )
    cuts: list[list[Cut]] = [[] for _ in shape]
    for mesh_dim, placement in enumerate(placements):
        if placement.is_replicate():
            continue
        dim = getattr(placement, "dim", None)
        if dim is None:
            raise ValueError(
                "SM3: expected sharded or replicated parameters, but got placements "
                f"{tuple(placements)} (argument 'params')"
            )
        factor = getattr(placement, "split_factor", 1)
        cuts[dim].append(Cut(mesh_dim, mesh.size(mesh_dim), factor))
    return Spread(tuple(shape), tuple(map(tuple, cuts)), tuple(coordinate))


def assembled(
    part: Tensor, like: Any, shape: Sequence[int], placements: Sequence[Any]
) -> Tensor:
    """Return a DTensor on a parameter's mesh from the part on this process.

    Args:
        part: of this process; strides of the whole follow from the parameter's where
            the shapes are equal.
        like: the parameter.
        shape: of the whole.
        placements: of the whole.
    """
    from torch.distributed.tensor import DTensor

    whole = tuple(shape)
    strides = torch.empty(whole, device="meta").stride()
    if whole == tuple(like.shape):
        strides = like.stride()
    return DTensor.from_local(
        part,
        like.device_mesh,
        tuple(placements),
        run_check=False,
        shape=torch.Size(whole),
        stride=strides,
    )
