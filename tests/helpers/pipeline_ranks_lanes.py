# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of lanes, the links for tensors of a device.

Where there is no CUDA, the lanes are two-rank groups of Gloo for tensors of the CPU:
what opens them and what matches their messages is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from helpers.pipeline_chain import (
    accumulate,
    batches,
    chain,
    differing,
    own_stages,
    runner_of,
    squared,
)
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_sm3.pipeline import PipelineError, Schedule, plan
from torch_sm3.pipeline import _build as build
from torch_sm3.pipeline import _lanes as lanes_module
from torch_sm3.pipeline._faults import LinksLostError
from torch_sm3.pipeline._lanes import Lanes, directed_links, make_lanes
from torch_sm3.pipeline._links import ACTIVATION, Links, new_group

CPU = torch.device("cpu")
LONG = timedelta(seconds=120)


@contextmanager
def lanes_on_cpu() -> Iterator[list[tuple[int, int]]]:
    """Give runners lanes of Gloo; note which pairs of ranks open groups, in order."""
    opened = []
    own_open, own_group = build.open_lanes, lanes_module.group_of_ranks

    def noted(ranks: list[int], *rest: Any) -> dist.ProcessGroup:
        opened.append((ranks[0], ranks[1]))
        return own_group(ranks, *rest)

    def always(
        group: Any, frames: Any, placement: Any, routes: Any, modules: Any, limit: Any
    ) -> Lanes | None:
        links = directed_links(placement, routes)
        # Whatever the order in which a rank comes to know them.
        links = links[:: 1 - 2 * (dist.get_rank() % 2)]
        return make_lanes(frames, links, CPU, len(routes), limit, "gloo")

    build.open_lanes, lanes_module.group_of_ranks = always, noted
    try:
        yield opened
    finally:
        build.open_lanes, lanes_module.group_of_ranks = own_open, own_group


def trained(rank: int, ranks: int, text: str) -> tuple[list[str], list[Any]]:
    """Step, evaluate and step over lanes; compare with one process."""
    schedule = Schedule.parse(text)
    count, m = len(schedule.placement), schedule.microbatches
    mine, whole = chain(count), chain(count)
    # Microbatches of several sizes: a message in another's place would show.
    items, targets = batches([1 + i % 3 for i in range(m)])
    with lanes_on_cpu() as opened:
        runner = runner_of(mine, schedule, rank)
        for _ in range(2):
            result = runner.step(microbatches=items, targets=targets)
            losses = accumulate(whole, items, targets, [1 / m] * m)
            assert torch.equal(result.losses, torch.stack(losses))
            runner.eval(microbatches=items[:2], targets=targets[:2])
            wrong = differing(mine, whole, own_stages(schedule, rank))
            for parameter in nn.ModuleList([*mine, *whole]).parameters():
                parameter.grad = None
        runner.close()
    return wrong, opened


class Skipping(nn.Module):
    """A layer whose input goes on by a route as well."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"x": self.layer(x), "skip": x * 2}


class Joining(nn.Module):
    """Add what comes by a route, if it comes."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, value: Any, skip: Tensor | None = None) -> Tensor:
        x = value["x"] if isinstance(value, dict) else value
        return self.layer(x if skip is None else x + skip)


def routed_and_tied(rank: int, ranks: int, by_lane: bool) -> list[Tensor]:
    """Step with a route over a stage and tied weights; return the gradients."""
    layers = chain(3)
    stages = [Skipping(layers[0]), Joining(layers[1]), Joining(layers[2])]
    options: dict[int, dict[str, Any]] = {
        0: {"routes": {"skip": 2}, "tied": {"layer.0.weight": "w"}},
        2: {"tied": {"layer.0.weight": "w"}},
    }
    schedule = plan("1f1b", 3, 5)
    items, targets = batches([2, 1, 3, 2, 2])

    def gradients() -> list[Tensor]:
        runner = runner_of(stages, schedule, rank, options)
        runner.step(microbatches=items, targets=targets)
        runner.step(microbatches=items, targets=targets)
        runner.close()
        return [p.grad.clone() for p in stages[rank].parameters() if p.grad is not None]

    if not by_lane:
        return gradients()
    with lanes_on_cpu():
        return gradients()


class Once(nn.Module):
    """Raise at a call."""

    def __init__(self, layer: nn.Module, call: int) -> None:
        super().__init__()
        self.layer, self.left = layer, call

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.left == 0:
            raise ValueError("this once")
        return self.layer(x)


def recovered(rank: int, ranks: int) -> list[str]:
    """Fail in the third microbatch of stage 1, then step as if nothing had been."""
    mine, whole = chain(4), chain(4)
    runs = [*mine[:1], Once(mine[1], 3), *mine[2:]]
    schedule = plan("interleaved", 2, 4, chunks=2)
    items, targets = batches([2, 1, 3, 2])
    with lanes_on_cpu():
        runner = runner_of(runs, schedule, rank)
        try:
            runner.step(microbatches=items, targets=targets)
        except PipelineError as error:
            assert (error.rank, error.microbatch) == (1, 2)
        else:
            raise AssertionError("expected a PipelineError")
        runner.step(microbatches=items, targets=targets)
        runner.close()
    accumulate(whole, items, targets, [1 / 4] * 4)
    return differing(mine, whole, own_stages(schedule, rank))


def lanes_at_one_end(rank: int, ranks: int) -> str:
    """Send by a lane to a rank that has none."""
    frames = new_group(None, 60.0)
    lanes = make_lanes(frames, [(0, 1)], CPU, 0, LONG, "gloo")
    assert lanes is not None
    links = Links(frames, 60.0, 2, 1, [0, 1], None, lanes if rank == 0 else None)
    links.begin(1, False)
    try:
        if rank == 0:
            links.send(1, ACTIVATION, (0, 1), 0, "t", [torch.ones(3)])
        links.take(links.receive(1 - rank, ACTIVATION, (1 - rank, rank), 0))
    except LinksLostError:
        failure = links.failure()
        assert failure is not None
        return f"{failure.error_type}: {failure.message}"
    finally:
        links.close()
        lanes.close(lost=True)
    raise AssertionError("expected the links to be lost")


def device_without_lanes(rank: int, ranks: int) -> str:
    """Send a tensor of CUDA over links that have no lanes."""
    links = Links(new_group(None, 60.0), 60.0, 2, 1, [0, 1])
    links.begin(1, False)
    with FakeTensorMode():
        fake = torch.empty(3, device="cuda:0")
    try:
        links.send(1 - rank, ACTIVATION, (rank, 1 - rank), 0, "t", [fake])
    except TypeError as error:
        # The links are as good as before.
        links.send(1 - rank, ACTIVATION, (rank, 1 - rank), 0, "t", [torch.ones(2)])
        asked = links.receive(1 - rank, ACTIVATION, (1 - rank, rank), 0)
        assert torch.equal(links.take(asked)[1][0], torch.ones(2))
        return str(error)
    finally:
        dist.barrier()
        links.close()
    raise AssertionError("expected a TypeError")


def no_lanes_for_gloo(rank: int, ranks: int) -> bool:
    """Whether a runner of a Gloo group does without."""
    return build.open_lanes(None, None, [0, 1], [], [], LONG) is None  # type: ignore[arg-type]


def on_cuda(rank: int, ranks: int, text: str) -> list[bool]:
    """Step and evaluate on a GPU for each rank; compare with one GPU alone."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = dist.new_group(backend="nccl")
    schedule = Schedule.parse(text)
    count, m = len(schedule.placement), schedule.microbatches
    mine = [module.to(device) for module in chain(count)]
    whole = [module.to(device) for module in chain(count)]
    items, targets = batches([1 + i % 3 for i in range(m)])
    items, targets = [x.to(device) for x in items], [x.to(device) for x in targets]
    runner = runner_of(mine, schedule, rank, group=group, loss_fn=squared)
    good = []
    for _ in range(3):
        result = runner.step(microbatches=items, targets=targets)
        losses = torch.stack(accumulate(whole, items, targets, [1 / m] * m))
        good.append(torch.allclose(result.losses.cpu(), losses.cpu()))
        runner.eval(microbatches=items[:2], targets=targets[:2])
    runner.close()
    for stage in own_stages(schedule, rank):
        pairs = zip(mine[stage].parameters(), whole[stage].parameters(), strict=True)
        good += [torch.allclose(a.grad, b.grad) for a, b in pairs]  # type: ignore[arg-type]
    dist.destroy_process_group(group)
    return good
