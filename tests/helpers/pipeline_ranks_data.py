# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of data: lists, iterators, arguments."""

from __future__ import annotations

from collections.abc import Iterator
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

from torch_sm3.pipeline import PipelineError, plan

PLACEMENTS = {1: [0, 0, 0], 2: [0, 1, 1, 0], 3: [2, 0, 1, 0, 2]}


def placements(rank: int, ranks: int) -> list[str]:
    """Run loop, V and arbitrary placements; return what differs from one process."""
    wrong = []
    loop = [s % ranks for s in range(2 * ranks)]
    fold = [*range(ranks), *reversed(range(ranks))]
    for placement in (loop, fold, PLACEMENTS[ranks]):
        for m in (1, 3):
            schedule = looped(placement, m)
            mine, whole = chain(len(placement)), chain(len(placement))
            items, targets = batches([2] * m)
            runner = runner_of(mine, schedule, rank)
            result = runner.step(torch.cat(items), target=torch.cat(targets))
            after = runner.eval(torch.cat(items), target=torch.cat(targets))
            runner.close()
            losses = accumulate(whole, items, targets, [1 / m] * m)
            case = f"{placement} m={m}: "
            names = differing(mine, whole, own_stages(schedule, rank))
            if not torch.equal(result.losses, torch.stack(losses)):
                names.append("losses")
            if not torch.equal(after.loss, result.loss):
                names.append("eval")
            wrong += [case + name for name in names]
    return wrong


def sequences(rank: int, ranks: int) -> list[str]:
    """Give two sequences of other lengths in each microbatch, under some kinds."""
    lengths, wrong = [16, 24, 8], []
    generator = torch.Generator().manual_seed(8)
    items, targets = (
        [torch.randn(2, n, WIDTH, generator=generator) for n in lengths]
        for _ in range(2)
    )
    kinds = [("1f1b", None), ("zb_h1", None), ("interleaved", 2), ("zbv", None)]
    for kind, chunks in kinds:
        schedule = plan(kind, ranks, 3, chunks=chunks)
        mine, whole = chain(schedule.stages), chain(schedule.stages)
        runner = runner_of(mine, schedule, rank)
        result = runner.step(microbatches=items, targets=targets, return_outputs=True)
        runner.close()
        losses = accumulate(whole, items, targets, [1 / 3] * 3)
        names = differing(mine, whole, own_stages(schedule, rank))
        if not torch.equal(result.losses, torch.stack(losses)):
            names.append("losses")
        if result.outputs and [x.shape[1] for x in result.outputs] != lengths:
            names.append("outputs")
        wrong += [f"{kind}: {name}" for name in names]
    return wrong


def ragged(rank: int, ranks: int) -> list[str]:
    """Give microbatches as lists, each of another shape, and eval in other numbers."""
    schedule = plan("1f1b", ranks, 3)
    mine, whole = chain(ranks), chain(ranks)
    items, targets = batches([16, 24, 8])
    runner = runner_of(mine, schedule, rank)
    result = runner.step(microbatches=items, targets=targets)
    losses = accumulate(whole, items, targets, [1 / 3] * 3)
    wrong = differing(mine, whole, [rank])
    if not torch.equal(result.losses, torch.stack(losses)):
        wrong.append("losses")
    # A middle rank gets nothing and learns the number all the same.
    used = rank in (0, ranks - 1)
    for sizes in ([5], [1, 2, 3, 4, 5]):
        items, targets = batches(sizes)
        given = {"microbatches": items, "targets": targets} if used else {}
        small = runner.eval(**given)
        losses = accumulate(whole, items, targets, [0.0] * len(sizes))
        if not torch.equal(small.losses, torch.stack(losses)):
            wrong.append(f"eval of {sizes}")
    # Fewer samples than microbatches are fewer microbatches.
    (item,), (target,) = batches([2])
    if len(runner.eval(item, target=target).losses) != 2:
        wrong.append("eval of a small batch")
    runner.close()
    return wrong


class Counted(Iterator[Any]):
    """Count how often ``next`` is called; end after some items."""

    def __init__(self, pairs: list[Any], end: int | None = None) -> None:
        self.calls = 0
        self._rest = iter(pairs[:end])

    def __next__(self) -> Any:
        self.calls += 1
        return next(self._rest)


class Shifted(nn.Module):
    """Add a part of the item to what comes in."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        return self.module(x if shift is None else x + shift)


def iterated(rank: int, ranks: int, chunks: int) -> tuple[list[str], int]:
    """Feed from an iterator; stage 1 of each chunk's first rank picks from the item.

    Returns:
        What differs, and how often ``next`` was called.
    """
    m = 4
    placement = [s % ranks for s in range(ranks * chunks)]
    schedule = looped(placement, m)
    count = len(placement)
    mine = [Shifted(module) for module in chain(count)]
    whole = [Shifted(module) for module in chain(count)]
    items, targets = batches([3] * m)
    shifts, _ = batches([3] * m, seed=6)
    pairs = [
        ({"x": x, "shift": shift}, target)
        for x, shift, target in zip(items, shifts, targets, strict=True)
    ]
    picks: dict[int, dict[str, Any]] = {0: {"data": lambda item: (item["x"],)}}
    if chunks > 1:
        # The second chunk of rank 0 takes another part of the same item.
        picks[ranks] = {"data": lambda item: {"shift": item["shift"]}}
    runner = runner_of(mine, schedule, rank, picks)
    iterator = Counted(pairs)
    result = runner.step(iterator=iterator)
    runner.close()
    for x, shift, target in zip(items, shifts, targets, strict=True):
        value = x
        for s, module in enumerate(whole):
            value = module(value, shift if chunks > 1 and s == ranks else None)
        (squared(value, target) / m).backward()
    wrong = differing(mine, whole, own_stages(schedule, rank))
    if result.loss is None:
        wrong.append("loss")
    return wrong, iterator.calls


def exhausted(rank: int, ranks: int) -> tuple[Any, ...]:
    """End the iterator of rank 0 after 5 of 8 items; then step as if nothing was."""
    mine, whole = chain(ranks), chain(ranks)
    items, targets = batches([2] * 8)
    pairs = list(zip(items, targets, strict=True))
    runner = runner_of(mine, plan("1f1b", ranks, 8), rank)
    try:
        runner.step(iterator=Counted(pairs, 5 if rank == 0 else None))
        raise AssertionError("the step must fail")
    except PipelineError as error:
        seen = error.rank, error.action, error.error_type, error.message
    runner.step(iterator=iter(pairs))
    runner.close()
    accumulate(whole, items, targets, [1 / 8] * 8)
    return *seen, differing(mine, whole, [rank])


class Named(nn.Module):
    """Scale by a keyword argument."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        return self.module(x) * scale


def keywords(rank: int, ranks: int) -> list[str]:
    """Give keyword arguments of a whole batch, and of each microbatch."""
    m = 3
    wrong = []
    items, targets = batches([2] * m)
    scales = [torch.full((2, 1), 1.0 + i) for i in range(m)]
    for given in (
        {"scale": torch.cat(scales), "unused": 3},
        [{"scale": scale} for scale in scales],
    ):
        mine = [Named(module) for module in chain(ranks)]
        whole = [Named(module) for module in chain(ranks)]
        options = {s: {"kwargs": ("scale", "unused")[:1]} for s in range(ranks)}
        runner = runner_of(mine, plan("1f1b", ranks, m), rank, options)
        if isinstance(given, dict):
            try:
                runner.step(torch.cat(items), target=torch.cat(targets), kwargs=given)
                wrong.append("a name that no stage takes")
            except ValueError as error:
                if "one of ['scale'], but got 'unused'" not in str(error):
                    wrong.append(str(error))
            given = {"scale": given["scale"]}
        runner.step(torch.cat(items), target=torch.cat(targets), kwargs=given)
        runner.close()
        for x, scale, target in zip(items, scales, targets, strict=True):
            value = x
            for module in whole:
                value = module(value, scale=scale)
            (squared(value, target) / m).backward()
        wrong += differing(mine, whole, [rank])
    return wrong


def wrong_data(rank: int, ranks: int) -> list[str]:
    """Give data that does not fit; return the errors."""
    items, targets = batches([2] * 4)
    whole = torch.cat(items), torch.cat(targets)
    runner = runner_of(chain(ranks), plan("1f1b", ranks, 4), rank)
    texts = []
    for args, given in (
        ((), {"microbatches": items[:3], "targets": targets}),
        ((), {"microbatches": items, "targets": targets[:2]}),
        ((), {"microbatches": items}),
        ((whole[0],), {"microbatches": items, "targets": targets}),
        ((), {"microbatches": items, "targets": targets, "target": whole[1]}),
        ((whole[0],), {"iterator": iter(())}),
        ((), {"microbatches": iter(items), "targets": targets}),
    ):
        try:
            runner.step(*args, **given)
            texts.append("nothing")
        except (ValueError, TypeError) as error:
            texts.append(str(error))
    try:
        runner.eval(microbatches=items[:3], targets=targets)
        texts.append("nothing")
    except ValueError as error:
        texts.append(str(error))
    try:
        runner.step(iterator=iter([torch.zeros(2, WIDTH)] * 4))
        texts.append("nothing")
    except PipelineError as error:
        texts.append(f"{error.error_type} {error.message}")
    runner.step(microbatches=items, targets=targets)
    runner.close()
    return texts


def sampled(rank: int, ranks: int) -> list[str]:
    """Weight by samples where their number is known at the end only."""
    sizes = [1, 4, 2]
    mine, whole = chain(ranks), chain(ranks)
    items, targets = batches(sizes)
    schedule = looped(list(range(ranks)), 3)
    runner = runner_of(mine, schedule, rank, loss_reduction="samples")
    pairs = list(zip(items, targets, strict=True))
    result = runner.step(iterator=iter(pairs))
    again = runner.eval(microbatches=items, targets=targets)
    runner.close()
    value = torch.cat(items)
    for module in whole:
        value = module(value)
    loss = squared(value, torch.cat(targets))
    loss.backward()
    wrong = []
    if not torch.allclose(result.loss, loss) or not torch.allclose(again.loss, loss):
        wrong.append("loss")
    both = zip(mine[rank].parameters(), whole[rank].parameters(), strict=True)
    if not all(torch.allclose(a.grad, b.grad, rtol=1e-4, atol=1e-7) for a, b in both):
        wrong.append("gradients")
    return wrong
