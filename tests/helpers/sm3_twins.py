# SPDX-License-Identifier: Apache-2.0
"""The same run of SM3 on whole tensors and on shards, compared bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from helpers.sm3_runs import same_bits
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from torch_sm3 import SM3

#: A mesh and placements; None for a plain tensor.
Where = "tuple[DeviceMesh, Sequence[Any]] | None"


def piece(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> Tensor:
    """Return this rank's part of a tensor, by torch's rules and without messages."""
    shape, start = compute_local_shape_and_global_offset(whole.shape, mesh, placements)
    for dim, (size, first) in enumerate(zip(shape, start, strict=True)):
        whole = whole.narrow(dim, min(first, whole.shape[dim] - size), size)
    return whole.clone()


def spread(whole: Tensor, where: Any) -> Tensor:
    """Return a tensor as a DTensor, or a copy where it is to be plain."""
    if where is None:
        return whole.clone()
    mesh, placements = where
    return DTensor.from_local(
        piece(whole, mesh, placements),
        mesh,
        placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def assert_is_part(part: Tensor, whole: Tensor, name: str) -> None:
    """Fail unless a tensor of the sharded run is this rank's part of the plain one."""
    mine = part
    if isinstance(part, DTensor):
        assert part.shape == whole.shape, f"{name}: {part.shape}, not {whole.shape}"
        whole = piece(whole, part.device_mesh, part.placements)
        mine = part.to_local()
    assert same_bits(mine, whole), f"{name}:\n{mine}\nis not\n{whole}"


class Twin:
    """One problem with plain parameters and with shards of them.

    Args:
        weights: initial values, equal on all ranks.
        wheres: mesh and placements of each, or None.
        options: of both optimizers.
    """

    def __init__(
        self, weights: Sequence[Tensor], wheres: Sequence[Any], **options: Any
    ) -> None:
        self.wheres = wheres
        self.plain = [torch.nn.Parameter(weight.clone()) for weight in weights]
        self.shards = [
            torch.nn.Parameter(spread(weight, where))
            for weight, where in zip(weights, wheres, strict=True)
        ]
        self.one = SM3(self.plain, **options)
        self.other = SM3(self.shards, **options)

    def set_grads(self, seed: int, scale: float = 1.0) -> None:
        """Give both the same gradients, equal on all ranks."""
        generator = torch.Generator().manual_seed(seed)
        for p, q, where in zip(self.plain, self.shards, self.wheres, strict=True):
            grad = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.grad = (grad * scale).to(p.dtype)
            q.grad = spread(p.grad, where)

    def run(self, steps: int, start: int = 0) -> Twin:
        """Do steps of both."""
        for seed in range(start, start + steps):
            self.set_grads(seed)
            self.one.step()
            self.other.step()
        return self

    def check(self, name: str = "") -> None:
        """Fail unless every bit of parameters and state agrees."""
        self.other.state_dict()
        for i, (p, q) in enumerate(zip(self.plain, self.shards, strict=True)):
            assert_is_part(q.detach(), p.detach(), f"{name}: parameter {i}")
            theirs, ours = self.one.state[p], self.other.state[q]
            assert theirs.keys() == ours.keys(), f"{name}: {ours.keys()}"
            for key, value in theirs.items():
                assert_is_part(ours[key], value, f"{name}: {key} of parameter {i}")
