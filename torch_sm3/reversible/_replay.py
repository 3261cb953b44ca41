# SPDX-License-Identifier: Apache-2.0
"""What F's recompute must see again: generators, autocast, flags, buffers, weights."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

#: State of each generator after the last F of a call.
GeneratorStates = dict[torch.Generator, Tensor]


#: Attributes that every module has.
_STANDARD = frozenset(nn.Module().__dict__)


class Inventory:
    """All modules, buffers and gradient-requiring tensors below some layers.

    It is taken anew for every first run: parameters may be replaced between two calls,
    and one flat walk costs less than a single small kernel.
    """

    __slots__ = ("_links", "buffers", "modules", "owned")

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        modules = list(layers)
        seen = set(modules)
        owned: dict[int, Tensor] = {}
        buffers: list[tuple[nn.Module, str, Tensor]] = []
        links: list[tuple[dict[str, Any], str, Any]] = []

        def own(home: dict[str, Any], name: str, tensor: Tensor) -> None:
            owned[id(tensor)] = tensor
            links.append((home, name, tensor))

        for module in modules:  # grows while it is walked
            for name, child in module._modules.items():
                if child is not None and child not in seen:
                    seen.add(child)
                    modules.append(child)
                    links.append((module._modules, name, child))
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.requires_grad:
                    own(module._parameters, name, parameter)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    if buffer.requires_grad:
                        own(module._buffers, name, buffer)
                    else:
                        buffers.append((module, name, buffer))
            # Weights that a wrapper made and set as plain attributes, for instance
            # in the replicas of nn.DataParallel.
            attributes = module.__dict__
            for name in attributes.keys() - _STANDARD:
                value = attributes[name]
                if isinstance(value, Tensor) and value.requires_grad:
                    own(attributes, name, value)
        self.modules = modules
        self.owned = list(owned.values())
        self.buffers = buffers
        self._links = links

    def drop_results(self) -> None:
        """Drop computed attributes that a run of the layers has replaced.

        They were results of an earlier run, which a module keeps to be looked at.
        """
        gone = {
            id(value)
            for home, name, value in self._links
            if isinstance(value, Tensor)
            and not value.is_leaf
            and home.get(name) is not value
        }
        if gone:
            self.owned = [tensor for tensor in self.owned if id(tensor) not in gone]
            self._links = [link for link in self._links if id(link[2]) not in gone]

    def stands(self) -> bool:
        """Tell whether modules and tensors are still those that were found."""
        for home, name, value in self._links:
            if home.get(name) is not value and not is_sharded(value):
                return False
        return True

    def flags(self) -> tuple[bool, ...]:
        """Return the training flag of every module."""
        return tuple([module.training for module in self.modules])


def is_sharded(tensor: Tensor) -> bool:
    """Tell whether a parameter is a shard, in whose place others come to be used."""
    # Nothing can be sharded while the module that shards is not imported.
    tensors: Any = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(tensor, tensors.DTensor)


class Learned:
    """What the first calls taught about one F; plain data, so it pickles."""

    def __init__(self) -> None:
        #: For each training-flag pattern, positions of the buffers that F changes.
        self.changed: dict[tuple[Any, ...], tuple[int, ...]] = {}
        #: Shape of a tensor that F needs the gradient of and nothing declares; empty
        #: if there is none, None until F's graph was searched.
        self.undeclared: tuple[Any, ...] | None = None
        #: Whether F returned other bits with grad than without; None: not known yet.
        self.grad_matters: bool | None = None
        #: For each training-flag pattern, whether F drew random numbers on a CUDA
        #: device.
        self.draws_on_cuda: dict[tuple[bool, ...], bool] = {}


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
        self._autocast = _autocast_state()
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
        if self._autocast or _autocast_state():
            return self._all_exchanged()
        return _counted

    @contextlib.contextmanager
    def _all_exchanged(self) -> Iterator[None]:
        # Generators, buffers and flags belong to all threads, so only one thread at a
        # time may have others than today's.
        shared: Any = contextlib.nullcontext()
        if self._states or self._buffers or self._inventory.flags() != self._flags:
            shared = _exchange
        with shared, _counted, contextlib.ExitStack() as stack:
            stack.enter_context(self._exchanged(self._inventory))
            for context in _autocast_contexts(self._autocast):
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


class _World(threading.local):
    """What this thread is doing."""

    #: Nested recomputes.
    recomputing = 0


_world = _World()


class _Counted(contextlib.AbstractContextManager[None]):
    """The time of a recompute."""

    def __enter__(self) -> None:
        _world.recomputing += 1

    def __exit__(self, *_: object) -> None:
        _world.recomputing -= 1


_counted = _Counted()
#: Held while generators, buffers or flags are those of an earlier run.
_exchange = threading.RLock()


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


def _autocast_state() -> dict[str, torch.dtype]:
    return {
        kind: torch.get_autocast_dtype(kind)
        for kind in _device_types()
        if torch.is_autocast_enabled(kind)
    }


def _autocast_contexts(first: dict[str, torch.dtype]) -> list[torch.autocast]:
    contexts = []
    for kind in _device_types():
        if kind in first:
            contexts.append(torch.autocast(kind, first[kind], cache_enabled=False))
        elif torch.is_autocast_enabled(kind):
            contexts.append(torch.autocast(kind, enabled=False))
    return contexts
