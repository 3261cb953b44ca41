# SPDX-License-Identifier: Apache-2.0
"""Measure framed messages between two ranks against raw sends and receives.

Two Gloo processes, one thread each, throw a tensor back and forth: once with the
library's links (a header that is checked, then the payload), once with ``isend`` and
``irecv`` into a tensor of known shape. The two take turns, so that both see the same
machine.

    python benchmarks/pipeline_messages.py --json pipeline_messages.json
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from _ranks import Times, alternate, ratio, run, spread
from _report import Figure, arguments, finish

import torch_sm3

# What the time may be at most, by bytes of the payload.
LIMITS = {1 << 10: 2.5, 1 << 20: 1.15}
EXCHANGES = 20


class Framed:
    """Framed messages over a group of their own.

    Args:
        rank: this rank.
    """

    def __init__(self, rank: int) -> None:
        self.peer = 1 - rank
        group = dist.new_group(timeout=timedelta(seconds=300))
        assert isinstance(group, dist.ProcessGroup), "both ranks are in it"
        self.links = torch.classes.torch_sm3.PipelineTransport(
            group.boxed(), 60.0, 2, 0, [0, 1], [], [], [], "cpu", 0
        )
        assert torch_sm3.__version__, "the library holds the class of links"
        self.links.begin(1, False)
        self.stages = (rank, 1 - rank)

    def send(self, tensor: torch.Tensor, i: int) -> None:
        """Post a message."""
        sent = self.links.send(
            self.peer, 0, *self.stages, i, "t", [tensor], False, 60.0
        )
        assert sent == 1, self.links.failure()

    def receive(self, i: int) -> torch.Tensor:
        """Wait for a message."""
        ticket = self.links.receive(self.peer, 0, *self.stages[::-1], i)
        assert self.links.wait(ticket, 60.0) == 1, self.links.failure()
        tensor: torch.Tensor = self.links.take(ticket)[2][0]
        return tensor


def framed(rank: int, links: Framed, tensor: torch.Tensor) -> Callable[[], None]:
    """Return one exchange, there and back, of framed messages."""
    count = [0]

    def exchange() -> None:
        i = count[0]
        count[0] += 1
        if rank == 0:
            links.send(tensor, i)
            links.receive(i)
        else:
            links.send(links.receive(i), i)

    return exchange


def raw(rank: int, tensor: torch.Tensor) -> Callable[[], None]:
    """Return one exchange of bare tensors; the receiver allocates, as ours does."""

    def exchange() -> None:
        if rank == 0:
            sent = dist.isend(tensor, 1)
            got = torch.empty_like(tensor)
            back = dist.irecv(got, 1)
            assert sent is not None and back is not None
            sent.wait()
            back.wait()
        else:
            got = torch.empty_like(tensor)
            came = dist.irecv(got, 0)
            assert came is not None
            came.wait()
            sent = dist.isend(got, 0)
            assert sent is not None
            sent.wait()

    return exchange


def everything(repeats: int) -> dict[int, Times]:
    """Return the times of all sizes on this rank; those of rank 0 count."""
    rank = dist.get_rank()
    links = Framed(rank)
    found = {}
    for size in LIMITS:
        tensor = torch.rand(size // 4)
        ways = {"framed": framed(rank, links, tensor), "raw": raw(rank, tensor)}
        calls = {name: repeated(way) for name, way in ways.items()}
        found[size] = alternate(calls, repeats)
    dist.barrier()
    links.links.close()
    return found


def repeated(exchange: Callable[[], None]) -> Callable[[], None]:
    """Return many exchanges at once: one is shorter than the start of both ranks."""

    def many() -> None:
        for _ in range(EXCHANGES):
            exchange()

    return many


def main() -> None:
    """Parse the command line, measure, print the figures and write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments(parser)
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    found = run(2, everything, 5 if options.quick else options.repeats)
    figures = [
        Figure(
            f"message of {size >> 10} KiB, framed / raw",
            ratio(times, "framed", "raw"),
            LIMITS[size],
        )
        for size, times in found.items()
    ]
    measured = {
        "exchanges": EXCHANGES,
        "quartiles_ms": {str(size): spread(times) for size, times in found.items()},
    }
    finish(figures, options, measured)


if __name__ == "__main__":
    main()
