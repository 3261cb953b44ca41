# SPDX-License-Identifier: Apache-2.0
"""When Megatron's data parallelism reduces gradients: in the last microbatch only."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from torch_sm3.megatron._call import Call
from torch_sm3.megatron.env import Environment


class GradientSync:
    """Holds the reduction of gradients back until a chunk's last backward.

    Args:
        call: of the forward-backward function.
        env: the Megatron.
    """

    def __init__(self, call: Call, env: Environment) -> None:
        self._call = call
        self._alone = env.stages == 1
        self._first = env.rank == 0 and len(call.chunks) == 1
        self._held: AbstractContextManager[Any] | None = None
        self._no_sync = _no_sync_of(call)
        self._grad_sync = _each(_option(call, "grad_sync_func"), len(call.chunks))
        self._param_sync = _each(_option(call, "param_sync_func"), len(call.chunks))
        self._gathered = 0
        # Chunks whose gradients are reduced in their last backward.
        self._done: set[int] = set()

    def __enter__(self) -> GradientSync:
        self._hold()
        self._gather(2)
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self._release()
        if kind is not None or self._alone:
            return
        for number, chunk in enumerate(self._call.chunks):
            sync = self._grad_sync[number]
            if sync is not None and number not in self._done:
                sync(chunk.parameters())

    def before_forward(self, chunk: int, microbatch: int) -> None:
        """Prepare for a forward.

        Args:
            chunk: the chunk.
            microbatch: the microbatch.
        """
        self._gather(chunk + 2)
        # torch's DDP prepares its reduction in the forward.
        if self._alone and microbatch == self._call.microbatches - 1:
            self._release()
        elif not self._call.forward_only:
            self._hold()

    def before_backward(self, chunk: int, microbatch: int) -> None:
        """Prepare for a backward.

        Args:
            chunk: the chunk.
            microbatch: the microbatch.
        """
        if self._alone:
            return
        last = microbatch == self._call.microbatches - 1
        if last and (self._grad_sync[chunk] is None or self._first):
            self._done.add(chunk)
            self._release()
        else:
            self._hold()

    def _gather(self, chunks: int) -> None:
        """Begin to gather the parameters of the first chunks, one ahead of its use."""
        count = len(self._call.chunks)
        if count == 1 or self._call.forward_only:
            return
        while self._gathered < min(chunks, count):
            sync = self._param_sync[self._gathered]
            if sync is not None:
                sync(self._call.chunks[self._gathered].parameters())
            self._gathered += 1

    def _hold(self) -> None:
        if self._held is None:
            self._held = self._no_sync()
            self._held.__enter__()

    def _release(self) -> None:
        if self._held is not None:
            held, self._held = self._held, None
            held.__exit__(None, None, None)


def _option(call: Call, name: str) -> Any:
    """Return an option of the configuration, or of the call where it is one."""
    return call.given.get(name, getattr(call.config, name, None))


def _each(option: Any, chunks: int) -> list[Any]:
    return list(option) if isinstance(option, (list, tuple)) else [option] * chunks


def _no_sync_of(call: Call) -> Callable[[], AbstractContextManager[Any]]:
    functions = _each(_option(call, "no_sync_func"), 1)
    if functions == [None]:
        functions = [
            chunk.no_sync
            for chunk in call.chunks
            if isinstance(chunk, DistributedDataParallel)
        ]

    def entered() -> AbstractContextManager[Any]:
        stack = ExitStack()
        for function in functions:
            stack.enter_context(function())
        return stack

    return entered if functions else contextlib.nullcontext
