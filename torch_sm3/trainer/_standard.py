# SPDX-License-Identifier: Apache-2.0
"""Standard layers: run without grad, and again with grad from their kept inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torch_sm3.reversible._inventory import Inventory, Learned
from torch_sm3.reversible._ledger import Ledger, Options, Stats
from torch_sm3.reversible._remember import Memory
from torch_sm3.reversible._replay import Replay
from torch_sm3.reversible._side import Side
from torch_sm3.reversible._steps import is_stream
from torch_sm3.reversible._vjp import roots_of, vjp
from torch_sm3.trainer._gradients import without_autocast


class Rerun:
    """One call of a function of stack items, to be run again with grad.

    The second run is given the generator states, autocast, training flags, buffers
    and remembered values of the first.

    Args:
        name: how messages call it.
        layers: all modules that ``function`` calls.
        function: of a list of stack items; returns a list of them.
        learned: what earlier calls found out.
    """

    def __init__(
        self,
        name: str,
        layers: Sequence[nn.Module],
        function: Callable[[list[Any]], list[Any]],
        learned: Learned,
    ) -> None:
        self._function = function
        self._replay = Replay(name, layers, Inventory(layers), learned)
        self._memory = Memory(name)
        self._remembered: list[Tensor] = []

    @property
    def parameters(self) -> list[Tensor]:
        """What the layers own that requires grad."""
        return self._replay.owned

    def first(self, inputs: Sequence[Any], with_grad: bool = False) -> list[Any]:
        """Run the function and record what it takes to run it again.

        Args:
            inputs: stack items; with grad, what :func:`track` returned.
            with_grad: build a graph.
        """
        tensors = [item for item in inputs if isinstance(item, Tensor)]
        ledger = Ledger(Side({}), Options(), Stats())
        with torch.set_grad_enabled(with_grad), self._memory.recording(ledger):
            result = self._replay.first(
                lambda: self._function(list(inputs)), tensors, {}
            )
        self._remembered = ledger.take()
        return result

    def again(self, inputs: Sequence[Any], with_grad: bool = True) -> list[Any]:
        """Run the function once more.

        Args:
            inputs: as in the first run; with grad, what :func:`track` returned.
            with_grad: build a graph.
        """
        recalled = self._memory.recalling(self._remembered)
        with self._replay.again(), recalled, torch.set_grad_enabled(with_grad):
            return self._function(list(inputs))

    def product(
        self,
        tracked: Sequence[Any],
        outputs: Sequence[Any],
        grads: Sequence[Tensor | None],
    ) -> tuple[list[Tensor | None], dict[Any, Tensor]]:
        """Return the vector-Jacobian product of a run with grad.

        Args:
            tracked: its inputs.
            outputs: its outputs.
            grads: a cotangent for each output, or None.

        Returns:
            Gradients of the inputs, and of parameters where there is one.
        """
        inputs = [item for item in tracked if isinstance(item, Tensor)]
        needs = [item.requires_grad for item in inputs]
        parameters = self.parameters
        values = [item if is_stream(item) else None for item in outputs]
        pairs = [
            (value, grad)
            for value, grad in zip(values, grads, strict=True)
            if value is not None
        ]
        roots = roots_of([value for value, _ in pairs], [grad for _, grad in pairs])
        saved = self._memory.differentiating(self._remembered)
        with without_autocast(), saved:
            found = vjp(
                self._replay,
                roots,
                [*inputs, *parameters],
                [*needs, *([True] * len(parameters))],
            )
        each = iter(found)
        result = [next(each) if isinstance(x, Tensor) else None for x in tracked]
        rest = zip(parameters, each, strict=True)
        return result, {p: grad for p, grad in rest if grad is not None}


def track(inputs: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
    """Return the inputs as leaves of a graph of their own."""
    return [
        item.detach().requires_grad_(need and is_stream(item))
        if isinstance(item, Tensor)
        else item
        for item, need in zip(inputs, needs, strict=True)
    ]


class Flags:
    """What is known of a standard layer's outputs: which of them require grad.

    The first call of each kind runs with grad to find out, and drops its graph. So do
    all calls of a layer whose outputs have other bits without grad.
    """

    def __init__(self) -> None:
        self.learned = Learned()
        self._known: dict[tuple[Any, ...], tuple[list[bool], bool]] = {}

    def forward(
        self, rerun: Rerun, inputs: Sequence[Any], needs: Sequence[bool]
    ) -> tuple[list[Any], list[bool]]:
        """Run forward; return the outputs, without graph, and which require grad."""
        owned = tuple(id(parameter) for parameter in rerun.parameters)
        key = (len(inputs), tuple(needs), owned)
        flags, grad_matters = self._known.get(key, (None, True))
        if not grad_matters:
            assert flags is not None
            return rerun.first(inputs), flags
        outputs = rerun.first(track(inputs, needs), with_grad=True)
        if flags is None:
            flags = [is_stream(item) and item.requires_grad for item in outputs]
            bare = rerun.again(inputs, with_grad=False)
            self._known[key] = flags, not all(map(_same_bits, outputs, bare))
        return [o.detach() if isinstance(o, Tensor) else o for o in outputs], flags


def _same_bits(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or one.layout is not torch.strided:
        return True
    left, right = (x.detach().contiguous().flatten() for x in (one, other))
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))
