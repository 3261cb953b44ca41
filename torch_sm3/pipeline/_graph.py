# SPDX-License-Identifier: Apache-2.0
"""The graph of one microbatch in one stage, from its forward to its backward."""

from __future__ import annotations

import functools
from itertools import islice
from typing import Any

import torch

from torch_sm3 import _ops
from torch_sm3.pipeline._mail import Key

Came = tuple[str, list[torch.Tensor], list[bool]]
Gradients = list[torch.Tensor | None]

_SPLITS: dict[bool | str, str] = {"auto": "auto", True: "always", False: "never"}


# Looking a class of the library up costs as much as a small layer.
_class = functools.cache(_ops.pipeline_backward_class)


class Graph:
    """What a backward needs, without the values that came in or went out.

    Args:
        split: as of a stage.

    Attributes:
        seeds: gradients of the loss, on the last stage.
        shapes: of the outputs for each target.
        outputs: those that are not freed yet.
        unsent: values that are still to be sent or used.
    """

    def __init__(self, split: bool | str) -> None:
        self._native = _class()(_SPLITS[split])
        self._counts: list[int] = []
        self.outputs: list[torch.Tensor] = []
        self.seeds: Gradients = []
        self.shapes: list[list[torch.Size]] = []
        self.unsent: set[Key] = set()

    def enter(self, came: list[Came]) -> list[Came]:
        """Return what came in as the stage may use it: it may change it in place.

        Args:
            came: structure, tensors and which require grad, of each source.
        """
        self._counts = [len(tensors) for _, tensors, _ in came]
        flat = self._native.enter(
            [x for _, tensors, _ in came for x in tensors],
            [wanted for _, _, requires_grad in came for wanted in requires_grad],
        )
        parts = zip(came, self._parts(flat), strict=True)
        return [(structure, part, wanted) for (structure, _, wanted), part in parts]

    def leave(self, outputs: list[list[torch.Tensor]]) -> None:
        """Remember where the backward starts.

        Args:
            outputs: for each target.
        """
        self.outputs = [x for part in outputs for x in part]
        self.shapes = [[x.shape for x in part] for part in outputs]
        self._native.leave(self.outputs)

    def left(self, key: Key) -> None:
        """Free the outputs when all have left; what is under way keeps its bytes.

        Args:
            key: of a value that was sent or, on this rank, used.
        """
        self.unsent.discard(key)
        if not self.unsent:
            self._native.free(self.outputs)
            self.outputs = []

    def full(self, gradients: Gradients) -> list[Gradients]:
        """Run the whole backward; return gradients of what came in, by source."""
        return self._parts(self._native.full(gradients))

    def input(self, gradients: Gradients) -> list[Gradients]:
        """Run the part that the stage before waits for; return the same."""
        return self._parts(self._native.input(gradients))

    def weight(self) -> None:
        """Run the rest."""
        self._native.weight()

    def owes_weight(self) -> bool:
        """Whether there is a rest."""
        return bool(self._native.owes_weight())

    def _parts(self, flat: list[Any]) -> list[list[Any]]:
        rest = iter(flat)
        return [list(islice(rest, count)) for count in self._counts]
