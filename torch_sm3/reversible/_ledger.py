# SPDX-License-Identifier: Apache-2.0
"""What one call keeps for its backward pass besides the final streams."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torch_sm3.reversible._drift import Drift, DriftMonitor, Sample
from torch_sm3.reversible._replay import GeneratorStates
from torch_sm3.reversible._side import Side


@dataclass(frozen=True)
class Options:
    """How a sequence is run; see :class:`ReversibleSequence`."""

    exact: str = "none"
    grid_bits: int = 16
    overflow: str = "store"
    generators: tuple[torch.Generator, ...] = ()
    monitor: DriftMonitor | None = None


@dataclass
class Stats:
    """What the calls of a sequence have met; counts by block name."""

    #: Halves whose input was kept, because it could not be rebuilt exactly.
    overflows: Counter[str] = field(default_factory=Counter)
    #: Blocks that the monitor found drifting and plans as ``checkpoint`` from then on.
    fallbacks: Counter[str] = field(default_factory=Counter)


class Ledger:
    """Side context, kept tensors and generator states of one call.

    Args:
        side: the call's side context.
        options: how the sequence is run.
        stats: counts of the sequence; updated.
    """

    def __init__(self, side: Side, options: Options, stats: Stats) -> None:
        self.side = side
        self.options = options
        self.stats = stats
        self.states: GeneratorStates = {}
        #: All kept tensors, those of side context first.
        self.tensors = [tensor.detach() for tensor in side.tensors]
        monitor = options.monitor
        #: Whether the rebuilt streams of this call are compared with the first ones.
        self.monitored = monitor is not None and monitor.wants_next()
        #: What the backward pass found; shared with the records.
        self.report: list[Drift] = []
        self._places: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def keep(self, tensor: Tensor) -> int:
        """Keep a tensor until the backward pass and return its place.

        A tensor that is kept twice is kept once. Kept is a detached alias, which shares
        the version counter but not the graph, whose nodes own this ledger's call.
        """
        known = self._places.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[1]
        place = len(self.tensors)
        self.tensors.append(tensor.detach())
        self._places[id(tensor)] = (weakref.ref(tensor), place)
        return place

    def keep_all(self, tensors: Sequence[Tensor]) -> range:
        """Keep fresh tensors and return their places."""
        start = len(self.tensors)
        self.tensors += tensors
        return range(start, len(self.tensors))

    def sample(self, tensor: Tensor) -> Sample | None:
        """Return a sample of a tensor, if this call is monitored."""
        monitor = self.options.monitor
        if monitor is None or not self.monitored or tensor.numel() == 0:
            return None
        return Sample(tensor, monitor.sample)

    def take(self) -> list[Tensor]:
        """Return all kept tensors, side context first, and keep none of them."""
        tensors, self.tensors = self.tensors, []
        self._places = {}
        self.states = {}
        self.side = self.side.without_tensors()
        return tensors
