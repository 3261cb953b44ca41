# SPDX-License-Identifier: Apache-2.0
"""Bytes of the tensors that live, counted without the allocator's help."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from torch_sm3.pipeline._data import tensors_of


def _storages(value: Any) -> Iterator[torch.UntypedStorage]:
    for tensor in tensors_of(value):
        try:
            yield tensor.untyped_storage()
        except NotImplementedError:
            # A subclass that wraps other tensors; those pass by here as well.
            continue


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operators make while it is on.

    What an operator makes and drops inside its kernel is not seen.

    Attributes:
        peak: most bytes that lived at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        # The weak reference keeps an address from being used again.
        self._own: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operator and look at the storages of what it returns."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(result):
            key = storage._cdata
            if key in self._own or key not in given:
                self._own[key] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.live())
        return result

    def live(self) -> int:
        """Return the bytes of those storages that still live."""
        dead = [key for key, (weak, _) in self._own.items() if weak.expired()]
        for key in dead:
            del self._own[key]
        return sum(size for _, size in self._own.values())
