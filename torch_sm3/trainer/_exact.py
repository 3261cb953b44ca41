# SPDX-License-Identifier: Apache-2.0
"""Reversible layers: run without grad and reversed, or stored under autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from torch_sm3.reversible import Block, LayerRun, ReversibleSequence
from torch_sm3.reversible._block import has_aux
from torch_sm3.reversible._exact import entered
from torch_sm3.reversible._ledger import Stats
from torch_sm3.reversible._moves import Move
from torch_sm3.reversible._plain import run_step
from torch_sm3.reversible._plan import check_kinds, check_precision
from torch_sm3.reversible._side import Side
from torch_sm3.reversible._steps import Step, is_stream
from torch_sm3.trainer._gradients import without_autocast
from torch_sm3.trainer._layers import Layer, Model

#: Binary digits after the point in grid mode, as by default in a sequence.
GRID_BITS = 16

#: Maps a stack and side context to the next stack and aux outputs.
StoreRun = Callable[[list[Any], dict[str, Any]], tuple[list[Any], list[Any]]]


class Entry:
    """Checks streams, and puts them on the grid, where reversible layers begin.

    Args:
        model: the layers.
        exact: how streams are kept exact.
        plan: "reversible" or "store".

    Raises:
        ValueError: for an unknown mode, or a block that the grid does not serve.
    """

    def __init__(self, model: Model, exact: str, plan: str) -> None:
        self._exact = exact
        self._plan = plan
        #: By the index of their first layer, the layers that follow each other.
        self._sections: dict[int, ReversibleSequence] = {}
        for _, reversible in model.blocks:
            if reversible:
                self._sections[reversible[0].index] = ReversibleSequence(
                    *map(_block, reversible),
                    exact=exact,
                    grid_bits=GRID_BITS,
                    plan=plan,
                )

    def enter(self, layer: Layer, items: list[Any]) -> list[Any]:
        """Return the stack that a layer takes.

        Args:
            layer: a reversible one.
            items: the stack; is not modified.

        Raises:
            ValueError: for streams whose precision does not permit so many layers, or
                on several devices.
            TypeError: for streams that the exact mode does not know.
            NotImplementedError: for a layout other than dense.
        """
        section = self._sections.get(layer.index)
        if section is None:
            return items
        check_kinds(section, items)
        check_precision(section, items, [self._plan] * len(section))
        return entered(items, section, self._exact, GRID_BITS)


def store_run(layer: Layer, exact: str) -> StoreRun:
    """Return how a reversible layer runs under ordinary autograd."""
    block = _block(layer)
    sequence = ReversibleSequence(
        block, exact=exact, grid_bits=GRID_BITS, plan="store", engine="node"
    )

    def run(items: list[Any], side: dict[str, Any]) -> tuple[list[Any], list[Any]]:
        result = sequence(*items, **side)
        if not has_aux(block):
            return list(result), []
        streams, aux = result
        return list(streams), tree_leaves(aux)

    return run


class Reversal:
    """One call of a reversible layer, without grad and back with gradients.

    Args:
        layer: the layer.
        exact: how streams are kept exact.
        stats: counts of halves whose input was kept; updated.
    """

    def __init__(self, layer: Layer, exact: str, stats: Stats) -> None:
        self._layer = layer
        self._run = LayerRun(
            _block(layer),
            exact,
            GRID_BITS,
            stats=stats,
            monitor=layer.monitor,
            name=layer.name,
        )

    @property
    def needs(self) -> list[bool]:
        """Which items of the new stack require grad."""
        return self._run.needs

    def forward(
        self, stack: list[Any], side: Mapping[str, Any], needs: Sequence[bool]
    ) -> tuple[list[Any], list[Any]]:
        """Return the next stack and the aux outputs.

        Raises:
            RuntimeError: if a function needs the gradient of a tensor that is neither
                in the stack nor side context nor an attribute.
        """
        result = self._run.forward(stack, side, needs)
        for step in _block(self._layer)._steps():
            if not isinstance(step, Move) and step.learned.undeclared:
                raise RuntimeError(
                    f"trainer: expected every tensor that {self._layer.name} needs "
                    "the gradient of to be a stack item, side context or an attribute, "
                    f"but got one of shape {step.learned.undeclared[0]} from elsewhere"
                )
        return result, tree_leaves(self._run.joined_aux)

    def reverse(
        self,
        stack: list[Any],
        grads: Sequence[Tensor | None],
        aux_grads: Sequence[Tensor | None],
        side_grads: Mapping[int, Tensor],
    ) -> tuple[list[Any], list[Tensor | None], dict[int, Tensor], dict[Any, Tensor]]:
        """Return the stack before the layer and all gradients.

        Args:
            stack: what :meth:`forward` returned.
            grads: of its items.
            aux_grads: of the aux outputs.
            side_grads: of side context so far, by identity.

        Returns:
            The stack; its gradients; those of side context so far and from here; those
            of parameters.
        """
        self._run.drift.clear()
        with without_autocast():
            found = self._run.reverse_and_grad(
                stack, grads, self._separate(aux_grads), side_grads
            )
        if self._layer.monitor is not None and self._run.drift:
            self._layer.monitor.judge(self._run.drift)
        return found.inputs, found.input_grads, found.side_grads, found.param_grads

    @property
    def held(self) -> list[Tensor]:
        """The tensors that the call keeps: sidecars and remembered ones."""
        return list(self._run.kept)

    @property
    def drift(self) -> Tensor | None:
        """Largest relative difference that the layer's monitor has found."""
        found = [drift.max_rel for drift in self._run.drift]
        return torch.stack(found).amax() if found else None

    def _separate(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of each half's aux outputs, given the joined ones."""
        block = _block(self._layer)
        halves = [item for item in tree_leaves(self._run.aux) if is_stream(item)]
        if not halves or all(grad is None for grad in grads):
            return [None] * len(halves)
        steps = [step for step in block._steps() if step.has_aux]
        if len(steps) == 1:
            joined = tree_leaves(self._run.joined_aux)
            pairs = zip(joined, grads, strict=True)
            return [grad for item, grad in pairs if is_stream(item)]
        # A block may sum what its halves return.
        leaves = [item.detach().requires_grad_() for item in self._run.aux]
        with torch.enable_grad():
            share = len(leaves) // len(steps)
            found = [
                tuple(leaves[i * share : (i + 1) * share]) for i in range(len(steps))
            ]
            joined = tree_leaves(block._join_aux(found))
        both = zip(joined, grads, strict=True)
        known = [(item, grad) for item, grad in both if grad is not None]
        outputs, given = zip(*known, strict=True)
        return list(torch.autograd.grad(outputs, leaves, given, allow_unused=True))


def pieces(layer: Layer) -> Iterator[nn.Module]:
    """Yield modules that map the stack as the halves of a reversible layer do.

    Their graphs exist one after the other.
    """
    for step in _block(layer)._steps():
        yield _Piece(step, layer.name)


class _Piece(nn.Module):
    """One step of a block as a module from stack to stack."""

    def __init__(self, step: Step, name: str) -> None:
        super().__init__()
        self._step = step
        self._name = name
        parts = () if isinstance(step, Move) else step.modules
        self.parts = nn.ModuleList(parts)

    def forward(self, *stack: Any, **side: Any) -> list[Any]:
        """Return the next stack."""
        items = list(stack)
        run_step(self._step, items, Side(side), self._name)
        return items


def _block(layer: Layer) -> Block:
    assert isinstance(layer.module, Block)
    return layer.module
