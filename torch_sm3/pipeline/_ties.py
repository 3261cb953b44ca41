# SPDX-License-Identifier: Apache-2.0
"""Tied weights: equal at the start, and one summed gradient for all once per step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from torch_sm3.pipeline._faults import LinksLostError, PeerFailedError
from torch_sm3.pipeline._links import Links
from torch_sm3.pipeline._values import pack, unpack
from torch_sm3.pipeline.stage import Stage


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
        link: channel of its messages.
        members: all members, in stage order.
        rank: this rank.
        stages: the stages of this rank.
        links: links to the other ranks, None if there are none.
    """

    def __init__(
        self,
        link: int,
        members: list[Member],
        rank: int,
        stages: Mapping[int, Stage],
        links: Links | None,
    ) -> None:
        self._link = link
        self._rank = rank
        self._links = links
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
        self._first = {m.rank: m.stage for m in reversed(members)}
        # What a signal raised while other members were on their way.
        self._held: BaseException | None = None

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The members on this rank."""
        return [m.parameter for m in self._members if m.parameter is not None]

    @property
    def stage(self) -> int:
        """The lowest stage of this rank that is a member."""
        return self._first[self._rank]

    @property
    def repeated(self) -> list[torch.nn.Parameter]:
        """The members on this rank but for that on the lowest stage of all."""
        return self.parameters[self._rank == self.root :]

    @torch.no_grad()
    def broadcast(self) -> None:
        """Give all members the bits of the one on the lowest stage."""
        own = self.parameters
        if self._rank == self.root:
            for rank in self._others:
                self._tell(rank, own[0].detach().cpu())
        else:
            own[0].copy_(self._hear(self.root))
        for parameter in own[1:]:
            parameter.copy_(own[0])
        self._raise_held()

    @torch.no_grad()
    def reduce(self, failed: bool) -> None:
        """Give all members the sum of their gradients, added in stage order.

        Args:
            failed: whether this rank failed; it takes part in the agreement only.

        Raises:
            PeerFailedError: if another member's rank has failed.
            LinksLostError: if one is gone.
        """
        # Added on the CPU where members of several ranks meet: ties are no payload.
        place = torch.device("cpu") if self._others else None
        own = [
            None if failed or p.grad is None else p.grad.to(device=place)
            for p in self.parameters
        ]
        if self._rank != self.root:
            self._tell(self.root, (failed, own))
            stopped, total = self._hear(self.root)
        else:
            told = {rank: self._hear(rank) for rank in self._others}
            told[self._rank] = failed, own
            stopped = any(other for other, _ in told.values())
            total = None if stopped else self._sum({r: g for r, (_, g) in told.items()})
            for rank in self._others:
                self._tell(rank, (stopped, total))
        self._raise_held()
        if stopped and not failed:
            raise PeerFailedError("a rank with the same tied weight failed")
        for parameter in self.parameters if total is not None else ():
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(total)

    def _sum(self, told: dict[int, list[torch.Tensor | None]]) -> torch.Tensor | None:
        rest = {rank: iter(gradients) for rank, gradients in told.items()}
        total: torch.Tensor | None = None
        for member in self._members:
            # A rank that holds one object in several stages tells of it once.
            gradient = next(rest[member.rank], None)
            if gradient is not None:
                total = gradient.clone() if total is None else total.add_(gradient)
        return total

    def _tell(self, rank: int, value: Any) -> None:
        assert self._links is not None, "members elsewhere are reached by links"
        stages = self.stage, self._first[rank]
        packed = pack(value, f"tied weight of stage {self.stage}")
        self._links.send(rank, self._link, stages, 0, *packed)

    def _hear(self, rank: int) -> Any:
        assert self._links is not None, "members elsewhere are reached by links"
        stages = self._first[rank], self.stage
        ticket = self._links.receive(rank, self._link, stages, 0)
        while True:
            try:
                structure, tensors, _ = self._links.take(ticket)
            except LinksLostError:
                raise
            except BaseException as error:
                # Ctrl-C. What is on its way must not stay for the next step, and other
                # members wait for an answer; a second one is meant.
                if self._held is not None:
                    raise
                self._held = error
            else:
                return unpack(structure, tensors)

    def _raise_held(self) -> None:
        """Raise what a signal raised, now that all members have their answer."""
        held, self._held = self._held, None
        if held is not None:
            raise held
