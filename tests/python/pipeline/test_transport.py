# SPDX-License-Identifier: Apache-2.0
"""Framed messages between two ranks."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.scenarios import Scenarios

from torch_sm3.pipeline import PipelineRunner, Stage, plan
from torch_sm3.pipeline._faults import Failure, LinksLostError, PoisonedError
from torch_sm3.pipeline._links import (
    ACTIVATION,
    GRADIENT,
    Links,
    new_group,
    route_link,
)

two_ranks = Scenarios(2)
three_ranks = Scenarios(3, timeout=120.0)

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.complex128, torch.complex64, torch.complex32, torch.int64,
    torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16,
    torch.uint8, torch.bool,
]  # fmt: skip


def open_links(timeout: float = 20.0, max_pending: int = 2) -> Links:
    links = Links(new_group(None, 20.0), timeout, max_pending, 1, [0, 1])
    links.begin(1, False)
    return links


def payload() -> list[torch.Tensor]:
    """Return all kinds of tensors, the same on both ranks."""
    generator = torch.Generator().manual_seed(5)
    base = torch.rand(4, 6, generator=generator) * 8
    tensors = [base.to(dtype) for dtype in DTYPES]
    tensors += [
        torch.tensor(3.5),
        torch.tensor(True),
        torch.empty(0),
        torch.empty(3, 0, 2, dtype=torch.int64),
        base.t(),
        base[::2, 1::3],
        base[:1].expand(5, 6),
        torch.view_as_complex(base.view(4, 3, 2)).conj(),
        torch.view_as_complex(base.view(4, 3, 2)).conj().imag,
        torch.rand([1] * 30, generator=generator),
        base.t()[1:2, 2:3],
        base.as_strided((1,), (7,), 3),
        base.as_strided((1, 2), (0, 1), 5),
    ]
    # One element with strides that no contiguous tensor of more would have.
    tensors += [base[1, 2].to(dtype).expand(1, 1) for dtype in DTYPES]
    # Too many shapes for one frame of 512 bytes.
    return tensors + [base[i % 4] for i in range(100)]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare bits, types and shapes."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    plain = [torch.empty(x.shape, dtype=x.dtype).copy_(x) for x in (a, b)]
    return torch.equal(*(x.view(-1).view(torch.uint8) for x in plain))


@two_ranks
def exchange(rank: int, ranks: int) -> Any:
    links = open_links()
    sent = payload()
    good = []
    for link in (ACTIVATION, GRADIENT, route_link(0, False), route_link(253, True)):
        stages = (rank, 1 - rank)
        ticket = links.receive(1 - rank, link, stages[::-1], 7)
        links.send(1 - rank, link, stages, 7, "text with ü", sent)
        structure, tensors, requires_grad = links.take(ticket)
        good += [structure == "text with ü", not any(requires_grad)]
        good += [len(tensors) == len(sent), *map(same, sent, tensors)]
    # All links at once, received in the other order, at p = 2 over one peer.
    several = [
        ACTIVATION,
        GRADIENT,
        *(route_link(k, b) for k in (0, 1) for b in (0, 1)),
    ]
    for link in several:
        links.send(1 - rank, link, (rank, 1 - rank), link, "t", [torch.tensor(link)])
    for link in several[::-1]:
        ticket = links.receive(1 - rank, link, (1 - rank, rank), link)
        good.append(links.take(ticket)[1][0].item() == link)
    # Whether a tensor requires grad travels; its graph does not.
    leaf = torch.ones(2, requires_grad=True)
    links.send(
        1 - rank, ACTIVATION, (rank, 1 - rank), 0, "tt", [leaf * 2, leaf.detach()]
    )
    ticket = links.receive(1 - rank, ACTIVATION, (1 - rank, rank), 0)
    _, tensors, requires_grad = links.take(ticket)
    good += [requires_grad == [True, False], tensors[0].is_leaf]
    good.append(links.failure() is None)
    links.close()
    links.close()
    return good


def test_all_dtypes_and_shapes_arrive() -> None:
    for answer in two_ranks.answers(exchange):
        assert all(answer), answer


@two_ranks
def bound(rank: int, ranks: int) -> Any:
    links = open_links(max_pending=2)
    big = [torch.zeros(1 << 16)]
    if rank == 1:
        dist.barrier()
        for i in range(4):
            ticket = links.receive(0, ACTIVATION, (0, 1), i)
            assert same(links.take(ticket)[1][0], big[0] + i)
        links.close()
        return None
    native = links._native
    for i in range(2):
        # The caller may drop what it sent; the link keeps the bytes.
        assert native.send(1, ACTIVATION, 0, 1, i, "t", [big[0] + i], False, 0.0) == 1
    assert native.send(1, ACTIVATION, 0, 1, 2, "t", [big[0] + 2], False, 0.1) == 0
    # Another class has room of its own.
    assert native.send(1, GRADIENT, 0, 1, 0, "t", [], False, 0.0) == 1
    ticks: list[float] = []

    def tick() -> None:
        while len(ticks) < 30:
            ticks.append(time.monotonic())
            time.sleep(0.005)

    thread = threading.Thread(target=tick)
    thread.start()
    assert native.send(1, ACTIVATION, 0, 1, 2, "t", [big[0] + 2], False, 0.5) == 0
    # Other Python threads ran while this one waited inside the library.
    assert len(ticks) == 30
    dist.barrier()
    links.send(1, ACTIVATION, (0, 1), 2, "t", [big[0] + 2])
    links.send(1, ACTIVATION, (0, 1), 3, "t", [big[0] + 3])
    links.close()
    return None


def test_sends_under_way_are_bounded_and_do_not_hold_the_interpreter() -> None:
    two_ranks.answers(bound)


def mismatch(rank: int, ranks: int, what: str) -> str:
    links = open_links()
    wanted = {"stages": (0, 1), "microbatch": 3}
    if rank == 0:
        if what == "step":
            links.begin(2, False)
        elif what == "stage":
            wanted["stages"] = (4, 1)
        elif what == "microbatch":
            wanted["microbatch"] = 4
        elif what == "eval":
            links.begin(1, True)
        sent = [torch.ones(1000)]
        links.send(1, ACTIVATION, wanted["stages"], wanted["microbatch"], "t", sent)
        ticket = links.receive(1, GRADIENT, (1, 0), 0)
    else:
        ticket = links.receive(0, ACTIVATION, wanted["stages"], wanted["microbatch"])
    with pytest.raises(LinksLostError):
        links.take(ticket)
    with pytest.raises(LinksLostError):
        links.send(1 - rank, ACTIVATION, (rank, 1 - rank), 0, "", [])
    failure = links.failure()
    links.flush(1.0)
    links.close()
    assert failure is not None and failure.error_type == "ProtocolError"
    return failure.message


MISMATCHES = ("step", "stage", "microbatch", "eval")


@two_ranks
def mismatches(rank: int, ranks: int) -> dict[str, str]:
    return {what: mismatch(rank, ranks, what) for what in MISMATCHES}


@pytest.mark.parametrize("what", MISMATCHES)
def test_another_header_names_both_sides_on_both_ranks(what: str) -> None:
    first, second = (answer[what] for answer in two_ranks.answers(mismatches))
    assert first == second
    assert first.startswith(
        "rank 1 expected activation of microbatch 3 from stage 0 to stage 1 in step 1, "
        "but rank 0 sent another message: activation of microbatch "
    )
    told = {
        "step": "3 from stage 0 to stage 1 in step 2",
        "stage": "3 from stage 4 to stage 1 in step 1",
        "microbatch": "4 from stage 0 to stage 1 in step 1",
        "eval": "3 from stage 0 to stage 1 in eval 1",
    }
    assert first.endswith(told[what])


@two_ranks
def garbage(rank: int, ranks: int) -> str:
    group = new_group(None, 20.0)
    if rank == 0:
        # Tag 3: frames of activations (channel 0) from rank 0 to rank 1 of 2.
        dist.send(torch.arange(512).to(torch.uint8), group=group, group_dst=1, tag=3)
        dist.barrier()
        return ""
    links = Links(group, 20.0, 2, 1, [0, 1])
    links.begin(1, False)
    with pytest.raises(LinksLostError):
        links.take(links.receive(0, ACTIVATION, (0, 1), 0))
    failure = links.failure()
    dist.barrier()
    links.close()
    assert failure is not None
    return failure.message


def test_bytes_that_are_no_header_are_refused() -> None:
    message = two_ranks.answers(garbage)[1]
    assert "expected a frame of torch_sm3, but got other bytes" in message
    assert message.startswith("rank 1 expected activation") and "rank 0 sent" in message


@two_ranks
def poison(rank: int, ranks: int) -> Any:
    links = open_links()
    failure = Failure(0, 0, 5, "0F5", "ValueError", "lang: " + "ä" * 2000)
    if rank == 0:
        links.poison(1, ACTIVATION, (0, 1), 5, failure)
        links.send(1, ACTIVATION, (0, 1), 6, "N", [])
        links.close()
        return failure
    with pytest.raises(PoisonedError) as info:
        links.take(links.receive(0, ACTIVATION, (0, 1), 5))
    assert links.take(links.receive(0, ACTIVATION, (0, 1), 6)) == ("N", [], [])
    links.close()
    return info.value.failure


def test_poison_takes_the_place_of_one_message() -> None:
    first, second = two_ranks.answers(poison)
    assert first == second


@three_ranks
def leave_early(rank: int, ranks: int) -> Any:
    links = Links(new_group(None, 20.0), 20.0, 1, 2, [0, 1, 2])
    links.begin(1, False)
    if rank == 0:
        # All that rank 0 waits for; the others are not through yet.
        links.hear(2)
        links.close()
        dist.barrier()
        dist.barrier()
        return None
    if rank == 2:
        links.tell(0, "done")
        dist.barrier()  # rank 0 has closed
        time.sleep(0.3)
        links.tell(1, "done")
    else:
        dist.barrier()
        assert links.hear(2) == "done"
    assert links.failure() is None
    dist.barrier()
    # Whoever still wants something of rank 0 learns at once that it is gone.
    start = time.monotonic()
    with pytest.raises(LinksLostError):
        links.hear(0 if rank == 2 else 2)
    failure = links.failure()
    links.flush(1.0)
    links.close()
    assert failure is not None
    return failure.error_type, failure.rank, time.monotonic() - start < 10


def test_a_rank_that_is_done_first_may_close_before_the_others_are() -> None:
    answers = three_ranks.answers(leave_early)
    assert answers == [None, ("PeerLost", 0, True), ("PeerLost", 0, True)]


@two_ranks
def wrong_calls(rank: int, ranks: int) -> None:
    links = open_links()
    native = links._native
    with pytest.raises(ValueError, match="expected a ticket of receive, but got 99"):
        native.wait(99, 0.0)
    with pytest.raises(ValueError, match="whose message has arrived"):
        native.take(links.receive(1 - rank, ACTIVATION, (1 - rank, rank), 0))
    with pytest.raises(ValueError, match=r"activation.*but got -1 \(argument 'link'\)"):
        native.receive(1 - rank, -1, 0, 1, 0)
    with pytest.raises(ValueError, match="at most 64 dimensions, but got 65"):
        native.send(1 - rank, 0, 0, 1, 0, "", [torch.ones([1] * 65)], False, 0.0)
    sparse = torch.ones(2).to_sparse()
    with pytest.raises(TypeError, match="expected dense CPU tensors, or"):
        native.send(1 - rank, 0, 0, 1, 0, "t", [sparse], False, 0.0)
    # No memory for the bytes: the sender's error, and the link is as good as before.
    endless = torch.ones(1).expand(1 << 50)
    with pytest.raises(RuntimeError, match="memory"):
        native.send(1 - rank, 1, rank, 1 - rank, 0, "t", [endless], False, 0.0)
    assert links.failure() is None
    links.send(1 - rank, GRADIENT, (rank, 1 - rank), 0, "N", [])
    asked = links.receive(1 - rank, GRADIENT, (1 - rank, rank), 0)
    assert links.take(asked) == ("N", [], [])
    dist.barrier()
    links.close()


def test_wrong_calls_are_refused() -> None:
    two_ranks.answers(wrong_calls)


@three_ranks
def part_of_the_world(rank: int, ranks: int) -> float:
    part = dist.new_group([0, 1])
    if rank < 2:
        for _ in range(2):
            links = Links(new_group(part, 20.0), 20.0, 2, 1, [0, 1])
            links.close()
    # Numbered by torch's own counter, which only the members would have raised.
    everyone = dist.new_group(backend="gloo")
    total = torch.tensor(float(rank + 1))
    dist.all_reduce(total, group=everyone)
    dist.destroy_process_group(everyone)
    return total.item()


def test_groups_of_some_ranks_leave_later_groups_of_all_alone() -> None:
    assert three_ranks.answers(part_of_the_world) == [6.0] * 3


@two_ranks
def two_links_to_one_peer(rank: int, ranks: int) -> list[bool]:
    # p = 2, v = 2: stages 0 and 2 on rank 0, 1 and 3 on rank 1.
    links = open_links()
    good = []
    if rank == 0:
        for source, microbatch in ((0, 0), (0, 1), (2, 0), (0, 2), (2, 1)):
            value = [torch.tensor([source, microbatch])]
            links.send(1, ACTIVATION, (source, source + 1), microbatch, "t", value)
    else:
        for source, microbatch in ((0, 0), (0, 1), (2, 0), (0, 2), (2, 1)):
            stages = source, source + 1
            _, (got,), _ = links.take(links.receive(0, ACTIVATION, stages, microbatch))
            good.append(got.tolist() == [source, microbatch])
    links.close()
    return good


def test_two_links_to_one_peer_are_kept_apart() -> None:
    assert two_ranks.answers(two_links_to_one_peer)[1] == [True] * 5


@two_ranks
def slow_link(rank: int, ranks: int) -> list[float]:
    group = new_group(None, 20.0)
    links = Links(group, 20.0, 2, 1, [0, 1], {(0, 1): 0.3})
    links.begin(1, False)
    dist.barrier()
    times = [time.monotonic()]
    for i in range(2):
        # A small message, and one whose payload travels by itself.
        value = [torch.full((1 << (16 * i),), float(i))]
        if rank == 0:
            links.send(1, ACTIVATION, (0, 1), i, "t", value)
        else:
            _, got, _ = links.take(links.receive(0, ACTIVATION, (0, 1), i))
            assert same(got[0], value[0])
        times.append(time.monotonic())
    if rank == 1:
        links.send(0, GRADIENT, (1, 0), 0, "N", [])
        dist.barrier()
    else:
        links.take(links.receive(1, GRADIENT, (1, 0), 0))
        times.append(time.monotonic())
        dist.barrier()
        # What is held back still leaves before the links are closed.
        links.send(1, ACTIVATION, (0, 1), 2, "t", [torch.ones(1)])
    if rank == 1:
        _, got, _ = links.take(links.receive(0, ACTIVATION, (0, 1), 2))
        assert got[0].item() == 1.0
    links.close()
    return times


def test_a_slow_link_holds_messages_back_and_not_the_sender() -> None:
    sent, arrived = two_ranks.answers(slow_link)
    # One clock for both: when the first rank began and went on, when each arrived.
    assert sent[2] < arrived[1]
    assert arrived[1] - sent[0] >= 0.3 and arrived[2] - sent[1] >= 0.3


@two_ranks
def both_send_first(rank: int, ranks: int) -> list[bool]:
    links = open_links(max_pending=1)
    good = []
    for sizes in ([1] * 6, [1 << 16] * 6, [1, 1 << 16] * 3, [1 << 16, 1] * 3):
        values = [torch.full((size,), float(i)) for i, size in enumerate(sizes)]
        asked = [
            links.receive(1 - rank, ACTIVATION, (1 - rank, rank), i)
            for i in range(len(values))
        ]
        # Each waits until the one before has left, although nobody takes any yet.
        for i, value in enumerate(values):
            links.send(1 - rank, ACTIVATION, (rank, 1 - rank), i, "t", [value])
        for ticket, value in zip(asked, values, strict=True):
            good.append(same(links.take(ticket)[1][0], value))
    links.close()
    return good


def test_what_was_asked_for_arrives_while_its_receiver_waits_to_send() -> None:
    assert two_ranks.answers(both_send_first) == [[True] * 24] * 2


@two_ranks
def slow_runner(rank: int, ranks: int) -> tuple[float, bool]:
    x, y = torch.arange(12.0).view(4, 3), torch.ones(4, 3)
    grads, seconds = [], 0.0
    for delay in ({}, {(0, 1): 0.25}):
        torch.manual_seed(rank)
        module = torch.nn.Linear(3, 3)
        runner = PipelineRunner(
            [Stage(module, rank)],
            plan("gpipe", 2, 2),
            loss_fn=torch.nn.functional.mse_loss,
            link_delay=delay,
        )
        dist.barrier()
        start = time.monotonic()
        runner.step(x, target=y)
        seconds = time.monotonic() - start
        runner.close()
        grads.append(module.weight.grad)
    for wrong in ({(0, 2): 0.1}, {(0, 1): -1.0}):
        with pytest.raises(ValueError, match=r"pairs of 2 ranks.*'link_delay'"):
            PipelineRunner(
                [Stage(module, rank)],
                plan("gpipe", 2, 2),
                loss_fn=torch.nn.functional.mse_loss,
                link_delay=wrong,
            )
    return seconds, torch.equal(*grads)


def test_a_runner_has_slow_links_if_asked() -> None:
    for seconds, same_bits in two_ranks.answers(slow_runner):
        # Each rank waits for what follows from a message that was held back.
        assert seconds >= 0.2 and same_bits
