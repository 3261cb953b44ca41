# SPDX-License-Identifier: Apache-2.0
"""Give everything that a trainer holds new memory, in one piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def defragment(
    device: torch.device, tensors: Sequence[Any], foreign: Sequence[Tensor]
) -> None:
    """Send tensors to the host, empty the caching allocator, and fetch them again.

    Tensors that share memory still do so afterwards.

    Args:
        device: of the tensors to be moved.
        tensors: what the caller holds there; others than tensors are left alone.
        foreign: tensors of somebody else, whose memory is not touched.
    """
    theirs = {tensor.untyped_storage().data_ptr() for tensor in foreign}
    mine: dict[int, dict[int, Tensor]] = {}
    for tensor in tensors:
        is_here = isinstance(tensor, Tensor) and tensor.device == device
        if is_here and tensor.layout is torch.strided:
            address = tensor.untyped_storage().data_ptr()
            if address and address not in theirs:
                mine.setdefault(address, {})[id(tensor)] = tensor
    groups = [list(group.values()) for group in mine.values()]
    for group in groups:
        _move(group, _on(torch.device("cpu"), group[0].untyped_storage()))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    for group in groups:
        _move(group, _on(device, group[0].untyped_storage()))


def _on(device: torch.device, storage: torch.UntypedStorage) -> torch.UntypedStorage:
    moved = torch.UntypedStorage(storage.nbytes(), device=device)
    moved.copy_(storage)
    return moved


def _move(tensors: Sequence[Tensor], storage: torch.UntypedStorage) -> None:
    """Give tensors that share one memory another."""
    for tensor in tensors:
        place = (tensor.storage_offset(), tensor.shape, tensor.stride())
        moved = torch.empty(0, dtype=tensor.dtype, device=storage.device)
        tensor.data = moved.set_(storage, *place)
