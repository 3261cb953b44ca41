# SPDX-License-Identifier: Apache-2.0
"""Adasum under the modes of DDP, as each rank runs it."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
from helpers.adasum_ranks import (
    Grads,
    Net,
    batch,
    grads,
    hooked,
    local_grads,
    loss_of,
    make_net,
)
from torch.distributed.algorithms.join import Join

import torch_sm3

SWITCHES = ("find_unused_parameters", "static_graph", "gradient_as_bucket_view")


def switches(rank: int, size: int) -> tuple[list[Grads], dict[str, list[Grads]]]:
    """Local gradients of four iterations, and those of DDP with every switch."""
    local = [local_grads(make_net(), batch(rank, step)) for step in range(4)]
    runs = {}
    for chosen in itertools.product((False, True), repeat=3):
        for cap in (0.05, 25):
            options = dict(zip(SWITCHES, chosen, strict=True))
            with hooked(make_net(), bucket_cap_mb=cap, **options) as model:
                runs[f"{options}, {cap}"] = [
                    iteration(model, batch(rank, step)) for step in range(4)
                ]
    return local, runs


def iteration(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Grads:
    """Return the gradients of one backward from scratch."""
    model.zero_grad()
    loss_of(model, *args, **kwargs).backward()
    return grads(model)


def modes(rank: int, size: int) -> dict[tuple[str, float], tuple[Grads, Grads]]:
    """The hook with another mode or scale."""
    found = {}
    for mode, scale in (("psum", 1.0), ("mean", 1.0), ("sum", 0.25), ("tree", 0.5)):
        state = torch_sm3.AdasumState(mode=mode, scale=scale)
        with hooked(make_net(), state, bucket_cap_mb=0.05) as model:
            after = iteration(model, batch(rank))
        found[mode, scale] = (local_grads(make_net(), batch(rank)), after)
    return found


class TwoTypes(torch.nn.Module):
    """Layers of two dtypes: DDP keeps them in buckets of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(16, 300)
        self.wide = torch.nn.Linear(300, 150).double()
        self.last = torch.nn.Linear(150, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.wide(self.first(x).tanh().double())
        return self.last(y.float())


def bucket_sizes(
    rank: int, size: int, mode: str, caps: list[float]
) -> dict[float, list[Grads]]:
    """Three iterations with equal inputs for each size of buckets, two dtypes."""
    runs = {}
    for cap in caps:
        torch.manual_seed(12)
        with hooked(
            TwoTypes(), torch_sm3.AdasumState(mode=mode), bucket_cap_mb=cap
        ) as model:
            runs[cap] = [iteration(model, batch(rank)) for _ in range(3)]
    torch.manual_seed(12)
    runs[0.0] = [local_grads(TwoTypes(), batch(rank))]
    return runs


def accumulation(rank: int, size: int) -> dict[str, tuple[Grads, Grads]]:
    """Gradients before and after: no_sync, one large batch, and no zero_grad."""
    net = make_net()
    parts = [local_grads(net, batch(rank, step)) for step in range(1, 5)]
    found = {}
    for step in range(1, 5):
        loss_of(net, batch(rank, step)).backward()
    with hooked(make_net(), bucket_cap_mb=0.05) as model:
        with model.no_sync():
            for step in range(1, 4):
                loss_of(model, batch(rank, step)).backward()
        loss_of(model, batch(rank, 4)).backward()
        found["no_sync"] = (grads(net), grads(model))
    large = torch.cat([batch(rank, step) for step in range(1, 5)])
    with hooked(make_net(), bucket_cap_mb=0.05) as model:
        found["one batch"] = (local_grads(make_net(), large), iteration(model, large))
    with hooked(make_net(), bucket_cap_mb=0.05) as model:
        loss_of(model, batch(rank, 1)).backward()
        previous = grads(model)
        loss_of(model, batch(rank, 2)).backward()
        both = [a + b for a, b in zip(previous, parts[1], strict=True)]
        found["kept"] = (both, grads(model))
    return found


def unused(rank: int, size: int) -> list[tuple[Grads, Grads]]:
    """A layer that only odd ranks use, and one that nobody uses."""
    torch.manual_seed(5)
    net = Net()
    found = []
    for options in (
        {"find_unused_parameters": True},
        {"find_unused_parameters": True, "gradient_as_bucket_view": True},
        {"find_unused_parameters": True, "bucket_cap_mb": 0.02},
    ):
        with hooked(copy.deepcopy(net), **options) as model:
            for step in range(3):
                case = (batch(rank, step), rank % 2 == 1)
                found.append((local_grads(net, *case), iteration(model, *case)))
    return found


class TwoHeads(torch.nn.Module):
    """A body and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.used, self.ignored = (torch.nn.Linear(16, 16) for _ in "abc")

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.body(x)
        return self.used(y), self.ignored(y)


def ignored_output(rank: int, size: int) -> tuple[Grads, Grads]:
    """A static graph with an output that takes no part in the loss."""
    torch.manual_seed(6)
    net = TwoHeads()
    with hooked(copy.deepcopy(net), static_graph=True) as model:
        # In the next iteration DDP leaves its last bucket open, with or without a
        # hook.
        model(batch(rank))[0].square().sum().backward()
        found = grads(model)
    net(batch(rank))[0].square().sum().backward()
    return grads(net), found


def uneven(rank: int, size: int, mode: str, divide: bool) -> list[tuple[Any, Any]]:
    """Three batches on even ranks, one on odd ones, under join()."""
    batches = 3 if rank % 2 == 0 else 1
    found: list[tuple[Any, Any]] = []
    net = make_net()
    with (
        hooked(
            make_net(), torch_sm3.AdasumState(mode=mode), bucket_cap_mb=0.05
        ) as model,
        Join([model], divide_by_initial_world_size=divide),
    ):
        for step in range(batches):
            case = batch(rank, step)
            found.append((local_grads(net, case), iteration(model, case)))
    return found


def identical(rank: int, size: int) -> tuple[Grads, Grads]:
    """The same gradients on all ranks."""
    with hooked(make_net(), bucket_cap_mb=0.05) as model:
        return local_grads(make_net(), batch(0)), iteration(model, batch(0))


def special_layers(rank: int, size: int) -> dict[str, tuple[Grads, Grads]]:
    """channels_last, complex, empty and all-zero parameters."""
    torch.manual_seed(8)
    found = {}
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 10, 3), torch.nn.Tanh(), torch.nn.Conv2d(10, 5, 2)
    ).to(memory_format=torch.channels_last)
    image = batch(rank).repeat(1, 3).view(8, 3, 4, 4)
    with hooked(copy.deepcopy(net)) as model:
        result = iteration(model, image)
        assert result[0] is not None
        assert result[0].is_contiguous(memory_format=torch.channels_last)
        found["channels_last"] = (local_grads(net, image), result)
    odd = Odd()
    with hooked(copy.deepcopy(odd)) as model:
        case = (batch(rank), rank != size - 1)
        found["odd"] = (local_grads(odd, *case), iteration(model, *case))
    return found


class Odd(torch.nn.Module):
    """An empty parameter, one of a single element, one of 10, one without effect."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = torch.nn.Parameter(torch.empty(0, 16))
        self.one = torch.nn.Parameter(torch.ones(()))
        self.ten = torch.nn.Parameter(torch.randn(10))
        self.off = torch.nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor, on: bool) -> torch.Tensor:
        y = x * self.off if on else x * (self.off * 0.0)
        y = torch.cat([y, y @ self.empty.t()], dim=1)
        return y[:, :10] * self.ten * self.one


class Complex(torch.nn.Module):
    """One complex weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(16, 5, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(x.to(torch.complex64) @ self.weight)


def complex_weight(rank: int, size: int) -> tuple[Grads, Grads]:
    """Complex gradients, seen as pairs of reals."""
    torch.manual_seed(9)
    net = Complex()
    with hooked(copy.deepcopy(net)) as model:
        results = iteration(model, batch(rank))
    pairs = [local_grads(net, batch(rank)), results]
    before, after = (
        [torch.view_as_real(g) for g in side if g is not None] for side in pairs
    )
    return before, after
