# SPDX-License-Identifier: Apache-2.0
"""Discrete choices of F that its recompute must not make anew."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint

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
    for listen in _thread.listeners:
        listen(x)
    with _recalling_region():
        return _ops.reversible_remember(x, "" if key is None else key)


class _Thread(threading.local):
    """What :func:`remember` has to know of its thread."""

    def __init__(self) -> None:
        #: Who is told of its calls.
        self.listeners: list[Callable[[Tensor], None]] = []
        #: Number of memories that the engines have entered.
        self.entered = 0
        #: The F that runs for the first time as a part of the outer graph.
        self.in_graph: tuple[Memory, Any] | None = None
        #: Nested :func:`unobserved` regions.
        self.deaf = 0


_thread = _Thread()

# Checkpointed regions of such functions. They are run again by the outer graph, when
# no engine is there to say what F remembered.
_regions: weakref.WeakKeyDictionary[Any, tuple[Memory, Any]] = (
    weakref.WeakKeyDictionary()
)


def _recalling_region() -> contextlib.AbstractContextManager[None]:
    """Note the region that runs, or give it what F remembered in its first run."""
    first = _thread.in_graph
    if torch.compiler.is_compiling() or (
        first is None and (_thread.entered or not _regions)
    ):
        return contextlib.nullcontext()
    frame = _region_frame()
    if frame is None:
        return contextlib.nullcontext()
    if first is not None:
        _regions[frame] = first
        return contextlib.nullcontext()
    if frame not in _regions:
        return contextlib.nullcontext()
    memory, call = _regions[frame]
    return memory.differentiating(call.cursor().saved)


def _region_frame() -> Any:
    """Return what checkpoint calls the region that runs now, if one does."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    todo = [hooks[0]] if hooks else []
    while todo:
        # Its hook knows the frame, or a function that wraps the hook does.
        for cell in getattr(todo.pop(), "__closure__", None) or ():
            value = cell.cell_contents
            if isinstance(value, weakref.ref):
                value = value()
            if isinstance(value, checkpoint._CheckpointFrame):
                return value
            if getattr(value, "__module__", None) == checkpoint.__name__:
                todo.append(value)
    return None


@contextlib.contextmanager
def listener(listen: Callable[[Tensor], None]) -> Iterator[None]:
    """Call ``listen`` with every tensor that is remembered meanwhile."""
    _thread.listeners.append(listen)
    try:
        yield
    finally:
        _thread.listeners.remove(listen)


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """Hide choices whose results the call keeps by itself, as attention's state."""
    _thread.deaf += 1
    try:
        yield
    finally:
        _thread.deaf -= 1


def is_unobserved() -> bool:
    """Tell whether this thread is inside :func:`unobserved`."""
    return _thread.deaf > 0


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
        _thread.entered += 1
        try:
            yield
        finally:
            _thread.entered -= 1
            memory.leave()
        if len(memory):
            self._memory = memory
            self._places = ledger.keep_all(memory.tensors())
            memory.clear_tensors()
        else:
            _idle.append(memory)

    def recalling(self, saved: Sequence[Tensor], all_of_it: bool = True) -> Recall:
        """Give F what it remembered.

        Args:
            saved: the tensors that the call kept.
            all_of_it: whether F has to ask for all of it.
        """
        memory, idle = self._loaded(saved), self._memory is None
        return Recall(memory, "recall", idle, all_of_it)

    def differentiating(
        self, saved: Sequence[Tensor]
    ) -> contextlib.AbstractContextManager[None]:
        """Give regions of F that checkpoint runs once more what they remembered."""
        if self._memory is None:
            # The recompute has shown already that nothing is asked for.
            return contextlib.nullcontext()
        return Recall(self._loaded(saved), "vjp", False, False)

    @contextlib.contextmanager
    def noting_regions(self, call: Any) -> Iterator[None]:
        """Note the checkpointed regions of an F that is a part of the outer graph.

        Args:
            call: knows, by its cursor, the kept tensors of a backward pass.
        """
        before, _thread.in_graph = _thread.in_graph, (self, call)
        try:
            yield
        finally:
            _thread.in_graph = before

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
        all_of_it: whether all of it has to be asked for.
    """

    __slots__ = ("_all_of_it", "_idle", "_memory", "_mode")

    def __init__(self, memory: Any, mode: str, idle: bool, all_of_it: bool) -> None:
        self._memory = memory
        self._mode = mode
        self._idle = idle
        self._all_of_it = all_of_it

    def __enter__(self) -> None:
        self._memory.enter(self._mode)
        _thread.entered += 1

    def __exit__(self, kind: Any, *_: object) -> None:
        memory = self._memory
        _thread.entered -= 1
        try:
            if kind is None and self._all_of_it:
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
