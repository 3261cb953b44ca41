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
            remembered tensors differ from the first run; in the first run, in a
            checkpointed region under the graph engine, unless streams are exact.

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
        #: Nested :func:`unobserved` regions.
        self.deaf = 0


_listeners = _Listeners()


@contextlib.contextmanager
def listener(listen: Callable[[Tensor], None]) -> Iterator[None]:
    """Call ``listen`` with every tensor that is remembered meanwhile."""
    _listeners.of_thread.append(listen)
    try:
        yield
    finally:
        _listeners.of_thread.remove(listen)


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """Hide choices whose results the call keeps by itself, as attention's state."""
    _listeners.deaf += 1
    try:
        yield
    finally:
        _listeners.deaf -= 1


def is_unobserved() -> bool:
    """Tell whether this thread is inside :func:`unobserved`."""
    return _listeners.deaf > 0


class Memory:
    """What one F remembered in its first run; hardly ever anything.

    Args:
        name: how messages call this F.
    """

    __slots__ = ("_memory", "_name", "_places")

    def __init__(self, name: str) -> None:
        self._name = name
        self._memory: Any = None
        self._places: range | None = None

    @contextlib.contextmanager
    def recording(self, ledger: Ledger) -> Iterator[None]:
        """Remember what F asks for; keep it in the ledger."""
        memory = _borrowed(self._name)
        memory.enter("record")
        try:
            yield
        finally:
            memory.leave()
        if len(memory):
            self._memory = memory
            self._places = ledger.keep_all(memory.tensors())
            memory.clear_tensors()
        else:
            _idle.append(memory)

    def recalling(self, saved: Sequence[Tensor]) -> Recall:
        """Give F what it remembered."""
        return Recall(self._loaded(saved), "recall", self._memory is None)

    def differentiating(
        self, saved: Sequence[Tensor]
    ) -> contextlib.AbstractContextManager[None]:
        """Give regions of F that checkpoint runs once more what they remembered."""
        if self._memory is None:
            # The recompute has shown already that nothing is asked for.
            return contextlib.nullcontext()
        return Recall(self._loaded(saved), "vjp", False)

    def _loaded(self, saved: Sequence[Tensor]) -> Any:
        if self._places is None:
            return _borrowed(self._name)
        self._memory.load([saved[i] for i in self._places])
        return self._memory


class Recall(contextlib.AbstractContextManager[None]):
    """The time during which F gets back what it remembered.

    Args:
        memory: what is given back.
        mode: ``recall`` or ``vjp``.
        idle: whether the memory is empty and of no further use.
    """

    __slots__ = ("_idle", "_memory", "_mode")

    def __init__(self, memory: Any, mode: str, idle: bool) -> None:
        self._memory = memory
        self._mode = mode
        self._idle = idle

    def __enter__(self) -> None:
        self._memory.enter(self._mode)

    def __exit__(self, kind: Any, *_: object) -> None:
        memory = self._memory
        try:
            if kind is None and self._mode == "recall":
                memory.finish()
        finally:
            memory.leave()
            if self._idle:
                _idle.append(memory)
            else:
                memory.clear_tensors()


# Empty memories for the next F: making one costs more than all else that is done here.
_idle: list[Any] = []


def _borrowed(name: str) -> Any:
    try:
        memory = _idle.pop()
    except IndexError:
        memory = torch.classes.torch_sm3.ReversibleMemory()
    memory.name = name
    return memory
