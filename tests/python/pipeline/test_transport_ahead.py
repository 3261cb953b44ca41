# SPDX-License-Identifier: Apache-2.0
"""Messages that arrive before they are asked for, and payloads that were foretold."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.scenarios import Scenarios

from torch_sm3.pipeline import PipelineRunner, Stage, plan
from torch_sm3.pipeline._faults import Failure, LinksLostError, PoisonedError
from torch_sm3.pipeline._links import ACTIVATION, Links, new_group

two_ranks = Scenarios(2)

# A payload of its own begins above 64 KiB; 1 << 14 float32 are just that much.
BIG = 1 << 15
FAILURE = Failure(0, 0, 0, "0F0", "ValueError", "none of ours")
LONG = FAILURE._replace(message="x" * (1 << 17))


def open_links(max_pending: int = 2) -> Links:
    links = Links(new_group(None, 20.0), 20.0, max_pending, 1, [0, 1])
    links.begin(1, False)
    return links


def kinds() -> list[Any]:
    """Return shapes and types of messages, or a failure in place of one."""
    double = (BIG // 2, torch.float64)
    return [
        [(BIG, torch.float32)],
        [(2 * BIG, torch.float32)],
        # As many bytes as the first, of another type and shape.
        [double],
        [(BIG, torch.float32), (3, torch.int64), (0, torch.float32), double],
        [(BIG, torch.float32), (3, torch.int64)],
        # So many that the header takes a second frame.
        [(BIG // 64, torch.float32)] * 65,
        [(3, torch.float32)],
        [],
        FAILURE,
        LONG,
    ]


def tensors_of(kind: list[Any], number: int) -> list[torch.Tensor]:
    return [torch.full((size,), number, dtype=dtype) for size, dtype in kind]


def sequence() -> list[Any]:
    """Return messages in which each kind follows each, itself too."""
    all_kinds = kinds()
    pairs = [(a, b) for a in range(len(all_kinds)) for b in range(len(all_kinds))]
    random.Random(3).shuffle(pairs)
    return [all_kinds[index] for pair in pairs for index in pair]


def take(links: Links, ticket: int, kind: Any, number: int) -> bool:
    if isinstance(kind, Failure):
        with pytest.raises(PoisonedError) as info:
            links.take(ticket)
        return info.value.failure == kind
    _, tensors, _ = links.take(ticket)
    wanted = tensors_of(kind, number)
    return len(tensors) == len(wanted) and all(
        a.dtype == b.dtype and torch.equal(a, b)
        for a, b in zip(tensors, wanted, strict=True)
    )


@two_ranks
def any_after_any(rank: int, ranks: int) -> list[bool]:
    good = []
    for ahead in (1, 3):
        links = open_links()
        messages = sequence()
        tickets: list[int] = []
        for number, kind in enumerate(messages):
            stages = (0, 1)
            if rank == 0 and isinstance(kind, Failure):
                links.poison(1, ACTIVATION, stages, number, kind)
            elif rank == 0:
                sent = tensors_of(kind, number)
                links.send(1, ACTIVATION, stages, number, "t" * len(sent), sent)
            else:
                # Some are asked for before those ahead of them are taken.
                while len(tickets) < min(number + ahead, len(messages)):
                    asked = links.receive(0, ACTIVATION, stages, len(tickets))
                    tickets.append(asked)
                good.append(take(links, tickets[number], kind, number))
        good.append(links.failure() is None)
        links.close()
    return good


def test_any_payload_may_follow_any_other() -> None:
    good = two_ranks.answers(any_after_any)[1]
    assert len(good) == 2 * (2 * len(kinds()) ** 2 + 1) and all(good)


@two_ranks
def offered_and_wrong(rank: int, ranks: int) -> str:
    # The payload is where it was foretold, and the header is of another message.
    links = open_links()
    value = [torch.ones(BIG)]
    for number in range(3):
        if rank == 0:
            named = number if number < 2 else 7
            links.send(1, ACTIVATION, (0, 1), named, "t", value)
            continue
        ticket = links.receive(0, ACTIVATION, (0, 1), number)
        if number < 2:
            assert torch.equal(links.take(ticket)[1][0], value[0])
        else:
            with pytest.raises(LinksLostError):
                links.take(ticket)
    if rank == 0:
        with pytest.raises(LinksLostError):
            links.take(links.receive(1, ACTIVATION, (1, 0), 0))
    failure = links.failure()
    links.flush(1.0)
    links.close()
    assert failure is not None and failure.error_type == "ProtocolError"
    return failure.message


def test_a_foretold_payload_does_not_hide_a_wrong_header() -> None:
    first, second = two_ranks.answers(offered_and_wrong)
    assert first == second
    assert "microbatch 2 from stage 0 to stage 1" in first
    assert first.endswith(
        "activation of microbatch 7 from stage 0 to stage 1 in step 1"
    )


class Meets(torch.nn.Module):
    """Waits in one of its calls until the other rank has come to one of its own."""

    def __init__(self, call: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.body = torch.nn.Linear(3, 3)
        self.call, self.group, self.calls = call, group, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.calls == self.call:
            dist.barrier(group=self.group)
        self.calls += 1
        return self.body(x)


@two_ranks
def runs_ahead(rank: int, ranks: int) -> float:
    group = dist.new_group(backend="gloo")
    # Rank 1 ends its first forward when rank 0 is in its last: with one message under
    # way, the others must have left although nobody has asked for them.
    module = Meets(3 if rank == 0 else 0, group)
    runner = PipelineRunner(
        [Stage(module, rank)],
        plan("gpipe", 2, 4),
        loss_fn=torch.nn.functional.mse_loss,
        max_pending=1,
        timeout=20.0,
    )
    loss = runner.step(torch.ones(8, 3), target=torch.ones(8, 3)).loss
    runner.close()
    dist.destroy_process_group(group)
    return float(loss)


def test_a_rank_may_run_ahead_of_its_neighbour() -> None:
    first, second = two_ranks.answers(runs_ahead)
    assert first == second


@two_ranks
def asked_and_not_taken(rank: int, ranks: int) -> list[bool]:
    # One rank asks for many messages and turns to something else until all have left.
    group = dist.new_group(backend="gloo")
    small, large = [(3, torch.float32)], [(BIG, torch.float32)]
    good = []
    for row in ([small] * 40, [large] * 12, [small, large] * 6, [small, small, large]):
        links = open_links()
        if rank == 0:
            for number, kind in enumerate(row):
                links.send(1, ACTIVATION, (0, 1), number, "t", tensors_of(kind, number))
            dist.barrier(group=group)
        else:
            numbers = range(len(row))
            tickets = [links.receive(0, ACTIVATION, (0, 1), i) for i in numbers]
            dist.barrier(group=group)
            good += [take(links, tickets[i], row[i], i) for i in numbers]
        good.append(links.failure() is None)
        links.close()
    dist.destroy_process_group(group)
    return good


def test_a_sender_need_not_wait_until_what_was_asked_for_is_taken() -> None:
    assert all(map(all, two_ranks.answers(asked_and_not_taken)))
