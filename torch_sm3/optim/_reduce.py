# SPDX-License-Identifier: Apache-2.0
"""Maxima over processes: one message per group and step, whatever a rank has to say."""

from __future__ import annotations

import atexit
import contextlib
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
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


@dataclass(eq=False)
class _Message:
    """An all-reduce that is not waited for yet."""

    work: Any
    tensor: Tensor | None


@dataclass
class _Flight:
    """One message, and where its numbers belong."""

    message: _Message
    targets: list[Tensor | None]
    bucket: Bucket

    def land(self) -> None:
        """Wait for the message, no longer than its group's timeout; write results.

        On CUDA only the current stream waits.
        """
        self.message.work.wait()
        _in_the_air.discard(self.message)
        assert self.message.tensor is not None, "kept until the exit"
        pieces = self.message.tensor.split([slot.numel for slot in self.bucket.slots])
        pairs = [
            (target, piece.view_as(target))
            for target, piece in zip(self.targets, pieces, strict=True)
            if target is not None and piece.numel()
        ]
        if pairs:
            torch._foreach_copy_([a for a, _ in pairs], [b for _, b in pairs])


class Reduction:
    """The messages of one step, on their way until :meth:`wait`.

    Args:
        buckets: what is sent; the same on all processes of a group.
        lookup: returns what a slot reads and overwrites.
    """

    def __init__(self, buckets: Sequence[Bucket], lookup: Lookup) -> None:
        self._flights: list[_Flight] = []
        for slot in (slot for bucket in buckets for slot in bucket.slots):
            if slot.is_empty and (target := lookup(slot)) is not None:
                target.zero_()
        for bucket in buckets:
            self._send(bucket, lookup)

    def _send(self, bucket: Bucket, lookup: Lookup) -> None:
        mine = {(id(slot.param), slot.index) for slot in bucket.slots}
        for flight in self._flights:
            # A number that two groups reduce goes from one to the other.
            if any((id(s.param), s.index) in mine for s in flight.bucket.slots):
                self.wait()
                break
        targets = [lookup(slot) for slot in bucket.slots]
        tensor = torch.cat(
            [
                torch.zeros(slot.numel, dtype=bucket.dtype, device=bucket.device)
                if target is None
                else target.reshape(-1)
                for slot, target in zip(bucket.slots, targets, strict=True)
            ]
        )
        work = dist.all_reduce(
            tensor, op=dist.ReduceOp.MAX, group=bucket.group, async_op=True
        )
        message = _Message(work, tensor)
        self._flights.append(_Flight(message, targets, bucket))
        _in_the_air.difference_update([m for m in _in_the_air if m.work.is_completed()])
        _in_the_air.add(message)

    def wait(self) -> None:
        """Wait for all messages and write what they bring."""
        while self._flights:
            self._flights.pop(0).land()


# Also of optimizers that nobody has any more.
_in_the_air: set[_Message] = set()


@atexit.register
def _wait_at_exit() -> None:
    """Wait for messages without a use for them, but not for long.

    A thread of Gloo that lets go of a tensor of ours while the interpreter goes down
    would end the process by ``std::terminate``.
    """
    tensors = []
    for message in _in_the_air:
        tensors.append(weakref.ref(message.tensor))
        with contextlib.suppress(RuntimeError):
            message.work.wait(timedelta(seconds=10))
        message.work = message.tensor = None
    for _ in range(1000):
        if all(tensor() is None for tensor in tensors):
            break
        time.sleep(0.001)


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
