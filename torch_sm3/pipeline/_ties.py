# SPDX-License-Identifier: Apache-2.0
"""Tied weights: equal at the start, and one summed gradient for all once per step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from torch_sm3.pipeline._collective import Collective
from torch_sm3.pipeline._faults import PeerFailedError
from torch_sm3.pipeline.stage import Stage

_FAILED, _ABSENT, _PRESENT = 2.0, 0.0, 1.0


class Member(NamedTuple):
    """A stage that holds a tied weight.

    Attributes:
        stage: its index.
        rank: its rank.
        shape: of the weight.
        dtype: of the weight, as text.
        name: of the parameter in its stage.
        parameter: the weight where it is on this rank.
    """

    stage: int
    rank: int
    shape: tuple[int, ...]
    dtype: str
    name: str
    parameter: torch.nn.Parameter | None = None


def described(stages: Iterable[Stage], rank: int) -> dict[str, list[Member]]:
    """Return what this rank holds of each tied weight, without the weights."""
    found: dict[str, list[Member]] = {}
    for stage in sorted(stages, key=lambda stage: stage.index):
        for name, tie in stage.tied.items():
            weight = stage.parameter(name)
            shape, dtype = tuple(weight.shape), str(weight.dtype)
            member = Member(stage.index, rank, shape, dtype, name)
            found.setdefault(tie, []).append(member)
    return found


def combined(records: Iterable[Mapping[str, list[Member]]]) -> dict[str, list[Member]]:
    """Return the members of each tied weight on all ranks, in stage order.

    Raises:
        ValueError: if shapes or dtypes differ.
    """
    ties: dict[str, list[Member]] = {}
    for record in records:
        for tie, members in record.items():
            ties.setdefault(tie, []).extend(members)
    for tie, members in ties.items():
        members.sort(key=lambda member: member.stage)
        first = members[0]
        for member in members[1:]:
            if (member.shape, member.dtype) != (first.shape, first.dtype):
                raise ValueError(
                    f"PipelineRunner: expected tied weight {tie!r} of shape "
                    f"{first.shape} and {first.dtype} as in stage {first.stage}, but "
                    f"got {member.shape} and {member.dtype} in stage {member.stage} "
                    "(argument 'tied')"
                )
    return ties


def numbered(
    ties: Mapping[str, list[Member]], known: Iterable[Iterable[int]]
) -> dict[str, list[Member]]:
    """Return tied weights in the order in which a schedule numbers them.

    Those of a single stage, which no schedule knows, come last.

    Args:
        ties: members of each, in stage order.
        known: stages of each tied weight of the schedule.
    """
    rest = dict(sorted(ties.items()))
    found = {}
    for stages in known:
        name = next(n for n, members in rest.items() if stages_of(members) == [*stages])
        found[name] = rest.pop(name)
    return {**found, **rest}


def stages_of(members: Iterable[Member]) -> list[int]:
    """Return the stages of members, each once, in order."""
    return sorted({member.stage for member in members})


class Tie:
    """One tied weight with members on this rank.

    Args:
        number: its number among all ties; tags of its messages.
        members: all members, in stage order.
        rank: this rank.
        stages: the stages of this rank.
        peers: all ranks, None if all members are here.
    """

    def __init__(
        self,
        number: int,
        members: list[Member],
        rank: int,
        stages: Mapping[int, Stage],
        peers: Collective | None,
    ) -> None:
        self.number = number
        self._rank = rank
        self._peers = peers
        self._members: list[Member] = []
        seen = set()
        for member in members:
            parameter = None
            if member.rank == rank:
                parameter = stages[member.stage].parameter(member.name)
                # One object in several stages has the sum of their gradients already.
                if id(parameter) in seen:
                    continue
                seen.add(id(parameter))
            self._members.append(member._replace(parameter=parameter))
        self.root = members[0].rank
        self._others = sorted({member.rank for member in members} - {self.root})

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The members on this rank."""
        return [m.parameter for m in self._members if m.parameter is not None]

    @property
    def stage(self) -> int:
        """The lowest stage of this rank that is a member."""
        return next(m.stage for m in self._members if m.rank == self._rank)

    @property
    def repeated(self) -> list[torch.nn.Parameter]:
        """The members on this rank but for that on the lowest stage of all."""
        return self.parameters[self._rank == self.root :]

    @torch.no_grad()
    def broadcast(self) -> None:
        """Give all members the bits of the one on the lowest stage."""
        own = self.parameters
        if self._rank == self.root:
            works = [self._send(own[0].detach(), rank) for rank in self._others]
            self._wait(works)
        else:
            value = torch.empty_like(own[0], memory_format=torch.contiguous_format)
            self._receive(value, self.root)
            own[0].copy_(value)
        for parameter in own[1:]:
            parameter.copy_(own[0])

    @torch.no_grad()
    def reduce(self, failed: bool) -> None:
        """Give all members the sum of their gradients, added in stage order.

        Args:
            failed: whether this rank failed; it takes part in the agreement only.

        Raises:
            PeerFailedError: if another member's rank has failed.
            GroupLostError: if one is gone.
        """
        if self._rank == self.root:
            self._reduce_at_root(failed)
        else:
            self._reduce_elsewhere(failed)

    def _reduce_at_root(self, failed: bool) -> None:
        states = {}
        for rank in self._others:
            states[rank] = torch.zeros(self._count(rank), dtype=torch.float64)
            self._receive(states[rank], rank)
        all_states = [failed * _FAILED, *(float(s.max()) for s in states.values())]
        parts = [m for m in self._members if m.rank == self._rank]
        there = any(
            m.parameter is not None and m.parameter.grad is not None for m in parts
        )
        answer = max(*all_states, float(there))
        word = torch.tensor([answer], dtype=torch.float64)
        self._wait([self._send(word, rank) for rank in self._others])
        if answer == _FAILED:
            return self._stop(failed)
        total = self._sum(states)
        if total is None:
            return
        self._wait([self._send(total, rank) for rank in self._others])
        self._set(total)

    def _sum(self, states: dict[int, torch.Tensor]) -> torch.Tensor | None:
        next_of = dict.fromkeys(states, 0)
        total: torch.Tensor | None = None
        for member in self._members:
            gradient = None
            if member.rank == self._rank:
                assert member.parameter is not None, "it is on this rank"
                gradient = member.parameter.grad
            else:
                there = states[member.rank][next_of[member.rank]] == _PRESENT
                next_of[member.rank] += 1
                if there:
                    own = self.parameters[0]
                    gradient = torch.empty(own.shape, dtype=own.dtype)
                    self._receive(gradient, member.rank)
            if gradient is not None:
                total = gradient.clone() if total is None else total.add_(gradient)
        return total

    def _reduce_elsewhere(self, failed: bool) -> None:
        own = self.parameters
        states = [
            _FAILED if failed else _ABSENT if p.grad is None else _PRESENT for p in own
        ]
        states += [_ABSENT] * (self._count(self._rank) - len(states))
        self._wait([self._send(torch.tensor(states, dtype=torch.float64), self.root)])
        word = torch.zeros(1, dtype=torch.float64)
        self._receive(word, self.root)
        if float(word) == _FAILED:
            return self._stop(failed)
        works = [self._send(p.grad, self.root) for p in own if p.grad is not None]
        self._wait(works)
        if float(word) == _ABSENT:
            return
        total = torch.empty(own[0].shape, dtype=own[0].dtype)
        self._receive(total, self.root)
        self._set(total)

    def _count(self, rank: int) -> int:
        return sum(member.rank == rank for member in self._members)

    def _set(self, total: torch.Tensor) -> None:
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(total)

    @staticmethod
    def _stop(failed: bool) -> None:
        if not failed:
            raise PeerFailedError("a rank with the same tied weight failed")

    def _send(self, tensor: torch.Tensor, rank: int) -> Any:
        assert self._peers is not None, "members elsewhere are reached by messages"
        return self._peers.send(tensor.contiguous(), rank, self.number)

    def _wait(self, works: list[Any]) -> None:
        for work in works:
            assert self._peers is not None, "only messages are waited for"
            self._peers.wait(work)

    def _receive(self, tensor: torch.Tensor, rank: int) -> None:
        assert self._peers is not None, "members elsewhere are reached by messages"
        self._peers.wait(self._peers.receive(tensor, rank, self.number))
