# SPDX-License-Identifier: Apache-2.0
"""The layers of a model: which stack items they take and which weights they own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from torch_sm3.reversible import Block, ReversibleSequence
from torch_sm3.reversible._steps import Half

#: What the trainers take as a model: standard and reversible layers by turns.
Blocks = Sequence[tuple[Sequence[nn.Module], Sequence[nn.Module]]]


class StandardLayers(nn.Module):
    """Standard layers that run one after the other on the top of the stack.

    Each takes its ``n_in`` items, 1 if it has no such attribute, and puts what it
    returns in their place.

    Args:
        layers: modules that return an item or a tuple of items.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, *stack: Any) -> tuple[Any, ...]:
        """Return the whole resulting stack."""
        return tuple(self.run(list(stack))[0])

    def run(self, stack: list[Any]) -> tuple[list[Any], int, int]:
        """Run all layers.

        Args:
            stack: is not modified.

        Returns:
            The resulting stack, the number of items that the layers took from
            ``stack``, and the number of items that they left in their place.
        """
        items = stack
        untouched = len(stack)
        for layer in self.layers:
            count = n_in(layer)
            if count > len(items):
                raise TypeError(
                    f"trainer: expected at least {count} stack items for "
                    f"{type(layer).__name__}, but got {len(items)}"
                )
            result = layer(*items[:count])
            untouched = min(untouched, len(items) - count)
            items = [*as_items(result), *items[count:]]
        return items, len(stack) - untouched, len(items) - untouched


def n_in(layer: nn.Module) -> int:
    """Return how many stack items a layer takes."""
    return int(getattr(layer, "n_in", 1))


def as_items(result: Any) -> list[Any]:
    """Return what a layer returned as a list of stack items."""
    return list(result) if isinstance(result, (tuple, list)) else [result]


class Layer:
    """One layer of a model.

    Args:
        index: counted from the input side.
        kind: "standard", "reversible" or "loss".
        module: of the layer.

    Attributes:
        parameters: all that the layer uses, each once.
        owned: those that no layer nearer to the input uses: they are reduced and
            updated with this layer.
        optimizer: of ``owned``; None if there are none.
        monitor: of the sequence that a reversible layer came from.
    """

    def __init__(self, index: int, kind: str, module: nn.Module) -> None:
        self.index = index
        self.kind = kind
        self.module = module
        self.parameters: list[nn.Parameter] = list(module.parameters())
        self.owned: list[nn.Parameter] = []
        self.optimizer: torch.optim.Optimizer | None = None
        self.monitor: Any = None

    @property
    def trainable(self) -> list[nn.Parameter]:
        """The owned parameters that get gradients."""
        return [parameter for parameter in self.owned if parameter.requires_grad]

    @property
    def name(self) -> str:
        """How messages call the layer."""
        return f"layer {self.index} ({type(self.module).__name__})"


class Model:
    """Blocks and a loss as layers in order.

    Args:
        op: how messages call the caller.
        blocks: pairs of lists of standard and of reversible layers.
        loss_layer: takes the last stack and returns a scalar.

    Raises:
        TypeError: if a block is no such pair, or an item of it is of the wrong kind.
    """

    def __init__(self, op: str, blocks: Blocks, loss_layer: nn.Module) -> None:
        if not isinstance(loss_layer, nn.Module):
            raise TypeError(
                f"{op}: expected a module, but got {type(loss_layer).__name__} "
                "(argument 'loss_layer')"
            )
        self.layers: list[Layer] = []
        #: For each block its standard layer, if any, and its reversible layers.
        self.blocks: list[tuple[Layer | None, list[Layer]]] = []
        for i, block in enumerate(blocks):
            standard, reversible = _checked(op, i, block)
            group = None
            if standard:
                group = self._add("standard", StandardLayers(standard))
            rest = []
            for module, monitor in _flat(op, i, reversible):
                rest.append(self._add("reversible", module))
                rest[-1].monitor = monitor
            self.blocks.append((group, rest))
        self.loss = self._add("loss", loss_layer)
        seen: set[int] = set()
        for layer in self.layers:
            layer.owned = [p for p in layer.parameters if id(p) not in seen]
            seen.update(map(id, layer.parameters))
        #: Parameters that several layers use, by identity.
        self.tied = {
            id(p)
            for layer in self.layers
            for p in layer.parameters
            if all(p is not q for q in layer.owned)
        }

    def _add(self, kind: str, module: nn.Module) -> Layer:
        layer = Layer(len(self.layers), kind, module)
        self.layers.append(layer)
        return layer

    @property
    def modules(self) -> list[nn.Module]:
        """The module of each layer."""
        return [layer.module for layer in self.layers]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters from the input side, each once."""
        return [parameter for layer in self.layers for parameter in layer.owned]


def _checked(
    op: str, index: int, block: Any
) -> tuple[list[nn.Module], list[nn.Module]]:
    lists = (list, tuple, nn.ModuleList)
    pair = isinstance(block, (tuple, list)) and len(block) == 2
    if not pair or not all(isinstance(part, lists) for part in block):
        raise TypeError(
            f"{op}: expected block {index} to be a pair of lists of modules, but got "
            f"{_described(block)} (argument 'blocks')"
        )
    standard, reversible = map(list, block)
    for item in [*standard, *reversible]:
        if not isinstance(item, nn.Module):
            raise TypeError(
                f"{op}: expected block {index} to hold modules, but got "
                f"{type(item).__name__} (argument 'blocks')"
            )
    return standard, reversible


def _described(block: Any) -> str:
    if isinstance(block, (tuple, list)):
        return f"({', '.join(type(item).__name__ for item in block)})"
    return type(block).__name__


def _monitor_of(sequence: ReversibleSequence, block: Block) -> Any:
    """Return what watches a block of a sequence, if something in it is rebuilt."""
    halves = [step for step in block._steps() if isinstance(step, Half)]
    return sequence.monitor if halves else None


def _flat(
    op: str, index: int, reversible: Sequence[nn.Module]
) -> list[tuple[Block, Any]]:
    found: list[tuple[Block, Any]] = []
    for item in reversible:
        if isinstance(item, ReversibleSequence):
            found += [(block, _monitor_of(item, block)) for block in item]
        elif isinstance(item, Block):
            found.append((item, None))
        else:
            raise TypeError(
                f"{op}: expected the second list of block {index} to hold reversible "
                f"blocks, but got {type(item).__name__} (argument 'blocks')"
            )
    return found
