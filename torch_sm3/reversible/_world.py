# SPDX-License-Identifier: Apache-2.0
"""What a thread runs a function in: a recompute or not, and which autocast."""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import Any

import torch


class _World(threading.local):
    """What this thread is doing."""

    #: Nested recomputes.
    recomputing = 0


_world = _World()


class Counted(contextlib.AbstractContextManager[None]):
    """The time of a recompute."""

    def __enter__(self) -> None:
        _world.recomputing += 1

    def __exit__(self, *_: object) -> None:
        _world.recomputing -= 1


#: Entered by every recompute.
COUNTED = Counted()
#: Held while generators, buffers or flags are those of an earlier run.
EXCHANGE = threading.RLock()


class Both(contextlib.AbstractContextManager[None]):
    """Two contexts, the second inside the first.

    Args:
        outer: entered first.
        inner: entered second.
    """

    __slots__ = ("_inner", "_outer")

    def __init__(
        self,
        outer: contextlib.AbstractContextManager[None],
        inner: contextlib.AbstractContextManager[None],
    ) -> None:
        self._outer = outer
        self._inner = inner

    def __enter__(self) -> None:
        self._outer.__enter__()
        try:
            self._inner.__enter__()
        except BaseException:
            self._outer.__exit__(*sys.exc_info())
            raise

    def __exit__(self, *error: Any) -> None:
        try:
            self._inner.__exit__(*error)
        except BaseException:
            self._outer.__exit__(*sys.exc_info())
            raise
        self._outer.__exit__(*error)


def is_recomputing() -> bool:
    """Tell whether this thread runs a function of a block for the second time.

    A forward hook on F, for instance, is called in both runs.

    Example:
        >>> from torch_sm3.reversible import is_recomputing
        >>> is_recomputing()
        False
    """
    return _world.recomputing > 0


def _device_types() -> tuple[str, ...]:
    return ("cpu", "cuda") if torch.cuda.is_initialized() else ("cpu",)


def autocast_state() -> dict[str, torch.dtype]:
    return {
        kind: torch.get_autocast_dtype(kind)
        for kind in _device_types()
        if torch.is_autocast_enabled(kind)
    }


def autocast_contexts(first: dict[str, torch.dtype]) -> list[torch.autocast]:
    contexts = []
    for kind in _device_types():
        if kind in first:
            contexts.append(torch.autocast(kind, first[kind], cache_enabled=False))
        elif torch.is_autocast_enabled(kind):
            contexts.append(torch.autocast(kind, enabled=False))
    return contexts
