# SPDX-License-Identifier: Apache-2.0
"""Standard layers: run without grad, and again with grad from their kept inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torch_sm3.reversible._replay import Inventory, Learned, Replay
from torch_sm3.trainer._gradients import is_floating, vjp


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
        with torch.set_grad_enabled(with_grad):
            return self._replay.first(
                lambda: self._function(list(inputs)), tensors, {}
            )

    def again(self, inputs: Sequence[Any]) -> list[Any]:
        """Run the function with grad on what :func:`track` returned."""
        with self._replay.again(), torch.enable_grad():
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
        places = [
            i
            for i, item in enumerate(tracked)
            if isinstance(item, Tensor) and item.requires_grad
        ]
        parameters = self.parameters
        found = vjp(outputs, grads, [*(tracked[i] for i in places), *parameters])
        result: list[Tensor | None] = [None] * len(tracked)
        for place, grad in zip(places, found, strict=False):
            result[place] = grad
        rest = zip(parameters, found[len(places) :], strict=True)
        return result, {p: grad for p, grad in rest if grad is not None}


def track(inputs: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
    """Return the inputs as leaves of a graph of their own."""
    return [
        item.detach().requires_grad_(need and is_floating(item))
        if isinstance(item, Tensor)
        else item
        for item, need in zip(inputs, needs, strict=True)
    ]


class Flags:
    """What is known of a standard layer's outputs: which of them require grad.

    The first call of each kind runs with grad to find out, and drops its graph.
    """

    def __init__(self) -> None:
        self.learned = Learned()
        self._known: dict[tuple[Any, ...], list[bool]] = {}

    def forward(
        self, rerun: Rerun, inputs: Sequence[Any], needs: Sequence[bool]
    ) -> tuple[list[Any], list[bool]]:
        """Run without grad; return the outputs and which of them require grad."""
        owned = tuple(id(parameter) for parameter in rerun.parameters)
        key = (len(inputs), tuple(needs), owned)
        if key in self._known:
            return rerun.first(inputs), self._known[key]
        outputs = rerun.first(track(inputs, needs), with_grad=True)
        flags = [is_floating(item) and item.requires_grad for item in outputs]
        self._known[key] = flags
        return [o.detach() if isinstance(o, Tensor) else o for o in outputs], flags
