# SPDX-License-Identifier: Apache-2.0
"""Values on their way between stages, over links or within this rank."""

from __future__ import annotations

import torch

from torch_sm3.pipeline._faults import Failure, PoisonedError
from torch_sm3.pipeline._links import ACTIVATION, GRADIENT, Links
from torch_sm3.pipeline.schedule import Action

Packed = tuple[str, list[torch.Tensor]]
# Link class, source, target, whether it takes a route, and microbatch.
Key = tuple[int, int, int, bool, int]


class Mail:
    """Results that are to be sent or used, and messages that were asked for.

    Args:
        placement: rank of each stage.
        routes: source and target of values that skip stages.
        links: links to the other ranks, None if there are none.

    Attributes:
        sources: of each stage the stages whose values it takes.
        targets: of each stage the stages that take its values.
    """

    def __init__(
        self, placement: list[int], routes: list[tuple[int, int]], links: Links | None
    ) -> None:
        self._placement = placement
        self._links = links
        self._tickets: dict[Key, int] = {}
        self._results: dict[Key, Packed] = {}
        last = len(placement) - 1
        # The neighbour comes first; a route may lead to it, too.
        self.sources = {
            s: [s - 1] * (s > 0) + [a for a, b in routes if b == s]
            for s in range(last + 1)
        }
        self.targets = {
            s: [s + 1] * (s < last) + [b for a, b in routes if a == s]
            for s in range(last + 1)
        }

    def put(self, key: Key, packed: Packed) -> None:
        """Keep a result until it is sent or, on this rank, used."""
        self._results[key] = packed

    def take(self, key: Key) -> tuple[str, list[torch.Tensor], list[bool]]:
        """Return what another stage made: structure, tensors, which require grad.

        Raises:
            PoisonedError: if its rank had failed.
            LinksLostError: if nothing more can come.
        """
        if key in self._tickets and self._links is not None:
            return self._links.take(self._tickets.pop(key))
        structure, tensors = self._results.pop(key)
        requires_grad = [tensor.requires_grad for tensor in tensors]
        if key[0] == ACTIVATION:
            # A copy, as over a link: the stage may change it in place, and autograd
            # could not see that the stage before still needs it.
            tensors = [tensor.detach().clone() for tensor in tensors]
        return structure, tensors, requires_grad

    def message(self, action: Action) -> Key:
        """Do a SEND or RECV; return what it moves."""
        assert self._links is not None, "one rank has no messages"
        key = _key(action)
        link, source, target, _, microbatch = key
        if action.op.startswith("RECV"):
            self._tickets[key] = self._links.receive(
                self._placement[source], link, (source, target), microbatch
            )
        else:
            structure, tensors = self._results.pop(key)
            stages, peer = (source, target), self._placement[target]
            self._links.send(peer, link, stages, microbatch, structure, tensors)
        return key

    def poison(self, action: Action, failure: Failure) -> None:
        """Send a failure in place of what a SEND owes."""
        assert self._links is not None, "one rank has no messages"
        link, source, target, _, microbatch = _key(action)
        peer = self._placement[target]
        self._links.poison(peer, link, (source, target), microbatch, failure)

    def drain(self, link: int, stage: int, microbatch: int) -> None:
        """Take what was asked for on behalf of an action that does not run."""
        others = self.sources if link == ACTIVATION else self.targets
        for number, other in enumerate(others[stage]):
            key = link, other, stage, number > 0, microbatch
            ticket = self._tickets.pop(key, None)
            if ticket is not None and self._links is not None:
                try:
                    self._links.take(ticket)
                except PoisonedError:
                    pass  # another rank that was poisoned or failed by itself

    def forget(self) -> None:
        """Drop all results."""
        self._results.clear()


def _key(action: Action) -> Key:
    forward = action.op.endswith("F")
    first = action.stage - (forward != action.op.startswith("SEND"))
    low, high = action.route or (first, first + 1)
    ends = (ACTIVATION, low, high) if forward else (GRADIENT, high, low)
    return *ends, action.route is not None, action.microbatch
