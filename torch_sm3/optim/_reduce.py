# SPDX-License-Identifier: Apache-2.0
"""Maxima over processes: one message per group and step, whatever a rank has to say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Slot:
    """The place of one accumulator in a message.

    Args:
        param: the parameter that the optimizer holds.
        index: of the accumulator.
        numel: elements of it on this process, the same in the whole group.
        is_empty: no element of the parameter is here; its numbers start from 0.
    """

    param: Tensor
    index: int
    numel: int
    is_empty: bool


@dataclass
class Bucket:
    """What one group reduces in a step, in the order of the parameters."""

    group: Any
    device: torch.device
    dtype: torch.dtype
    slots: list[Slot] = field(default_factory=list)


#: Returns the accumulator of a slot on this process, None while there is no state.
Lookup = Callable[[Slot], "Tensor | None"]


class Reduction:
    """The messages of one step, on their way until :meth:`wait`.

    Args:
        buckets: what is sent; the same on all processes of a group.
        lookup: returns what a slot reads and overwrites.
    """

    def __init__(self, buckets: Sequence[Bucket], lookup: Lookup) -> None:
        self._flying: list[tuple[Any, Tensor, list[Tensor | None], Bucket]] = []
        for slot in (slot for bucket in buckets for slot in bucket.slots):
            if slot.is_empty and (target := lookup(slot)) is not None:
                target.zero_()
        for bucket in buckets:
            self._send(bucket, lookup)

    def _send(self, bucket: Bucket, lookup: Lookup) -> None:
        mine = {(id(slot.param), slot.index) for slot in bucket.slots}
        for *_, earlier in self._flying:
            # A number that two groups reduce goes from one to the other.
            if any((id(slot.param), slot.index) in mine for slot in earlier.slots):
                self.wait()
                break
        targets = [lookup(slot) for slot in bucket.slots]
        message = torch.cat(
            [
                torch.zeros(slot.numel, dtype=bucket.dtype, device=bucket.device)
                if target is None
                else target.reshape(-1)
                for slot, target in zip(bucket.slots, targets, strict=True)
            ]
        )
        work = dist.all_reduce(
            message, op=dist.ReduceOp.MAX, group=bucket.group, async_op=True
        )
        self._flying.append((work, message, targets, bucket))

    def wait(self) -> None:
        """Wait for the messages, no longer than their groups' timeouts; write results.

        On CUDA only the current stream waits.
        """
        while self._flying:
            work, message, targets, bucket = self._flying.pop(0)
            work.wait()
            pieces = message.split([slot.numel for slot in bucket.slots])
            pairs = [
                (target, piece.view_as(target))
                for target, piece in zip(targets, pieces, strict=True)
                if target is not None and piece.numel()
            ]
            if pairs:
                torch._foreach_copy_([a for a, _ in pairs], [b for _, b in pairs])


def agree(
    flag: Tensor | None, groups: Sequence[tuple[Any, torch.device]]
) -> Tensor | None:
    """Return a flag that is not 0 if any process of the groups gave one.

    Args:
        flag: one element of any dtype; None is 0.
        groups: with the device that each of them communicates on.
    """
    for group, device in groups:
        raised = torch.zeros((), device=device)
        if flag is not None:
            raised.copy_(flag.reshape(()) != 0)
        dist.all_reduce(raised, op=dist.ReduceOp.MAX, group=group)
        flag = raised
    return flag
