# SPDX-License-Identifier: Apache-2.0
"""Exchange of small values between all ranks of a pipeline."""

from __future__ import annotations

from typing import Any

from torch_sm3.pipeline._links import ACTIVATION, Links
from torch_sm3.pipeline._values import pack, unpack


class Control:
    """Brings all ranks to the same knowledge by way of one of them, the hub.

    Of two ranks each tells the other at once, since nobody else has to be heard.

    Args:
        links: links to the other ranks, None if there are none.
        rank: this rank.
        size: number of ranks.
        hub: the rank that gathers.
    """

    def __init__(self, links: Links | None, rank: int, size: int, hub: int) -> None:
        self.links = links
        self._rank = rank
        self._size = size
        self._hub = hub

    def exchange(self, value: Any, verdict: Any = None) -> tuple[list[Any], Any]:
        """Return a value of each rank, in rank order, and the hub's verdict.

        Args:
            value: this rank's, of what can travel.
            verdict: known on the hub only, for all.
        """
        if self.links is None:
            return [value], verdict
        peers = [rank for rank in range(self._size) if rank != self._rank]
        if self._rank == self._hub:
            if len(peers) == 1:
                self.links.tell(peers[0], (value, verdict))
            found = {peer: self.links.hear(peer) for peer in peers}
            found[self._rank] = value
            values = [found[rank] for rank in range(self._size)]
            if len(peers) > 1:
                for peer in peers:
                    self.links.tell(peer, (tuple(values), verdict))
            return values, verdict
        self.links.tell(self._hub, value)
        heard, verdict = self.links.hear(self._hub)
        if len(peers) > 1:
            return list(heard), verdict
        return ([value, heard] if self._rank == 0 else [heard, value]), verdict

    def post(self, value: Any) -> list[int]:
        """Begin an exchange that :meth:`complete` ends, in the same or a later call.

        Args:
            value: this rank's, of what can travel.

        Returns:
            Tickets for :meth:`complete`.
        """
        if self.links is None:
            return []
        peers = [rank for rank in range(self._size) if rank != self._rank]
        hub = self._rank == self._hub
        if not hub or self._size == 2:
            self.links.tell(self._hub if not hub else peers[0], value, later=True)
        if not hub and self._size > 2:
            return []
        return [self.links.ask(peer, later=True) for peer in peers]

    def complete(self, value: Any, tickets: list[int]) -> list[Any]:
        """Return the value of each rank, in rank order.

        Args:
            value: what was given to :meth:`post`.
            tickets: what it returned.
        """
        if self.links is None:
            return [value]
        if not tickets:
            return list(self.links.hear(self._hub, later=True))
        heard = [self.links.answer(ticket) for ticket in tickets]
        values = [*heard[: self._rank], value, *heard[self._rank :]]
        for peer in range(self._size):
            if self._size > 2 and peer != self._rank:
                self.links.tell(peer, tuple(values), later=True)
        return values

    def announce(self, number: int, placement: list[int]) -> int:
        """Return the number that the rank of stage 0 tells all others.

        It travels where the first activation of an eval is due, so that a rank in a
        step notices at once that others are in an eval.

        Args:
            number: told if this is the rank of stage 0.
            placement: rank of each stage.
        """
        assert self.links is not None, "one rank tells nobody"
        head = placement[0]
        for peer in range(self._size) if self._rank == head else ():
            if peer != head:
                stages = 0, placement.index(peer)
                self.links.send(peer, ACTIVATION, stages, 0, *pack(number, ""))
        if self._rank == head:
            return number
        stages = 0, placement.index(self._rank)
        ticket = self.links.receive(head, ACTIVATION, stages, 0)
        structure, tensors, _ = self.links.take(ticket)
        return int(unpack(structure, tensors))
