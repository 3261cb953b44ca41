# SPDX-License-Identifier: Apache-2.0
"""Where weights and optimizer slots live, and how they come and go.

A tensor moves by its ``data``: parameters keep their identity, and with it the keys of
optimizer states and the version that a replay compares.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_sm3.trainer._layers import Layer


class Carrier:
    """Copies between a device and the host, on a stream of its own where there is one.

    Args:
        device: may be the CPU: then copies are made all the same.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._on_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._on_cuda else None

    def home(self, tensor: Tensor) -> Tensor:
        """Return a place on the host for a tensor, pinned for a CUDA device."""
        return torch.empty_like(tensor.detach(), device="cpu", pin_memory=self._on_cuda)

    def pinned(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the host, pinned for a CUDA device."""
        needs_pinning = self._on_cuda and not tensor.is_pinned()
        return tensor.pin_memory() if needs_pinning else tensor

    def to_device(self, host: Tensor) -> tuple[Tensor, Any]:
        """Begin a copy; return it and the event after which it is complete."""
        if self._stream is None:
            return host.detach().clone(), None
        with torch.cuda.stream(self._stream):
            copy = torch.empty_like(host.detach(), device=self.device)
            copy.copy_(host, non_blocking=True)
            event = self._stream.record_event()
        copy.record_stream(torch.cuda.current_stream(self.device))
        return copy, event

    def to_host(self, source: Tensor, host: Tensor) -> Any:
        """Begin to write a tensor of the device back; return the event of its end."""
        if self._stream is None:
            host.copy_(source.detach())
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            host.copy_(source.detach(), non_blocking=True)
            event = self._stream.record_event()
        source.record_stream(self._stream)
        return event

    def park(self, tensor: Tensor | None) -> tuple[Tensor, Any] | None:
        """Begin to put a tensor on the host."""
        if tensor is None or tensor.is_sparse:
            return None if tensor is None else (tensor, None)
        home = self.home(tensor)
        return home, self.to_host(tensor, home)

    def unpark(self, parked: tuple[Tensor, Any] | None) -> Tensor | None:
        """Return on the device what :meth:`park` put away."""
        if parked is None or parked[0].is_sparse:
            return None if parked is None else parked[0]
        self.wait(parked[1])
        copy, event = self.to_device(parked[0])
        self.wait(event)
        return copy

    def wait(self, event: Any) -> None:
        """Let what the device does next wait for an event."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)


class _Guest:
    """A tensor that is on the device for a while.

    Args:
        tensor: a parameter or slot.
        home: its memory on the host.
    """

    __slots__ = ("event", "home", "tensor", "users")

    def __init__(self, tensor: Tensor, home: Tensor) -> None:
        self.tensor = tensor
        self.home = home
        self.users = 0
        self.event: Any = None


class Resident:
    """All weights and slots stay on the device: nothing moves."""

    offloads = False

    def visit(self, layer: Layer, following: Sequence[Layer]) -> None:
        """Have a layer's weights on the device, and begin to fetch those after it."""

    def leave(self, layer: Layer) -> None:
        """End what :meth:`visit` began."""

    @contextlib.contextmanager
    def slots(self, layer: Layer) -> Iterator[None]:
        """Have a layer's slots on the device; afterwards send all of it home."""
        yield

    def keep(self, item: Any) -> Any:
        """Put a stack item away until :meth:`back` brings it back."""
        return item

    def back(self, item: Any) -> Any:
        """Return what was put away."""
        return item

    def finish(self) -> None:
        """Complete every copy on the host."""


class HostOffload(Resident):
    """Weights and slots live on the host and come to the device layer by layer.

    Buffers stay on the device: a layer may change them whenever it runs.

    Args:
        device: where layers run.
        layers: of the model.
        n_prefetch: number of layers whose weights are fetched ahead.
        n_async: number of updated layers whose copies home may be under way.
    """

    offloads = True

    def __init__(
        self,
        device: torch.device,
        layers: Sequence[Layer],
        n_prefetch: int,
        n_async: int,
    ) -> None:
        self._carrier = Carrier(device)
        self._n_prefetch = n_prefetch
        self._n_async = n_async
        self._guests: dict[int, _Guest] = {}
        self._ahead: deque[Layer] = deque()
        self._leaving: deque[list[tuple[_Guest, Any]]] = deque()
        for layer in layers:
            for tensor in layer.parameters:
                tensor.data = self._carrier.pinned(tensor.detach().cpu())
            for buffer in layer.module.buffers():
                buffer.data = buffer.detach().to(device)

    def visit(self, layer: Layer, following: Sequence[Layer]) -> None:
        """Have a layer's weights on the device, and begin to fetch those after it."""
        if self._ahead and self._ahead[0] is layer:
            self._ahead.popleft()
        else:
            while self._ahead:
                self.leave(self._ahead.popleft())
            self._fetch(layer)
        for tensor in layer.parameters:
            self._carrier.wait(self._guests[id(tensor)].event)
        for other in following[len(self._ahead) : self._n_prefetch]:
            self._ahead.append(other)
            self._fetch(other)

    def leave(self, layer: Layer) -> None:
        """End what :meth:`visit` began."""
        for tensor in layer.parameters:
            guest = self._guests[id(tensor)]
            guest.users -= 1
            if guest.users == 0:
                del self._guests[id(tensor)]
                guest.tensor.data = guest.home

    @contextlib.contextmanager
    def slots(self, layer: Layer) -> Iterator[None]:
        """Have a layer's slots on the device; afterwards send all of it home."""
        guests = []
        for tensor in self._slot_tensors(layer):
            guest = _Guest(tensor, self._carrier.pinned(tensor.detach()))
            tensor.data, event = self._carrier.to_device(guest.home)
            self._carrier.wait(event)
            guests.append(guest)
        try:
            yield
        finally:
            self._send_home(layer, guests)

    def keep(self, item: Any) -> Any:
        """Put a stack item away until :meth:`back` brings it back."""
        return _Kept(self._carrier.park(item)) if isinstance(item, Tensor) else item

    def back(self, item: Any) -> Any:
        """Return what was put away."""
        return self._carrier.unpark(item.parked) if isinstance(item, _Kept) else item

    def finish(self) -> None:
        """Complete every copy on the host."""
        while self._ahead:
            self.leave(self._ahead.popleft())
        while self._leaving:
            self._settle(self._leaving.popleft())
        # Of layers that an error cut short.
        for guest in self._guests.values():
            guest.tensor.data = guest.home
        self._guests.clear()

    def _fetch(self, layer: Layer) -> None:
        for tensor in layer.parameters:
            guest = self._guests.get(id(tensor))
            if guest is None:
                home = self._carrier.pinned(tensor.detach())
                guest = self._guests[id(tensor)] = _Guest(tensor, home)
                tensor.data, guest.event = self._carrier.to_device(home)
            guest.users += 1

    def _slot_tensors(self, layer: Layer) -> list[Tensor]:
        """Return the slots that belong on the parameters' device.

        Step counts stay on the CPU as optimizers themselves keep them there.
        """
        found = []
        assert layer.optimizer is not None
        for group in layer.optimizer.param_groups:
            with_steps = group.get("capturable") or group.get("fused")
            for parameter in group["params"]:
                state = layer.optimizer.state.get(parameter, {})
                found += [
                    value
                    for key, value in state.items()
                    if isinstance(value, Tensor) and (key != "step" or with_steps)
                ]
        return found

    def _send_home(self, layer: Layer, guests: list[_Guest]) -> None:
        known = {id(guest.tensor): guest for guest in guests}
        leaving = []
        for tensor in self._slot_tensors(layer):
            guest = known.get(id(tensor))
            if guest is None:  # the step made it
                guest = _Guest(tensor, self._carrier.home(tensor))
            leaving.append((guest, self._carrier.to_host(tensor, guest.home)))
        for tensor in layer.owned:
            # The users of the weights hold them until their own leave().
            guest = self._guests[id(tensor)]
            leaving.append((guest, self._carrier.to_host(tensor, guest.home)))
            guest.users += 1
        self._leaving.append(leaving)
        while len(self._leaving) > self._n_async:
            self._settle(self._leaving.popleft())

    def _settle(self, leaving: list[tuple[_Guest, Any]]) -> None:
        for guest, event in leaving:
            if event is not None:
                event.synchronize()
            if id(guest.tensor) not in self._guests:
                guest.tensor.data = guest.home
                continue
            guest.users -= 1
            if guest.users == 0:
                del self._guests[id(guest.tensor)]
                guest.tensor.data = guest.home


class _Kept:
    """A stack item on the host."""

    __slots__ = ("parked",)

    def __init__(self, parked: tuple[Tensor, Any] | None) -> None:
        self.parked = parked
