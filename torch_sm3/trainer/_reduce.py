# SPDX-License-Identifier: Apache-2.0
"""Gradients of a layer over all ranks: their mean, or their Adasum."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# Larger gradients are reduced where they are, so that no layer is there twice.
_BUCKET_BYTES = 1 << 20

Grads = list[Tensor | None]


class Pending:
    """Gradients on their way.

    Args:
        finish: waits and returns them.
    """

    def __init__(self, finish: Callable[[], Grads]) -> None:
        self._finish = finish

    def wait(self) -> Grads:
        """Return the gradients when all ranks have them."""
        return self._finish()


class Reducer:
    """Combines what the ranks of a process group hold, over a group of its own.

    Args:
        op: how messages call the caller.
        process_group: a group, the ranks to make one of, or None for the default
            group, or for a single process where no group was initialised.
        adasum: combine gradients by Adasum instead of by their mean.
        device: of the gradients.

    Raises:
        RuntimeError: if a group is asked for and torch.distributed not initialised.
        ValueError: if this rank is not in the group.
    """

    def __init__(
        self, op: str, process_group: Any, adasum: bool, device: torch.device
    ) -> None:
        group = _resolve(op, process_group)
        self.rank, self.size = 0, 1
        self._device = device
        self._group: Any = None
        self._adasum: Any = None
        self.close: Callable[[], object] = _nothing
        if group is None:
            return
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.size == 1:
            return
        # At first use: it takes half a second to import.
        from torch_sm3 import distributed

        self._group = distributed.own_group(group)
        groups = [self._group]
        if adasum:
            if device.type != "cpu":
                # Adasum runs on the CPU, over Gloo.
                groups.append(distributed.own_group(group, backend="gloo"))
            self._adasum = distributed.AdasumState(groups[-1])
        self.close = weakref.finalize(self, _close, self._adasum, groups)

    def start(self, parameters: Sequence[nn.Parameter], grads: Grads) -> Pending:
        """Begin to combine the gradients of one layer; collective.

        Args:
            parameters: of the layer, the same on all ranks.
            grads: one for each, None where this rank has none. They are given away.
                Where another rank has one, this rank counts as having zeros.
        """
        if self._group is None or not parameters:
            return Pending(lambda: grads)
        if any(grad is not None and grad.is_sparse for grad in grads):
            raise NotImplementedError(
                f"trainer: expected dense gradients on {self.size} ranks, but got a "
                "sparse one (argument 'process_group')"
            )
        filled = [
            torch.zeros_like(p) if grad is None else grad
            for p, grad in zip(parameters, grads, strict=True)
        ]
        has = filled[0].new_tensor([float(grad is not None) for grad in grads])
        begin = self._begin_mean if self._adasum is None else self._begin_adasum
        wait = begin([*filled, has])

        def finish() -> Grads:
            wait()
            # Who has a gradient need not ask, and so does not wait for the device.
            return [
                new if old or bool(has[i]) else None
                for i, (new, old) in enumerate(zip(filled, mine, strict=True))
            ]

        mine = [grad is not None for grad in grads]
        return Pending(finish)

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of a tensor over all ranks."""
        if self._group is None:
            return value
        value = value / self.size
        dist.all_reduce(value, group=self._group)
        return value

    def any(self, flag: Tensor) -> Tensor:
        """Return the largest of the ranks' flags."""
        if self._group is not None:
            flag = flag.clone()
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group)
        return flag

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite tensors by those of the first rank."""
        if self._group is None:
            return
        for tensor in tensors:
            sent = tensor.detach().to(self._device).contiguous()
            dist.broadcast(sent, group_src=0, group=self._group)
            with torch.no_grad():
                tensor.copy_(sent)

    def _begin_mean(self, tensors: list[Tensor]) -> Callable[[], None]:
        works: list[Any] = []
        small: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            if tensor.nbytes < _BUCKET_BYTES:
                small.setdefault(tensor.dtype, []).append(tensor)
            else:
                works.append(self._sum(_flat(tensor.div_(self.size))))
        flats = []
        for bucket in small.values():
            flats.append(torch.cat([t.reshape(-1) for t in bucket]).div_(self.size))
            works.append(self._sum(flats[-1]))

        def wait() -> None:
            for work in works:
                work.wait()
            for flat, bucket in zip(flats, small.values(), strict=True):
                parts = flat.split([t.numel() for t in bucket])
                for tensor, part in zip(bucket, parts, strict=True):
                    tensor.copy_(part.view_as(tensor))

        return wait

    def _sum(self, flat: Tensor) -> Any:
        return dist.all_reduce(flat, group=self._group, async_op=True)

    def _begin_adasum(self, tensors: list[Tensor]) -> Callable[[], None]:
        from torch_sm3 import distributed

        *grads, has = tensors
        flag = self._sum(has)
        on_host = [grad.cpu() for grad in grads]
        future = distributed.adasum_all_reduce(
            on_host, state=self._adasum, async_op=True
        )

        def wait() -> None:
            flag.wait()
            if future is not None:
                future.wait()
            for grad, combined in zip(grads, on_host, strict=True):
                if grad is not combined:
                    grad.copy_(combined)

        return wait


def _nothing() -> None:
    """Close nothing."""


def _resolve(op: str, process_group: Any) -> Any:
    ready = dist.is_available() and dist.is_initialized()
    if process_group is None:
        return dist.group.WORLD if ready else None
    if not ready:
        raise RuntimeError(
            f"{op}: expected torch.distributed to be initialised, but got "
            f"{process_group!r} before init_process_group (argument 'process_group')"
        )
    if isinstance(process_group, dist.ProcessGroup):
        return process_group
    if isinstance(process_group, (list, tuple, range)):
        ranks = list(process_group)
        if dist.get_rank() in ranks:
            return dist.new_group(ranks, use_local_synchronization=True)
    # Also what torch.distributed.new_group gives to ranks outside.
    raise ValueError(
        f"{op}: expected a process group that contains rank {dist.get_rank()}, but "
        f"got {process_group!r} (argument 'process_group')"
    )


def _flat(tensor: Tensor) -> Tensor:
    """Return the memory of a dense tensor as one dimension."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _close(state: Any, groups: Sequence[Any]) -> None:
    if state is not None:
        state.close()
    # The user may have destroyed all groups before.
    with contextlib.suppress(ValueError, AssertionError):
        for group in groups:
            dist.destroy_process_group(group)
