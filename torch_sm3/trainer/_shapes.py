# SPDX-License-Identifier: Apache-2.0
"""Layers run on shapes alone, and what they would allocate."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode


class Shapes:
    """A world in which tensors have shapes, dtypes and devices, but no memory.

    Args:
        device: where layers run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._known: dict[int, Tensor] = {}

    def tensor(self, like: Tensor, rows: int | None = None) -> Tensor:
        """Return a tensor of the shape of another, with ``rows`` examples."""
        shape = list(like.shape)
        if rows is not None and shape:
            shape[0] = rows
        with self._mode:
            return torch.empty(shape, dtype=like.dtype, device=self._device)

    def weights(self, module: nn.Module) -> dict[str, Tensor]:
        """Return stand-ins for a module's parameters and buffers, by name."""
        found: dict[str, Tensor] = {}
        named: Iterable[tuple[str, Tensor]] = [
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ]
        for name, tensor in named:
            if id(tensor) not in self._known:
                copy = self.tensor(tensor).requires_grad_(tensor.requires_grad)
                self._known[id(tensor)] = copy
            found[name] = self._known[id(tensor)]
        return found

    @contextlib.contextmanager
    def running(self, module: nn.Module) -> Iterator[None]:
        """Run a module on shapes; no generator advances.

        An attention layer draws its seed as a number, which shapes do not have, so it
        runs as in eval mode; its dropout masks take no memory of note.
        """
        state = torch.get_rng_state()
        drawing = [
            m for m in module.modules() if m.training and hasattr(m, "draw_seed")
        ]
        try:
            for one in drawing:
                one.training = False
            with self._mode:
                yield
        finally:
            for one in drawing:
                one.training = True
            torch.set_rng_state(state)

    def call(self, module: nn.Module, items: Sequence[Any], **side: Any) -> Any:
        """Run a module on stand-ins."""
        with self.running(module):
            return functional_call(module, self.weights(module), tuple(items), side)


class Meter(TorchDispatchMode):
    """Counts the bytes of all tensors that operators make while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator and count what it made."""
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(item, Tensor):
                self._count(item)
        return result

    def know(self, tensors: Iterable[Any]) -> None:
        """Do not count tensors that are there already."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                self._seen.add(tensor.untyped_storage())

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._seen:
            return
        self._seen.add(storage)
        size = storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self.live -= size


def n_bytes(items: Iterable[Any]) -> int:
    """Return the bytes of tensors, each memory once."""
    found = {
        item.untyped_storage()._cdata: item.nbytes
        for item in items
        if isinstance(item, Tensor)
    }
    return sum(found.values())


def peak_of_product(run: Callable[[], Sequence[Any]], known: Iterable[Any]) -> int:
    """Return the highest bytes of a run with grad and its vector-Jacobian product.

    Args:
        run: returns outputs; everything in it is made of stand-ins.
        known: tensors that are there anyhow.
    """
    meter = Meter()
    meter.know(known)
    with meter, torch.enable_grad():
        outputs = [
            item for item in run() if isinstance(item, Tensor) and item.requires_grad
        ]
        if outputs:
            leaves = _leaves(outputs)
            grads = [torch.empty_like(output) for output in outputs]
            torch.autograd.grad(outputs, leaves, grads, allow_unused=True)
    return meter.peak


def _leaves(outputs: Sequence[Tensor]) -> list[Tensor]:
    todo = [output.grad_fn for output in outputs if output.grad_fn is not None]
    leaves = {id(o): o for o in outputs if o.grad_fn is None}
    seen = set(todo)
    while todo:
        node: Any = todo.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            leaves[id(leaf)] = leaf
        for edge, _ in node.next_functions:
            if edge is not None and edge not in seen:
                seen.add(edge)
                todo.append(edge)
    return list(leaves.values())
