# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of kinds, routes and determinism."""

from __future__ import annotations

from typing import Any

import torch
from helpers.pipeline_chain import (
    WIDTH,
    accumulate,
    batches,
    chain,
    differing,
    looped,
    own_stages,
    runner_of,
    squared,
)
from torch import Tensor, nn

from torch_sm3.pipeline import Schedule, plan

KINDS: list[tuple[str, int | None]] = [
    ("gpipe", None),
    ("1f1b", None),
    ("interleaved", 2),
    ("interleaved", 3),
    ("looped_bfs", 2),
    ("zb_h1", None),
    ("zb_h2", None),
    ("zbv", None),
    ("v_half", None),
    ("v_min", None),
    ("dualpipe_v", None),
]


def all_kinds(rank: int, ranks: int) -> list[str]:
    """Run every kind; return what differs from one process."""
    wrong = []
    for kind, chunks in KINDS if ranks > 1 else [("none", None)]:
        for m in (1, 2, 5, 8):
            if kind == "dualpipe_v" and m < 2 * ranks:
                continue
            schedule = plan(kind, ranks, m, chunks=chunks)
            mine, whole = chain(schedule.stages), chain(schedule.stages)
            items, targets = batches([2] * m)
            runner = runner_of(mine, schedule, rank, max_pending=1)
            result = runner.step(torch.cat(items), target=torch.cat(targets))
            runner.close()
            losses = accumulate(whole, items, targets, [1 / m] * m)
            names = differing(mine, whole, own_stages(schedule, rank))
            if not torch.equal(result.losses, torch.stack(losses)):
                names.append("losses")
            wrong += [f"{kind} v={chunks} m={m}: {name}" for name in names]
    return wrong


class Branching(nn.Module):
    """Return a dict: what goes on, what skips stages, and what is no tensor."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.module(x)
        return {"x": y, "skip": y * 2, "far": {"y": y, "three": 3}, "none": None}


class Middle(nn.Module):
    """Take the dict that is left."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, value: dict[str, Any]) -> Tensor:
        assert list(value) == ["x", "none"] and value["none"] is None
        return self.module(value["x"])


class Joining(nn.Module):
    """Take one routed value or the other."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, skip: Any = None, far: Any = None) -> Tensor:
        if skip is not None:
            x = x + skip
        if far is not None:
            assert far["three"] == 3
            x = x * far["y"]
        return self.module(x)


def _branching() -> list[nn.Module]:
    first, middle, *rest = chain(4)
    return [Branching(first), Middle(middle), *(Joining(module) for module in rest)]


def routed(rank: int, ranks: int) -> list[str]:
    """Let values of stage 0 skip to stages 2 and 3; return what differs."""
    m, wrong = 3, []
    placements = {1: [[0] * 4], 2: [[0, 1, 0, 1], [0, 1, 1, 0]], 4: [[0, 1, 2, 3]]}
    schedules = [looped(placement, m) for placement in placements[ranks]]
    if ranks == 4:
        schedules += [plan(kind, 4, m) for kind in ("1f1b", "zb_h1")]
    for schedule in schedules:
        mine, whole = _branching(), _branching()
        items, targets = batches([2] * m)
        options = {0: {"routes": {"skip": 2, "far": (3,)}}}
        runner = runner_of(mine, schedule, rank, options)
        result = runner.step(torch.cat(items), target=torch.cat(targets))
        again = runner.eval(torch.cat(items), target=torch.cat(targets))
        runner.close()
        for item, target in zip(items, targets, strict=True):
            first = whole[0](item)
            x = whole[1]({"x": first["x"], "none": None})
            x = whole[3](whole[2](x, skip=first["skip"]), far=first["far"])
            (squared(x, target) / m).backward()
        own = own_stages(schedule, rank)
        # Autograd adds what comes back to stage 0 in an order of its own.
        pairs = [
            (a.grad, b.grad)
            for s in own
            for a, b in zip(mine[s].parameters(), whole[s].parameters(), strict=True)
        ]
        close = all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in pairs)
        wrong += [f"{schedule.text}: gradients"] * (not close)
        wrong += differing(mine, whole, [s for s in own if s > 0])
        if not torch.equal(result.loss, again.loss):
            wrong.append("eval")
    return wrong


class Encoded(nn.Module):
    """The encoder's last stage: its output goes on and to all decoder stages."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.module(x)
        return {"x": y, "memory": y}


class Decoder(nn.Module):
    """Take the encoder's output besides what the stage before returned."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Any, memory: Tensor) -> Tensor:
        x = x["x"] if isinstance(x, dict) else x
        return self.module(x * memory)


def _encoder_decoder() -> list[nn.Module]:
    a, b, c, d = chain(4)
    return [a, Encoded(b), Decoder(c), Decoder(d)]


def encoder_decoder(rank: int, ranks: int) -> list[str]:
    """Run an encoder of two stages and a decoder of two; return what differs."""
    m, wrong = 3, []
    kinds = [("1f1b", None), ("zb_h1", None)]
    for kind, chunks in kinds if ranks == 4 else [("interleaved", 2), ("zbv", None)]:
        schedule = plan(kind, ranks, m, chunks=chunks, split=2, via="direct")
        mine, whole = _encoder_decoder(), _encoder_decoder()
        items, targets = batches([2] * m)
        options = {1: {"routes": {"memory": (2, 3)}}}
        runner = runner_of(mine, schedule, rank, options)
        runner.step(torch.cat(items), target=torch.cat(targets))
        runner.close()
        for item, target in zip(items, targets, strict=True):
            first = whole[1](whole[0](item))
            x = whole[2]({"x": first["x"]}, first["memory"])
            (squared(whole[3](x, first["memory"]), target) / m).backward()
        for s in own_stages(schedule, rank):
            pairs = zip(mine[s].parameters(), whole[s].parameters(), strict=True)
            if not all(torch.allclose(a.grad, b.grad, atol=1e-7) for a, b in pairs):
                wrong.append(f"{kind}: stage {s}")
    return wrong


class Handing(nn.Module):
    """Run a part; the encoder's output goes on to the next stage beside its own."""

    def __init__(self, module: nn.Module, place: str) -> None:
        super().__init__()
        self.module = module
        self.place = place

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Any:
        y = self.module(x if memory is None else x * memory)
        if self.place == "end":
            return y
        return (y, y) if self.place == "encoder" else (y, memory)


def chained_encoder(rank: int, ranks: int) -> list[str]:
    """Hand the encoder's output on from stage to stage; return what differs."""
    m, wrong = 3, []

    def modules() -> list[nn.Module]:
        first, *rest = chain(4)
        places = ("encoder", "decoder", "end")
        return [first, *map(Handing, rest, places)]

    kinds = [("1f1b", None), ("zb_h1", None)]
    for kind, chunks in kinds if ranks == 4 else [("interleaved", 2), ("zbv", None)]:
        schedule = plan(kind, ranks, m, chunks=chunks, split=2, via="chain")
        assert schedule.routes == []
        mine, whole = modules(), modules()
        items, targets = batches([2] * m)
        runner = runner_of(mine, schedule, rank)
        result = runner.step(torch.cat(items), target=torch.cat(targets))
        runner.close()
        losses = []
        for item, target in zip(items, targets, strict=True):
            x, memory = whole[1](whole[0](item))
            x, memory = whole[2](x, memory)
            losses.append(squared(whole[3](x, memory), target))
            (losses[-1] / m).backward()
        names = differing(mine, whole, [s for s in own_stages(schedule, rank) if s > 1])
        # What comes back to the encoder adds up in an order of autograd's own.
        pairs = [
            (a.grad, b.grad)
            for s in own_stages(schedule, rank)
            for a, b in zip(mine[s].parameters(), whole[s].parameters(), strict=True)
        ]
        if not all(torch.allclose(a, b, atol=1e-7) for a, b in pairs):
            names.append("gradients")
        if not torch.equal(result.losses, torch.stack(losses).detach()):
            names.append("losses")
        wrong += [f"{kind}: {name}" for name in names]
    return wrong


def undeclared_route(rank: int, ranks: int) -> str:
    """Leave out the route that an encoder-decoder schedule has."""
    schedule = plan("1f1b", ranks, 2, split=2, via="direct")
    try:
        runner_of(_encoder_decoder(), schedule, rank)
    except ValueError as error:
        return str(error)
    return "nothing"


def lacking_route(rank: int, ranks: int) -> str:
    """Return a dict without the key of a route."""
    schedule = plan("1f1b", ranks, 2)
    options = {0: {"routes": {"other": 1}}}
    modules = [Branching(chain(1)[0]), Joining(chain(1)[0])]
    runner = runner_of(modules, schedule, rank, options)
    items, targets = batches([2] * 2)
    try:
        runner.step(torch.cat(items), target=torch.cat(targets))
    except RuntimeError as error:
        return str(error)
    finally:
        runner.close()
    return "nothing"


def deterministic(rank: int, ranks: int, cases: list[tuple[str, int | None]]) -> Any:
    """Run two steps with dropout; return the bits of the gradients of this rank."""
    m, found = 4, []
    for kind, chunks in cases:
        schedule = plan(kind, ranks, m, chunks=chunks)
        if kind == "none":
            schedule = looped([0] * 4, m)
        modules = chain(4, dropout=0.5)
        items, targets = batches([2] * m)
        runner = runner_of(modules, schedule, rank, deterministic=True, seed=3)
        torch.manual_seed(rank)
        before = torch.get_rng_state()
        for _ in range(2):
            result = runner.step(torch.cat(items), target=torch.cat(targets))
        assert torch.equal(before, torch.get_rng_state())
        # A resumed run goes on with the same random numbers.
        state = runner.state_dict()
        third = runner.step(torch.cat(items), target=torch.cat(targets)).loss
        runner.load_state_dict(state)
        again = runner.step(torch.cat(items), target=torch.cat(targets)).loss
        assert torch.equal(third, again) and not torch.equal(third, result.loss)
        runner.close()
        gradients = {
            (s, name): p.grad.tolist()
            for s in own_stages(schedule, rank)
            for name, p in modules[s].named_parameters()
        }
        found.append((gradients, result.loss.item()))
    return found


def shared_parameter(rank: int, ranks: int) -> bool:
    """Hold one parameter in two stages of one rank; it is left alone."""
    modules = chain(2)
    modules[1][0].weight = modules[0][0].weight
    whole = chain(2)
    whole[1][0].weight = whole[0][0].weight
    items, targets = batches([2] * 3)
    schedule = Schedule.parse(looped([0, 0], 3).text)
    runner = runner_of(modules, schedule, rank)
    runner.step(torch.cat(items), target=torch.cat(targets))
    runner.close()
    accumulate(whole, items, targets, [1 / 3] * 3)
    mine, other = modules[0][0].weight.grad, whole[0][0].weight.grad
    assert mine is not None and other is not None and mine.shape == (WIDTH, WIDTH)
    return torch.allclose(mine, other)
