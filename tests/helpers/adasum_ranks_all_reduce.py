# SPDX-License-Identifier: Apache-2.0
"""adasum_all_reduce, as each rank runs it: layouts, dtypes, memory, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from helpers.adasum_ranks import caught

import torch_sm3

Tensors = list[torch.Tensor]


def leaves(rank: int, *, seed: int = 0) -> Tensors:
    """Tensors of this rank: many dtypes, strides and sizes, none divisible by 3."""
    generator = torch.Generator().manual_seed(100 * seed + rank)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    return [
        normal(10),
        normal(6, 5).t(),
        normal(9).double()[::2],
        torch.empty(0),
        normal(4, 4).to(torch.bfloat16),
        normal(3),
        normal(1).half(),
        normal(40_001),
        torch.zeros(5) if rank == 1 else normal(5),
    ]


def lists(rank: int, size: int) -> dict[str, Tensors]:
    """The same tensors by every way of calling; ``before`` are the leaves."""
    tensors = leaves(rank)
    found = {"before": [t.clone() for t in tensors]}

    def run(name: str, call: Callable[[], Any]) -> None:
        for tensor, start in zip(tensors, found["before"], strict=True):
            tensor.copy_(start)
        call()
        found[name] = [t.clone() for t in tensors]

    def later() -> None:
        # Four calls in flight, waited for out of order.
        copies = [[t.clone() for t in tensors] for _ in range(3)]
        futures = [
            torch_sm3.adasum_all_reduce(part, async_op=True)
            for part in (tensors, *copies)
        ]
        for future, part in zip(futures[::-1], [*copies[::-1], tensors], strict=True):
            assert future.wait() is part
        for part in copies:
            assert all(map(torch.equal, part, tensors))

    def one_by_one() -> None:
        state = torch_sm3.AdasumState()
        for tensor in tensors:
            torch_sm3.adasum_all_reduce(tensor, state=state)
        state.close()

    op = torch.ops.torch_sm3.adasum_all_reduce_
    run("list", lambda: torch_sm3.adasum_all_reduce(tensors))
    run("async", later)
    run("by name", lambda: op.default(tensors, dist.group.WORLD.group_name))
    run("by group", lambda: op.process_group(tensors, dist.group.WORLD.boxed()))
    run("state", one_by_one)
    return found


def by_options(rank: int, size: int, options: dict[str, Any]) -> tuple[Tensors, Any]:
    """Dense leaves of a call with options, and its result or its refusal."""
    generator = torch.Generator().manual_seed(rank)
    tensors = [torch.randn(n, generator=generator) for n in (1, 40_001, 0, 3, 70)]
    before = [t.clone() for t in tensors]
    failure = caught(lambda: torch_sm3.adasum_all_reduce(tensors, **options))
    return before, tensors if failure[0] == "nothing" else failure


def orthogonal(rank: int, size: int) -> torch.Tensor:
    """The result of leaves with nothing in common."""
    tensor = torch.zeros(size, 20_000)
    tensor[rank] = 1.0 + rank
    torch_sm3.adasum_all_reduce(tensor)
    return tensor.flatten()


def identical(
    rank: int, size: int, dtype: torch.dtype, values: list[float]
) -> list[bool]:
    """Whether equal leaves of 16 elements come back as they were."""
    tensors = [torch.full((16,), value, dtype=dtype) for value in values]
    before = [t.clone() for t in tensors]
    torch_sm3.adasum_all_reduce(tensors)
    if size & (size - 1) == 0:
        return [torch.equal(a, b) for a, b in zip(tensors, before, strict=True)]
    # A sum of other weights than 2^-k rounds once more.
    return [
        bool(((a.view(dtype_of(a)) - b.view(dtype_of(b))).abs() <= 1).all())
        for a, b in zip(tensors, before, strict=True)
    ]


def dtype_of(tensor: torch.Tensor) -> torch.dtype:
    """The integers whose difference counts the values between two of a dtype."""
    return {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]


def small_pieces(rank: int, size: int) -> tuple[Tensors, Tensors]:
    """Layers of 0 to 10 elements, each in a call of its own and all in one."""
    generator = torch.Generator().manual_seed(rank)
    tensors = [torch.randn(n, generator=generator) for n in range(11)]
    before = [t.clone() for t in tensors]
    for tensor in tensors:
        torch_sm3.adasum_all_reduce(tensor)
    together = [t.clone() for t in before]
    torch_sm3.adasum_all_reduce(together)
    assert all(map(torch.equal, together, tensors))
    return before, tensors


def large_messages(rank: int, size: int) -> list[bool]:
    """Messages far larger than the buffers of a socket, from all ranks at once."""
    leaf = torch.arange(5_000_000, dtype=torch.float32) % 1000
    tensors = [leaf.clone(), (rank + 1) * leaf, leaf.clone(), torch.ones(3)]
    torch_sm3.adasum_all_reduce(tensors)
    mean = leaf.double() * (size + 1) / 2
    close = (tensors[1].double() - mean).abs() <= 2.0**-23 * mean
    ulp = ((tensors[0] - leaf).abs() <= 2.0**-23 * leaf).all()
    return [bool(ulp), bool(close.all()), torch.equal(tensors[0], tensors[2])]


def refused(rank: int, size: int) -> dict[str, tuple[str, str]]:
    """Tensors that no rank may send; then a call that shows that none did."""
    fine = torch.ones(3)
    cases: dict[str, Tensors] = {
        "sparse": [fine, torch.ones(3).to_sparse()],
        "integer": [fine, torch.ones(3, dtype=torch.int64)],
        "bool": [fine, torch.ones(3, dtype=torch.bool)],
        "float8": [fine, torch.ones(3).to(torch.float8_e4m3fn)],
        "complex32": [fine, torch.ones(3, dtype=torch.complex32)],
        "quantized": [fine, torch.quantize_per_tensor(fine, 0.1, 0, torch.qint8)],
        "overlap": [fine, fine[1:]],
        "expanded": [torch.ones(1).expand(3)],
        "none": [],
    }
    found = {}
    for name, tensors in cases.items():
        found[name] = caught(lambda t=tensors: torch_sm3.adasum_all_reduce(t))[:2]
        # Where only one rank is wrong the others must not be left waiting: they get
        # an answer from its next, good call, which is their first.
        value = torch.full((3,), float(rank + 1))
        torch_sm3.adasum_all_reduce(value)
        assert torch.allclose(value, torch.full((3,), (1.0 + size) / 2))
    return found


def embedding(rank: int, size: int) -> tuple[str, str, float]:
    """A sparse gradient under DDP."""
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Embedding(10, 4, sparse=True)
    )
    state = torch_sm3.AdasumState()
    model.register_comm_hook(state, torch_sm3.adasum_hook)
    failure = caught(lambda: model(torch.tensor([rank])).sum().backward())
    state.close()
    return failure


def disagree(rank: int, size: int) -> tuple[list[tuple[str, str, float]], torch.Tensor]:
    """Ranks with different layouts, dtypes and options; then one good call."""
    one = torch.ones(6)
    odd = rank % 2
    calls = [
        lambda: torch_sm3.adasum_all_reduce(torch.ones(6 + odd)),
        lambda: torch_sm3.adasum_all_reduce([one[: 2 + odd], one[3:]]),
        lambda: torch_sm3.adasum_all_reduce([one[: 2 + odd], one[2 + odd :]]),
        lambda: torch_sm3.adasum_all_reduce(one if odd else one.double()),
        lambda: torch_sm3.adasum_all_reduce(one, scale=1.0 + odd),
        lambda: torch_sm3.adasum_all_reduce(one, mode="sum" if odd else "psum"),
    ]
    failures = [caught(call) for call in calls]
    good = torch.full((3,), float(rank + 1))
    torch_sm3.adasum_all_reduce(good)
    return failures, good
