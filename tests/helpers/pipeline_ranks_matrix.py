# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the matrix of all schedules: kinds, ranks, microbatches, chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from helpers.pipeline_chain import (
    accumulate,
    batches,
    chain,
    differing,
    looped,
    own_stages,
    runner_of,
)

from torch_sm3.pipeline import Schedule, plan


class Case(NamedTuple):
    """A schedule to plan."""

    kind: str
    microbatches: int
    chunks: int

    def plan(self, ranks: int) -> Schedule:
        return plan(self.kind, ranks, self.microbatches, chunks=self.chunks)


#: The numbers of chunks that a kind may have.
CHUNKS = {
    "gpipe": (1,),
    "1f1b": (1,),
    "zb_h1": (1,),
    "zb_h2": (1,),
    "interleaved": (1, 2, 3),
    "looped_bfs": (1, 2, 3),
    "auto": (1, 2, 3),
    "zbv": (2,),
    "v_half": (2,),
    "v_min": (2,),
    "dualpipe_v": (2,),
}
MICROBATCHES = range(1, 10)


def cases(ranks: int, kind: str) -> Iterator[Case]:
    """Give every legal schedule of a kind, ``forward`` included."""
    for chunks in CHUNKS.get(kind, (1, 2, 3) if kind == "forward" else (1,)):
        for m in MICROBATCHES:
            if kind != "dualpipe_v" or m >= 2 * ranks:
                yield Case(kind, m, chunks)


def check(rank: int, ranks: int, todo: list[Case]) -> list[str]:
    """Run step and eval of each schedule; return what differs from one process."""
    wrong = []
    for case in todo:
        schedule = case.plan(ranks)
        m = case.microbatches
        mine, whole = chain(schedule.stages), chain(schedule.stages)
        # Of unequal sizes, so that no microbatch can be taken for another.
        items, targets = batches([1 + i % 3 for i in range(m)], seed=m)
        data: dict[str, Any] = {"microbatches": items, "targets": targets}
        losses = torch.stack(accumulate(whole, items, targets, [1 / m] * m))
        loss = torch.zeros(())
        for weighted in losses * (1 / m):
            loss = loss + weighted
        # One pending message at most is the harder promise; the default is two.
        runner = runner_of(mine, schedule, rank, max_pending=1 + m % 2)
        names = []
        before = runner.eval(**data)
        if case.kind != "forward":
            result = runner.step(**data)
            names += differing(mine, whole, own_stages(schedule, rank))
            names += [] if torch.equal(result.loss, loss) else ["loss"]
            names += [] if torch.equal(result.losses, losses) else ["losses"]
        runner.close()
        names += [] if torch.equal(before.loss, loss) else ["loss of eval"]
        names += [] if torch.equal(before.losses, losses) else ["losses of eval"]
        wrong += [f"{case}: {name}" for name in names]
    return wrong


def dropped(
    rank: int, ranks: int, todo: list[Case], stages: int
) -> list[dict[tuple[int, str], Any]]:
    """Take two steps with dropout; return the bits of this rank's gradients."""
    found = []
    for case in todo:
        m = case.microbatches
        schedule = case.plan(ranks)
        if schedule.stages != stages:
            schedule = looped([0] * stages, m)
        modules = chain(stages, dropout=0.5)
        items, targets = batches([2] * m)
        runner = runner_of(modules, schedule, rank, deterministic=True, seed=11)
        # The ranks' own generators must play no part.
        torch.manual_seed(1000 * ranks + rank)
        bits: dict[tuple[int, str], Any] = {}
        for step in range(2):
            result = runner.step(torch.cat(items), target=torch.cat(targets))
            bits[step, "loss"] = result.loss.item()
        runner.close()
        for s in own_stages(schedule, rank):
            for name, parameter in modules[s].named_parameters():
                assert parameter.grad is not None
                bits[s, name] = parameter.grad.tolist()
        found.append(bits)
    return found
