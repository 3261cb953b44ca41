# SPDX-License-Identifier: Apache-2.0
"""Start values of delta mode: equal on all ranks, by comparison or by broadcast."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from torch_sm3 import _ops
from torch_sm3.distributed._delta_group import Group
from torch_sm3.distributed._delta_layers import Layer, real


def agree(op: str, group: Group, layers: Sequence[Layer], broadcast: bool) -> None:
    """Make sure that parameters are equal on all ranks; collective.

    Args:
        op: of messages.
        group: the ranks.
        layers: what is compared.
        broadcast: copy the parameters of the group's first rank instead.

    Raises:
        RuntimeError: on every rank, naming the first parameter that differs and the
            ranks that have another one than the group's first rank.
    """
    if group.size == 1:
        return
    _agree_on_shapes(op, group, layers)
    if broadcast:
        for layer in layers:
            value = real(layer.param)
            buffer = value.contiguous()
            dist.broadcast(buffer, group_src=0, group=group.handle)
            if buffer is not value:
                value.copy_(buffer)
        return
    hashes = [_ops.reversible_checksum(real(layer.param)).cpu() for layer in layers]
    seen = group.swap(torch.stack(hashes), f"{op}: start values")
    differ = seen != seen[:1]
    for layer, column in zip(layers, differ.T, strict=True):
        ranks = column.nonzero().flatten().tolist()
        if ranks:
            raise RuntimeError(
                f"{op}: expected equal start values on all ranks, but got another "
                f"{layer.name} on rank{_listed(ranks)} than on rank 0; pass "
                "broadcast=True to copy those of rank 0 (argument 'broadcast')"
            )


def _agree_on_shapes(op: str, group: Group, layers: Sequence[Layer]) -> None:
    what = [(tuple(x.param.shape), str(x.param.dtype)) for x in layers]
    digest = hashlib.blake2b(repr(what).encode(), digest_size=7).digest()
    own = torch.tensor([len(layers), int.from_bytes(digest, "little")])
    seen = group.swap(own, f"{op}: parameters")
    for rank, (count, other) in enumerate(seen.tolist()):
        if (count, other) != tuple(seen[0].tolist()):
            raise RuntimeError(
                f"{op}: expected parameters of the same shapes and dtypes in the same "
                f"order on all ranks, but got others on rank {rank} ({count}) than on "
                f"rank 0 ({int(seen[0, 0])}) (argument 'optimizer')"
            )


def _listed(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f" {ranks[0]}"
    return f"s {', '.join(map(str, ranks[:8]))}" + (", ..." if ranks[8:] else "")
