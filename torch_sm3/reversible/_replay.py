# SPDX-License-Identifier: Apache-2.0
"""What F's recompute must see again: generators, autocast, flags, buffers, weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torch_sm3.reversible._inventory import Inventory, Learned
from torch_sm3.reversible._world import (
    COUNTED,
    EXCHANGE,
    autocast_contexts,
    autocast_state,
)

#: State of each generator after the last F of a call.
GeneratorStates = dict[torch.Generator, Tensor]


class Replay:
    """One F's first run, to be run again with the same outcome.

    Args:
        name: how messages call this F, for instance ``block 3``.
        layers: modules that run one after the other.
        inventory: what :class:`Inventory` found below ``layers``.
        learned: what earlier calls found out about this F.
        extra: generators of the user's that F draws from.
    """

    __slots__ = (
        "_autocast",
        "_buffers",
        "_extra",
        "_flags",
        "_inventory",
        "_states",
        "_versions",
        "layers",
        "learned",
        "name",
    )

    def __init__(
        self,
        name: str,
        layers: Sequence[nn.Module],
        inventory: Inventory,
        learned: Learned,
        extra: Sequence[torch.Generator] = (),
    ) -> None:
        self._extra = extra
        self.name = name
        self.layers = layers
        self.learned = learned
        self._inventory = inventory
        self._flags = inventory.flags()
        self._versions = {id(tensor): tensor._version for tensor in inventory.owned}
        self._autocast = autocast_state()
        self._buffers: list[tuple[nn.Module, str, Tensor]] = []
        self._states: GeneratorStates = {}

    @property
    def owned(self) -> list[Tensor]:
        """The tensors below the layers that required grad in the first run."""
        return self._inventory.owned

    def first(
        self,
        call: Callable[[], Any],
        arguments: Sequence[Tensor],
        states: GeneratorStates,
    ) -> Any:
        """Run F and record what it needs to be run again.

        Args:
            call: runs F.
            arguments: all tensors that F is given.
            states: generator states after the previous F of this call; updated. They
                spare a snapshot, because nothing but F draws in between.

        Returns:
            What F returned.

        Raises:
            RuntimeError: if F wrote in place to an argument, or to a buffer that it
                left alone in earlier calls.
        """
        versions = [item._version for item in arguments]
        before = self._snapshot_buffers()
        generators = self._generators(arguments)
        for generator in generators:
            if generator not in states:
                states[generator] = generator.get_state()
        # A weight cast here carries no graph and must not be found by a later op
        # that needs one.
        cache = bool(self._autocast) and torch.is_autocast_cache_enabled()
        if cache:
            torch.set_autocast_cache_enabled(False)
        try:
            result = call()
        finally:
            if cache:
                torch.set_autocast_cache_enabled(True)
        for generator in generators:
            state = generator.get_state()
            if not torch.equal(state, states[generator]):
                self._states[generator] = states[generator]
                states[generator] = state
        if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
            draws = any(g.device.type == "cuda" for g in self._states)
            self.learned.draws_on_cuda[self._flags] = draws
        for item, version in zip(arguments, versions, strict=True):
            if item._version != version:
                raise RuntimeError(
                    f"reversible: expected F of {self.name} to leave its inputs "
                    f"alone, but got a write in place to one of shape "
                    f"{tuple(item.shape)} (argument 'F')"
                )
        self._record_buffers(before)
        self._inventory.drop_results()
        return result

    def again(self) -> contextlib.AbstractContextManager[None]:
        """Return a context with the world of the first run.

        Raises:
            RuntimeError: if a weight of F was changed or replaced meanwhile.
        """
        self._check_weights()
        if self._states or self._buffers or self._inventory.flags() != self._flags:
            return self._all_exchanged()
        if self._autocast or autocast_state():
            return self._all_exchanged()
        return COUNTED

    @contextlib.contextmanager
    def _all_exchanged(self) -> Iterator[None]:
        # Generators, buffers and flags belong to all threads, so only one thread at a
        # time may have others than today's.
        shared: Any = contextlib.nullcontext()
        if self._states or self._buffers or self._inventory.flags() != self._flags:
            shared = EXCHANGE
        with shared, COUNTED, contextlib.ExitStack() as stack:
            stack.enter_context(self._exchanged(self._inventory))
            for context in autocast_contexts(self._autocast):
                stack.enter_context(context)
            yield

    @contextlib.contextmanager
    def _exchanged(self, inventory: Inventory) -> Iterator[None]:
        restore: list[Any] = []
        flags = inventory.flags()
        outer = {g: g.get_state() for g in self._states}
        try:
            if flags != self._flags:
                for module, flag in zip(inventory.modules, self._flags, strict=True):
                    module.training = flag
            for module, name, value in self._buffers:
                restore.append((module, name, module._buffers[name]))
                # A clone, because F changes it and the graph may be retained.
                module._buffers[name] = value.clone()
            for generator, state in self._states.items():
                generator.set_state(state)
            yield
        finally:
            for generator, state in outer.items():
                generator.set_state(state)
            for module, name, value in restore:
                module._buffers[name] = value
            if flags != self._flags:
                for module, flag in zip(inventory.modules, flags, strict=True):
                    module.training = flag

    def _generators(self, arguments: Sequence[Tensor]) -> list[torch.Generator]:
        found = [torch.default_generator, *self._extra]
        if torch.cuda.is_initialized():
            tensors = [*arguments, *self._inventory.owned]
            tensors += [buffer for _, _, buffer in self._inventory.buffers]
            indices = {t.device.index: None for t in tensors if t.is_cuda}
            if indices and torch.cuda.is_current_stream_capturing():
                self._check_capture()
                return found
            found += [torch.cuda.default_generators[i] for i in indices]
        return found

    def _check_capture(self) -> None:
        draws = self.learned.draws_on_cuda.get(self._flags)
        if draws is not False:
            what = "one that does" if draws else "one that has not run before"
            raise RuntimeError(
                f"reversible: expected F of {self.name} to draw no random numbers "
                f"under CUDA graph capture, but got {what}: a generator cannot be set "
                "back in a graph (CounterDropout needs none)"
            )

    def _check_weights(self) -> None:
        if not self._inventory.stands():
            raise RuntimeError(
                f"reversible: expected {self.name} to keep its weights until the "
                "backward pass, but got others (was it called through "
                "functional_call, or a parameter replaced?)"
            )
        for tensor in self._inventory.owned:
            version = self._versions[id(tensor)]
            if tensor._version != version:
                raise RuntimeError(
                    f"reversible: expected the weights of {self.name} unchanged until "
                    f"the backward pass, but got one of shape {tuple(tensor.shape)} "
                    f"at version {tensor._version}, first run at {version}"
                )

    def _buffer_key(self) -> tuple[Any, ...]:
        return self._flags, len(self._inventory.buffers)

    def _snapshot_buffers(self) -> list[tuple[Tensor | None, int]]:
        buffers = self._inventory.buffers
        if not buffers:
            return []
        known = self.learned.changed.get(self._buffer_key())
        return [
            (b.clone() if known is None or i in known else None, b._version)
            for i, (_, _, b) in enumerate(buffers)
        ]

    def _record_buffers(self, before: list[tuple[Tensor | None, int]]) -> None:
        if not before:
            return
        key = self._buffer_key()
        known = self.learned.changed.get(key)
        changed = []
        for i, (module, name, buffer) in enumerate(self._inventory.buffers):
            copy, version = before[i]
            now = module._buffers.get(name)
            if copy is not None:
                # Batch norm writes its running statistics without a new version,
                # so the values are compared, once for each pattern of flags.
                if (
                    known is None
                    and now is buffer
                    and buffer._version == version
                    and torch.equal(copy, buffer)
                ):
                    continue
                self._buffers.append((module, name, copy))
                changed.append(i)
            elif buffer._version != version:
                raise RuntimeError(
                    f"reversible: expected F of {self.name} to change buffer '{name}' "
                    "in its first call already, but got a first change in a later one"
                )
            elif now is not buffer:
                self._buffers.append((module, name, buffer))
        if known is None:
            self.learned.changed[key] = tuple(changed)
