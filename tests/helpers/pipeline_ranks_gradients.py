# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of losses, replicas and tied weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
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
from torch.utils.checkpoint import checkpoint

from torch_sm3.pipeline import PipelineError, plan


class Grid(NamedTuple):
    """Four ranks as two replicas of a pipeline of two."""

    stage: int
    replica: int
    pipeline: dist.ProcessGroup
    replicas: dist.ProcessGroup


@contextmanager
def grid(rank: int) -> Iterator[Grid]:
    """Make the groups of two replicas and give them back."""
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    yield Grid(rank % 2, rank // 2, rows[rank // 2], columns[rank % 2])
    dist.destroy_process_group(rows[rank // 2])
    dist.destroy_process_group(columns[rank % 2])


def token_loss(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Count a row as many tokens as its target says in its first column."""
    counts = target[:, 0]
    loss = ((output - 1).square().sum(1) * counts).sum()
    return loss, counts.sum(), {"seen": counts.sum(), "rows": len(target)}


def _token_targets(counts: list[int]) -> list[Tensor]:
    return [torch.full((1, WIDTH), float(count)) for count in counts]


def _by_hand(
    modules: list[nn.Module], items: list[Tensor], targets: list[Tensor]
) -> Any:
    """Divide the gradient of all sums by the number of all tokens."""
    total, sums = 0.0, []
    for item, target in zip(items, targets, strict=True):
        value = item
        for module in modules:
            value = module(value)
        loss, count, _ = token_loss(value, target)
        total += float(count)
        sums.append(loss)
    gradients = torch.autograd.grad(
        sum(sums), [p for module in modules for p in module.parameters()]
    )
    return sum(sums) / max(total, 1.0), [g / max(total, 1.0) for g in gradients]


def tokens(rank: int, ranks: int, counts: list[int]) -> Any:
    """Step twice with loss_reduction tokens; check against one division by hand."""
    m, wrong = len(counts), []
    schedule = plan("1f1b" if ranks > 1 else "none", ranks, m)
    if ranks == 1:
        schedule = looped([0, 0], m)
    mine, whole = chain(2), chain(2)
    items, _ = batches([1] * m)
    targets = _token_targets(counts)
    options: dict[str, Any] = {"loss_fn": token_loss, "loss_reduction": "tokens"}
    runner = runner_of(mine, schedule, rank, **options)
    result = runner.step(microbatches=items, targets=targets)
    own = own_stages(schedule, rank)
    loss, gradients = _by_hand(whole, items, targets)
    names = [(s, n) for s in range(2) for n, _ in whole[s].named_parameters()]
    wanted = dict(zip(names, gradients, strict=True))

    def check(factor: float, case: str) -> None:
        for s in own:
            for name, parameter in mine[s].named_parameters():
                expected = wanted[s, name] * factor
                assert parameter.grad is not None
                if not torch.allclose(parameter.grad, expected, rtol=1e-5, atol=1e-7):
                    wrong.append(f"{case}: stage {s} {name}")

    check(1.0, "one step")
    first = [p.grad.clone() for s in own for p in mine[s].parameters()]
    # What is there already is added to and not divided again.
    runner.step(microbatches=items, targets=targets)
    check(2.0, "two steps")
    evaluated = runner.eval(microbatches=items, targets=targets)
    runner.close()
    if not torch.allclose(result.loss, loss) or not result.loss.isfinite():
        wrong.append("loss")
    if not torch.equal(evaluated.loss, result.loss):
        wrong.append("eval")
    if result.tokens != sum(counts):
        wrong.append(f"{result.tokens} tokens")
    seen = [(float(x["seen"]), x["rows"]) for x in result.metrics or []]
    if seen != [(float(count), 1) for count in counts]:
        wrong.append(f"metrics {seen}")
    return wrong, {s: first for s in own} if ranks == 1 else first


def quiet(rank: int, ranks: int) -> list[str]:
    """Keep the losses on the rank of the last stage."""
    items, targets = batches([2] * 3)
    runner = runner_of(chain(ranks), plan("1f1b", ranks, 3), rank, share_loss=False)
    result = runner.step(torch.cat(items), target=torch.cat(targets))
    runner.close()
    there = [x is not None for x in (result.loss, result.losses)]
    return [] if there == [rank == ranks - 1] * 2 else ["losses"]


def wrong_loss(rank: int, ranks: int) -> str:
    """Return a bare tensor where tokens are to be counted."""
    items, targets = batches([2] * 3)
    runner = runner_of(
        chain(ranks), plan("1f1b", ranks, 3), rank, loss_reduction="tokens"
    )
    try:
        runner.step(torch.cat(items), target=torch.cat(targets))
    except PipelineError as error:
        return f"{error.action} {error.error_type} {error.message}"
    finally:
        runner.close()
    return "nothing"


def replicated_tokens(rank: int, ranks: int, reduce: str) -> list[str]:
    """Count tokens over two replicas, one of which has none."""
    counts = [[3, 0, 7], [0, 0, 0]]
    mine, whole = chain(2), chain(2)
    data = [batches([1] * 3, seed=replica)[0] for replica in range(2)]
    with grid(rank) as place:
        runner = runner_of(
            mine,
            plan("1f1b", 2, 3),
            place.stage,
            group=place.pipeline,
            data_parallel=place.replicas,
            reduce=reduce,
            loss_fn=token_loss,
            loss_reduction="tokens",
        )
        result = runner.step(
            microbatches=data[place.replica],
            targets=_token_targets(counts[place.replica]),
        )
        runner.close()
    targets = [t for part in counts for t in _token_targets(part)]
    _, gradients = _by_hand(whole, data[0] + data[1], targets)
    split = len(list(whole[0].parameters()))
    own = gradients[:split] if place.stage == 0 else gradients[split:]
    good = all(
        p.grad is not None and torch.allclose(p.grad, g, rtol=1e-5, atol=1e-7)
        for p, g in zip(mine[place.stage].parameters(), own, strict=True)
    )
    return [] if good and result.tokens == 10 else [f"{result.tokens} tokens"]


def same_scale(rank: int, ranks: int) -> list[str]:
    """Compare p = 2 with p = 1: gradients are scaled once."""
    items, targets = batches([2] * 8)
    mine, whole = chain(2), chain(2)
    runner = runner_of(mine, plan("1f1b", 2, 8), rank)
    runner.step(torch.cat(items), target=torch.cat(targets))
    runner.close()
    value = torch.cat(items)
    for module in whole:
        value = module(value)
    # All microbatches are of one size, so their mean is that of the whole batch.
    squared(value, torch.cat(targets)).backward()
    pairs = zip(mine[rank].parameters(), whole[rank].parameters(), strict=True)
    good = all(torch.allclose(a.grad, b.grad, rtol=1e-4, atol=1e-7) for a, b in pairs)
    return [] if good else ["scale"]


def added_up(rank: int, ranks: int) -> list[str]:
    """Step twice without zero_grad; return where that is not the sum of both steps.

    What was there before is neither scaled nor reduced once more.
    """
    wrong = []
    for kind in ("1f1b", "zb_h1"):
        for reduction in ("mean", "samples", "sum", "tokens"):
            for tied in (False, True):
                stages = {s: {"tied": {"0.weight": "w"}} for s in range(ranks)}
                modules = chain(ranks)
                runner = runner_of(
                    modules,
                    plan(kind, ranks, 3),
                    rank,
                    stages if tied else None,
                    loss_reduction=reduction,
                    loss_fn=token_loss if reduction == "tokens" else squared,
                )
                each = []
                for seed in (1, 2):
                    items, targets = batches([2, 1, 3], seed=seed)
                    targets = [target.abs() for target in targets]
                    runner.zero_grad()
                    runner.step(microbatches=items, targets=targets)
                    each.append(_own(modules[rank]))
                # The gradients of the second are there.
                items, targets = batches([2, 1, 3], seed=1)
                targets = [target.abs() for target in targets]
                runner.step(microbatches=items, targets=targets)
                runner.close()
                both = [a + b for a, b in zip(*each, strict=True)]
                pairs = zip(both, _own(modules[rank]), strict=True)
                if not all(torch.allclose(a, b, atol=1e-7) for a, b in pairs):
                    wrong.append(f"{kind} {reduction} tied={tied}")
    return wrong


def _own(module: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def lost(rank: int, ranks: int) -> list[str]:
    """Fail without and with gradients of an earlier step; return the errors."""
    modules, found = chain(ranks), []
    runner = runner_of(modules, plan("1f1b", ranks, 2), rank)
    items, targets = batches([2, 2])
    for good in (False, True):
        if good:
            runner.step(microbatches=items, targets=targets)
        try:
            runner.step(microbatches=items, targets=[targets[0], "no tensor"])
        except PipelineError as error:
            found.append(str(error))
        assert all(p.grad is None for p in modules[rank].parameters())
    runner.close()
    return found


def frozen(rank: int, ranks: int, kind: str) -> list[str]:
    """Freeze some stages; return what differs from one process.

    Where no output of a stage requires grad, its backward does nothing and sends that.
    """
    wrong, m = [], 3
    for some in ({0}, {1}, {0, 1}, {1, 2}, {0, 2}):
        mine, whole = chain(ranks), chain(ranks)
        for stage in some:
            mine[stage].requires_grad_(False)
            whole[stage].requires_grad_(False)
        items, targets = batches([2] * m)
        runner = runner_of(mine, plan(kind, ranks, m), rank)
        runner.step(torch.cat(items), target=torch.cat(targets))
        runner.close()
        accumulate(whole, items, targets, [1 / m] * m)
        wrong += [f"{some}: {name}" for name in differing(mine, whole, [rank])]
    return wrong


def insists(rank: int, ranks: int) -> list[str]:
    """Insist on a split of what can be split, and of what cannot."""
    found = []
    for whole in (False, True):
        modules = chain(ranks)
        if whole and rank == 1:
            modules[1] = _Recomputed(modules[1])
        options = {rank: {"split": True}}
        runner = runner_of(modules, plan("zb_h1", ranks, 2), rank, options)
        items, targets = batches([2, 2])
        try:
            runner.step(microbatches=items, targets=targets)
            found.append("fine")
        except PipelineError as error:
            found.append(f"{error.action} {error.error_type}: {error.message}")
        runner.close()
    return found


class _Recomputed(nn.Module):
    """One node that owns inputs and weights."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.module, x, use_reentrant=True)
