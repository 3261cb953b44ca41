# SPDX-License-Identifier: Apache-2.0
"""What a function does while it runs: discrete choices, saved bytes, the world."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torch_sm3.reversible import _remember

#: Operators whose integer results are choices.
_CHOOSE = {
    "topk",
    "argmax",
    "argmin",
    "sort",
    "argsort",
    "multinomial",
    "max",
    "min",
    "mode",
    "kthvalue",
    "searchsorted",
    "bucketize",
    "nonzero",
    "unique",
}
#: Operators whose results jump.
_ROUND = {"round", "floor", "ceil", "trunc", "sign", "heaviside"}
_COMPARE = {"lt", "le", "gt", "ge", "eq", "ne"}
#: Operators that make a comparison a choice.
_SELECT = {
    "where",
    "index",
    "index_put",
    "index_put_",
    "index_select",
    "gather",
    "scatter",
    "masked_fill",
    "masked_fill_",
    "masked_select",
    "embedding",
    "nonzero",
}


class Choices(TorchDispatchMode):
    """Finds discrete choices whose result is used without having been remembered."""

    def __init__(self) -> None:
        super().__init__()
        #: Names of the operators that chose.
        self.found: set[str] = set()
        #: Number of tensors that were remembered.
        self.remembered = 0
        # A reference is kept, so that no id is used twice.
        self._pending: dict[int, tuple[Tensor, str, bool]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if _remember.is_unobserved():
            return result
        name = func.overloadpacket.__name__
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        pending = [self._pending[id(x)] for x in inputs if id(x) in self._pending]
        if any(map(_is_smooth, outputs)):
            for _, chosen_by, compared in pending:
                if not compared or name in _SELECT:
                    self.found.add(chosen_by)
        for output in outputs:
            self._note(name, output, any(map(_is_smooth, inputs)), pending)
        return result

    def _note(
        self,
        name: str,
        output: Tensor,
        smooth: bool,
        pending: list[tuple[Tensor, str, bool]],
    ) -> None:
        if _is_smooth(output):
            if name in _ROUND:
                self._pending[id(output)] = (output, name, False)
        elif pending:
            # Numbers made of a choice are a choice, until they are remembered.
            _, chosen_by, compared = pending[0]
            self._pending[id(output)] = (output, chosen_by, compared)
        elif smooth and (name in _CHOOSE or name in _COMPARE):
            self._pending[id(output)] = (output, name, name in _COMPARE)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Observe operators and calls of :func:`remember`."""

        def remembered(tensor: Tensor) -> None:
            self.remembered += 1
            self._pending.pop(id(tensor), None)

        with _remember.listener(remembered), self:
            yield


def _is_smooth(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


class SavedBytes:
    """Counts the bytes that a graph saves, besides parameters, each storage once."""

    def __init__(self, module: nn.Module) -> None:
        self.total = 0
        self._seen = {p.untyped_storage().data_ptr() for p in module.parameters()}

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count what is saved meanwhile."""

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._seen:
                self._seen.add(storage.data_ptr())
                self.total += storage.nbytes()
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            yield


class World:
    """Generators and buffers, to be put back as often as needed.

    Args:
        module: its buffers are put back.
    """

    def __init__(self, module: nn.Module) -> None:
        self.generators = [torch.default_generator]
        if torch.cuda.is_initialized():
            self.generators += torch.cuda.default_generators
        self._states = [generator.get_state() for generator in self.generators]
        self._buffers = [
            (owner, name, buffer, buffer.detach().clone())
            for owner in module.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]

    def restore(self) -> None:
        """Put everything back."""
        for generator, state in zip(self.generators, self._states, strict=True):
            generator.set_state(state)
        with torch.no_grad():
            for owner, name, buffer, value in self._buffers:
                buffer.copy_(value)
                owner._buffers[name] = buffer

    def drawn_from(self) -> tuple[str, ...]:
        """Return the devices whose generators have moved on."""
        pairs = zip(self.generators, self._states, strict=True)
        return tuple(
            str(generator.device)
            for generator, state in pairs
            if not torch.equal(generator.get_state(), state)
        )

    def mutated(self) -> tuple[str, ...]:
        """Return the names of the buffers whose values have changed."""
        return tuple(
            name
            for owner, name, buffer, value in self._buffers
            if owner._buffers.get(name) is not buffer
            or not torch.equal(buffer.detach(), value)
        )
