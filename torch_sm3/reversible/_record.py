# SPDX-License-Identifier: Apache-2.0
"""What every step of a call records of its first run."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_sm3.reversible._bare import with_bare_graph
from torch_sm3.reversible._inventory import Inventory, Learned
from torch_sm3.reversible._ledger import Ledger
from torch_sm3.reversible._remember import Memory
from torch_sm3.reversible._replay import Replay
from torch_sm3.reversible._steps import Half, Whole, is_stream
from torch_sm3.reversible._world import Both

#: Gradients of one step: of the items it changes, and of F's tensors.
Grads = list[Tensor | None]


class Record:
    """What the records of halves and of whole blocks have in common.

    Args:
        step: the step.
        name: how messages call its block.
        ledger: what the call keeps.
        position: number of steps before it in the call.
    """

    __slots__ = (
        "kept",
        "keys",
        "memory",
        "name",
        "places",
        "position",
        "replay",
        "with_grad",
    )

    def __init__(
        self, step: Half | Whole, name: str, ledger: Ledger, position: int
    ) -> None:
        self.name = name
        self.position = position
        self.keys = step.side_names(ledger.side)
        self.places = ledger.side.places(self.keys)
        self.memory = Memory(name)
        self.replay = Replay(
            name,
            step.modules,
            Inventory(step.modules),
            step.learned,
            ledger.options.generators,
        )
        #: Places of items that are put back, not rebuilt; by stack position.
        self.kept: dict[int, int] = {}
        #: Whether a run without gradients needs grad mode for the first run's bits.
        self.with_grad = False

    @property
    def owned(self) -> list[Tensor]:
        """The tensors of F's modules that require grad."""
        return self.replay.owned

    def keep_inputs(self, step: Half | Whole, stack: list[Any], ledger: Ledger) -> None:
        """Keep all streams that the step takes, so that drift ends here."""
        for i in step.touched:
            if is_stream(stack[i]):
                self.kept[i] = ledger.keep(stack[i])

    def keep_changed(self, stack: list[Any], ledger: Ledger) -> None:
        """Keep the streams that the step changes, instead of rebuilding them."""
        raise NotImplementedError

    def put_back(self, stack: list[Any], saved: Sequence[Tensor]) -> None:
        """Put the kept streams on the stack."""
        for i, place in self.kept.items():
            stack[i] = saved[place]

    def world(
        self, saved: Sequence[Tensor], all_of_it: bool = True
    ) -> contextlib.AbstractContextManager[None]:
        """Set what F saw in the first run.

        Args:
            saved: the tensors that the call kept.
            all_of_it: whether all that F remembered has to be asked for.
        """
        return Both(self.replay.again(), self.memory.recalling(saved, all_of_it))

    def lessons(self, learned: Learned, ledger: Ledger) -> tuple[bool, bool, bool]:
        """Return what the first run has to find out, and whether it needs grad mode.

        Returns:
            Whether to search F's graph, once for each F; whether to compare the bits
            with grad and without, in the first exact call; whether to run with grad.
        """
        exact = ledger.options.exact != "none"
        learning = learned.undeclared is None
        probing = exact and learned.grad_matters is None
        self.with_grad = exact and bool(learned.grad_matters)
        return learning, probing, learning or probing or self.with_grad

    def bits_mode(self) -> contextlib.AbstractContextManager[None]:
        """Set the grad mode in which F returns the bits of the first run."""
        return with_bare_graph(self.name) if self.with_grad else torch.no_grad()
