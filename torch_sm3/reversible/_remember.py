# SPDX-License-Identifier: Apache-2.0
"""Discrete choices of F that its recompute must not make anew."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_sm3 import _ops
from torch_sm3.reversible._ledger import Ledger


def remember(x: Tensor, key: str | None = None) -> Tensor:
    r"""Return ``x``; when F is run again, return what it was in the first run.

    Streams are rebuilt up to rounding, so a choice that hangs on a comparison could
    turn out otherwise in the recompute. Use it for every discrete choice: the indices
    of ``topk`` and ``argmax``, masks, hash buckets, expert routing.

    In the first run of a function of a block ``x`` is saved, a bool tensor in one bit
    for each element. In the recompute the saved value is returned, its gradient passes
    to ``x`` unchanged. Everywhere else it is an identity.

    Args:
        x: the tensor.
        key: name of the value within one run of F. Without it values are told apart by
            the order of the calls. A checkpointed region of F runs once more, so there
            a key is needed.

    Returns:
        ``x``, or what it was in the first run.

    Raises:
        RuntimeError: in the recompute, if number, keys, shapes or dtypes of the
            remembered tensors differ from the first run.

    Example:
        >>> import torch
        >>> from torch_sm3.reversible import remember
        >>> scores = torch.tensor([0.3, 0.9, 0.1])
        >>> remember(scores.topk(2).indices)
        tensor([1, 0])
    """
    for listen in _listeners.of_thread:
        listen(x)
    return _ops.reversible_remember(x, "" if key is None else key)


class _Listeners(threading.local):
    """Who is told of calls of :func:`remember` in this thread."""

    def __init__(self) -> None:
        self.of_thread: list[Callable[[Tensor], None]] = []


_listeners = _Listeners()


@contextlib.contextmanager
def listener(listen: Callable[[Tensor], None]) -> Iterator[None]:
    """Call ``listen`` with every tensor that is remembered meanwhile."""
    _listeners.of_thread.append(listen)
    try:
        yield
    finally:
        _listeners.of_thread.remove(listen)


class Memory:
    """What one F remembered in its first run.

    Args:
        name: how messages call this F.
    """

    __slots__ = ("_memory", "_places")

    def __init__(self, name: str) -> None:
        self._memory = torch.classes.torch_sm3.ReversibleMemory()
        self._memory.name = name
        self._places: range | None = None

    @contextlib.contextmanager
    def recording(self, ledger: Ledger) -> Iterator[None]:
        """Remember what F asks for; keep it in the ledger."""
        memory = self._memory
        memory.enter("record")
        try:
            yield
        finally:
            memory.leave()
        if len(memory):
            self._places = ledger.keep_all(memory.tensors())
            memory.clear_tensors()

    @contextlib.contextmanager
    def recalling(self, saved: Sequence[Tensor]) -> Iterator[Any]:
        """Give F what it remembered."""
        memory = self._load(saved)
        memory.enter("recall")
        try:
            yield
            memory.finish()
        finally:
            memory.leave()
            memory.clear_tensors()

    @contextlib.contextmanager
    def differentiating(self, saved: Sequence[Tensor]) -> Iterator[None]:
        """Give regions of F that checkpoint runs once more what they remembered."""
        memory = self._load(saved)
        memory.enter("vjp")
        try:
            yield
        finally:
            memory.leave()
            memory.clear_tensors()

    def _load(self, saved: Sequence[Tensor]) -> Any:
        if self._places is not None:
            self._memory.load([saved[i] for i in self._places])
        return self._memory
