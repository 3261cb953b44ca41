# SPDX-License-Identifier: Apache-2.0
"""What a process uses: its resident memory over time, and its live tensors, counted.

The first is what the kernel says of the whole process and so includes everything,
the interpreter and torch's libraries too. The second knows only tensors, but knows
them to the byte and does not depend on how an allocator reuses memory.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_PAGE = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Return the process's resident memory now, from ``/proc/self/statm``."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


def peak_bytes() -> int:
    """Return the largest resident memory so far, ``VmHWM`` of ``/proc/self/status``."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("memory: expected VmHWM in /proc/self/status, but got none")


def reset_peak() -> None:
    """Let :func:`peak_bytes` start again from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


class Sampler:
    """Records the resident memory of this process from a thread of its own.

    Args:
        interval: seconds between two samples.
        trace: samples of an earlier process that this one continues.
    """

    def __init__(
        self, interval: float = 0.05, trace: list[tuple[float, int]] | None = None
    ) -> None:
        self.interval = interval
        #: Seconds since the start and resident bytes.
        self.trace = list(trace or [])
        self._offset = self.trace[-1][0] if self.trace else 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._record, daemon=True)

    def _record(self) -> None:
        start = time.monotonic() - self._offset
        while not self._stop.wait(self.interval):
            self.trace.append((time.monotonic() - start, resident_bytes()))

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of the tensors that operators made and that are still alive.

    It sees every operator below autograd, in the backward pass and in recomputations
    as well, holds no tensor alive, and counts a storage once however many views it
    has. Memory that an operator frees before it returns is not seen.

    Args:
        known: tensors that are not counted, such as parameters.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        #: The largest sum after any operator.
        self.peak = 0
        #: The largest sum at a call of :meth:`mark`.
        self.marked = 0

    def live_bytes(self) -> int:
        """Return the sum now."""
        for key in [k for k, (ref, _) in self._storages.items() if ref.expired()]:
            del self._storages[key]
        return sum(size for _, size in self._storages.values())

    def mark(self) -> None:
        """Note the sum at this place, for example at the end of a forward pass."""
        self.marked = max(self.marked, self.live_bytes())

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one operator and count what it made."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                storage = leaf.untyped_storage()
                if storage._cdata not in self._known:
                    known = (StorageWeakRef(storage), storage.nbytes())
                    self._storages.setdefault(storage._cdata, known)
        self.peak = max(self.peak, self.live_bytes())
        return result


def tensor_bytes(state: Any) -> int:
    """Return the bytes of all tensors in a nest of dictionaries and lists."""
    return sum(leaf.nbytes for leaf in tree_leaves(state) if isinstance(leaf, Tensor))


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of every tensor in an optimizer's state."""
    return tensor_bytes(dict(optimizer.state))
