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
from torch.nn.parallel import DistributedDataParallel

from torch_sm3 import AdasumState, adasum_hook
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


class Sometimes(nn.Module):
    """Use a second weight in the first microbatch only, and a third never."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.second = nn.Parameter(torch.ones(WIDTH))
        self.third = nn.Parameter(torch.ones(3))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.module(x)
        return y * self.second if self.calls == 1 else y


def _sometimes() -> list[nn.Module]:
    return [Sometimes(module) for module in chain(2)]


def replicated(rank: int, ranks: int, reduce: str | None, kind: str) -> list[str]:
    """Reduce over two replicas by what is built in; return what differs."""
    m = 3
    mine, twins = _sometimes(), [_sometimes(), _sometimes()]
    data = [batches([2] * m, seed=replica) for replica in range(2)]
    with grid(rank) as place:
        runner = runner_of(
            mine,
            plan(kind, 2, m),
            place.stage,
            group=place.pipeline,
            data_parallel=place.replicas,
            reduce=reduce,
        )
        items, targets = data[place.replica]
        runner.step(torch.cat(items), target=torch.cat(targets))
        runner.close()
    for twin, (items, targets) in zip(twins, data, strict=True):
        accumulate(twin, items, targets, [1 / m] * m)
    pairs = zip(*(twin[place.stage].parameters() for twin in twins), strict=True)
    wrong = []
    for (name, mine_p), (a, b) in zip(
        mine[place.stage].named_parameters(), pairs, strict=True
    ):
        if a.grad is None:
            if mine_p.grad is not None:
                wrong.append(f"{name} has a gradient")
            continue
        assert b.grad is not None and mine_p.grad is not None
        wanted = (a, b)[place.replica].grad
        if reduce in ("mean", "sum"):
            wanted = (a.grad + b.grad) / (2 if reduce == "mean" else 1)
        if reduce == "adasum":
            wanted = _adasum(a.grad, b.grad)
        if not torch.allclose(mine_p.grad, wanted, rtol=1e-5, atol=1e-7):
            wrong.append(name)
        if reduce != "adasum" and not torch.equal(mine_p.grad, wanted):
            wrong.append(f"{name} bits")
    return wrong


def _adasum(a: Tensor, b: Tensor) -> Tensor:
    dot = (a.double() * b.double()).sum()
    first = 1 - dot / (2 * a.double().square().sum())
    second = 1 - dot / (2 * b.double().square().sum())
    return (first * a.double() + second * b.double()).float()


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


def hooked(rank: int, ranks: int, kind: str, adasum: bool, wrap: bool) -> Any:
    """Reduce by a hook; return what it was called with, and what differs."""
    m, seen, wrong = 4, [], []
    mine, twins = _sometimes(), [_sometimes(), _sometimes()]
    data = [batches([2] * m, seed=replica) for replica in range(2)]
    with grid(rank) as place:
        state = AdasumState(place.replicas) if adasum else None

        # DDP refuses a bucket of another annotated type than its own.
        def hook(own, bucket):  # type: ignore[no-untyped-def]
            names = [tuple(g.shape) for g in bucket.gradients()]
            same = [p.shape for p in bucket.parameters()] == names
            seen.append((bucket.index(), bucket.is_last(), same))
            if own is not None:
                return adasum_hook(own, bucket)
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            bucket.set_buffer(bucket.buffer() * 2)
            future.set_result(bucket.buffer())
            return future

        modules: list[Any] = list(mine)
        if wrap:
            modules[place.stage] = DistributedDataParallel(
                mine[place.stage], process_group=place.replicas
            )
            modules[place.stage].register_comm_hook(state, hook)
        options: dict[str, Any] = {"group": place.pipeline}
        if wrap:
            try:
                runner_of(modules, plan(kind, 2, m), place.stage, **options)
                wrong.append("a DDP hook that nobody calls")
            except ValueError as error:
                if "hook=(state, function)" not in str(error):
                    wrong.append(str(error))
        else:
            options["data_parallel"] = place.replicas
        runner = runner_of(
            modules, plan(kind, 2, m), place.stage, hook=(state, hook), **options
        )
        items, targets = data[place.replica]
        for _ in range(2):
            runner.zero_grad()
            for module in mine:
                module.calls = 0
            runner.step(torch.cat(items), target=torch.cat(targets))
        runner.close()
        if state is not None:
            if state.step != 2:
                wrong.append(f"{state.step} steps of the state")
            state.close()
    for twin, (items, targets) in zip(twins, data, strict=True):
        accumulate(twin, items, targets, [1 / m] * m)
    a, b = (twin[place.stage] for twin in twins)
    for (name, p), one, two in zip(
        mine[place.stage].named_parameters(),
        a.parameters(),
        b.parameters(),
        strict=True,
    ):
        if one.grad is None or two.grad is None:
            continue
        own = (one, two)[place.replica].grad
        wanted = _adasum(one.grad, two.grad) if adasum else own * 2
        if p.grad is None or not torch.allclose(p.grad, wanted, rtol=1e-5, atol=1e-7):
            wrong.append(name)
    return seen, wrong


def unreduced_stage(rank: int, ranks: int) -> list[str]:
    """Leave one stage out of the reduction."""
    mine, whole = chain(2), chain(2)
    with grid(rank) as place:
        items, targets = batches([2] * 2, seed=place.replica)
        runner = runner_of(
            mine,
            plan("1f1b", 2, 2),
            place.stage,
            {0: {"reduce": False}},
            group=place.pipeline,
            data_parallel=place.replicas,
        )
        runner.step(torch.cat(items), target=torch.cat(targets))
        runner.close()
    accumulate(whole, items, targets, [1 / 2] * 2)
    alone = not differing(mine, whole, [place.stage])
    return [] if alone == (place.stage == 0) else ["stage"]


def _sharing() -> list[nn.Module]:
    modules = chain(4)
    modules[2][0].weight = modules[0][0].weight
    return modules


def shared_and_thawed(rank: int, ranks: int) -> list[str]:
    """Share a parameter between two stages of a rank, and thaw others after a step."""
    wrong = []
    mine, twins = _sharing(), [_sharing(), _sharing()]
    data = [batches([2] * 3, seed=replica) for replica in range(2)]
    for twin, (items, targets) in zip(twins, data, strict=True):
        accumulate(twin, items, targets, [1 / 3] * 3)
    with grid(rank) as place:
        runner = runner_of(
            mine,
            plan("interleaved", 2, 3, chunks=2),
            place.stage,
            group=place.pipeline,
            data_parallel=place.replicas,
        )
        items, targets = data[place.replica]
        for thawed in (False, True):
            for module in mine:
                module[0].bias.requires_grad_(thawed)
            runner.zero_grad()
            runner.step(torch.cat(items), target=torch.cat(targets))
        runner.close()
    for s in (place.stage, place.stage + 2):
        pairs = zip(*(twin[s].parameters() for twin in twins), strict=True)
        for (name, p), (a, b) in zip(mine[s].named_parameters(), pairs, strict=True):
            wanted = (a.grad + b.grad) / 2
            if p.grad is None or not torch.allclose(p.grad, wanted, atol=1e-7):
                wrong.append(f"stage {s} {name}")
    return wrong


class SparseStage(nn.Module):
    """Look up rows of an embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x[:, 0].abs().long() % 5)


def sparse(rank: int, ranks: int) -> tuple[str, int]:
    """Reduce sparse gradients over replicas, which is refused on all ranks."""
    modules = [SparseStage(), *chain(1)]
    items, targets = batches([2] * 2)
    with grid(rank) as place:
        runner = runner_of(
            modules,
            plan("1f1b", 2, 2),
            place.stage,
            group=place.pipeline,
            data_parallel=place.replicas,
        )
        try:
            runner.step(torch.cat(items), target=torch.cat(targets))
            return "nothing", 0
        except PipelineError as error:
            return f"{error.action} {error.error_type} {error.message}", len(
                error.others
            )
        finally:
            runner.close()


class Fails(nn.Module):
    """Raise in one call, or in its backward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.at: tuple[str, int] | None = None
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        now, self.calls = self.calls, self.calls + 1
        if self.at == ("F", now):
            raise ArithmeticError("boom")
        y = self.module(x)
        if self.at == ("B", now):
            y.register_hook(self._raise)
        return y

    def _raise(self, gradient: Tensor) -> None:
        raise ArithmeticError("boom")


def failing_replica(rank: int, ranks: int) -> Any:
    """Fail in one replica; return what all ranks report, and what differs later."""
    m, reports, wrong = 4, [], []
    with grid(rank) as place:
        mine = [Fails(module) for module in chain(2)]
        runner = runner_of(
            mine,
            plan("1f1b", 2, m),
            place.stage,
            group=place.pipeline,
            data_parallel=place.replicas,
        )
        data = [batches([2] * m, seed=replica) for replica in range(2)]
        items, targets = data[place.replica]
        for origin in range(4):
            for at in (("F", 1), ("B", m - 1)):
                module = mine[place.stage]
                module.calls, module.at = 0, at if rank == origin else None
                try:
                    runner.step(torch.cat(items), target=torch.cat(targets))
                    wrong.append("no error")
                except PipelineError as error:
                    assert isinstance(error.__cause__, ArithmeticError) == (
                        rank == origin
                    ), error.__cause__
                    where = error.rank, error.stage, error.microbatch, error.action
                    reports.append((*where, error.error_type, error.replica))
                if any(p.grad is not None for p in module.parameters()):
                    wrong.append("gradients are left")
                module.at = None
                runner.step(torch.cat(items), target=torch.cat(targets))
                twins = [[Fails(x) for x in chain(2)] for _ in range(2)]
                for twin, (xs, ys) in zip(twins, data, strict=True):
                    accumulate(twin, xs, ys, [1 / m] * m)
                a, b = (twin[place.stage].parameters() for twin in twins)
                for p, one, two in zip(module.parameters(), a, b, strict=True):
                    if not torch.equal(p.grad, (one.grad + two.grad) / 2):
                        wrong.append("the next step")
                runner.zero_grad()
        runner.close()
    return reports, wrong


def tied(rank: int, ranks: int, placement: list[int], kind: str | None) -> Any:
    """Tie weights of stages 0, 1 and 3; return what differs."""
    m, wrong = 3, []
    schedule = looped(placement, m) if kind is None else plan(kind, ranks, m)
    mine, whole = chain(4), chain(4)
    options: dict[int, dict[str, Any]] = {
        0: {"tied": {"0.weight": "shared", "0.bias": "other"}},
        1: {"tied": {"0.bias": "other"}},
        3: {"tied": {"0.weight": "shared"}},
    }
    runner = runner_of(mine, schedule, rank, options)
    with torch.no_grad():
        whole[3][0].weight.copy_(whole[0][0].weight)
        whole[1][0].bias.copy_(whole[0][0].bias)
    own = own_stages(schedule, rank)
    for s in own:
        for name, p in mine[s].named_parameters():
            if not torch.equal(p, whole[s].get_parameter(name)):
                wrong.append(f"stage {s} {name} at the start")
    items, targets = batches([2] * m)
    for _ in range(2):
        # Twice, so that gradients of the first step must not be summed again.
        runner.step(torch.cat(items), target=torch.cat(targets))
    squares = runner.optimizer_step(
        torch.optim.SGD([p for s in own for p in mine[s].parameters()], lr=0.0),
        max_norm=1e9,
    ).grad_norm
    runner.close()
    accumulate(whole, items, targets, [1 / m] * m)
    for name, members in (("0.weight", (0, 3)), ("0.bias", (0, 1))):
        first, second = (whole[s].get_parameter(name) for s in members)
        total = first.grad + second.grad
        first.grad, second.grad = total, total.clone()
    seen, norm = set(), 0.0
    for s, module in enumerate(whole):
        for name, p in module.named_parameters():
            p.grad = p.grad + p.grad
            repeated = (s, name) in ((3, "0.weight"), (1, "0.bias"))
            norm += 0.0 if repeated else float(p.grad.double().square().sum())
            seen.add(name)
    wrong += differing(mine, whole, own)
    if squares is None or abs(squares - norm**0.5) > 1e-6:
        wrong.append(f"norm {squares} for {norm**0.5}")
    return wrong, squares


def tied_adasum(rank: int, ranks: int, later: bool) -> list[str]:
    """Tie a weight and reduce by Adasum, which is to meet the sum over the stages."""
    m, wrong = 3, []
    twins = [chain(2), chain(2)]
    mine = chain(2)
    data = [batches([2] * m, seed=replica) for replica in range(2)]
    options: dict[int, dict[str, Any]] = {
        s: {"tied": {"0.weight": "w"}} for s in (0, 1)
    }
    with grid(rank) as place:
        runner = runner_of(
            mine,
            plan("zb_h1", 2, m),
            place.stage,
            options,
            group=place.pipeline,
            data_parallel=place.replicas,
            reduce="adasum",
        )
        items, targets = data[place.replica]
        optimizer = torch.optim.SGD(mine[place.stage].parameters(), lr=0.0)
        for _ in range(2 if later else 1):
            # The second step finds that the first was to be clipped, and begins anew.
            runner.zero_grad()
            runner.step(torch.cat(items), target=torch.cat(targets))
            kept = {n: p.grad.clone() for n, p in mine[place.stage].named_parameters()}
            if later:
                runner.optimizer_step(optimizer, max_norm=1e-3, post_validate=True)
        runner.flush()
        runner.close()
    for twin, (xs, ys) in zip(twins, data, strict=True):
        with torch.no_grad():
            twin[1][0].weight.copy_(twin[0][0].weight)
        accumulate(twin, xs, ys, [1 / m] * m)
        first, second = twin[0][0].weight, twin[1][0].weight
        first.grad = second.grad = first.grad + second.grad
    for name, got in kept.items():
        a, b = (twin[place.stage].get_parameter(name).grad for twin in twins)
        if not torch.allclose(got, _adasum(a, b), rtol=1e-5, atol=1e-7):
            wrong.append(name)
    return wrong


def tied_badly(rank: int, ranks: int) -> str:
    """Tie weights of unlike shapes."""
    modules = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)]
    options = {0: {"tied": {"bias": "x"}}, 1: {"tied": {"weight": "x"}}}
    try:
        runner_of(modules, plan("1f1b", 2, 2), rank, options)
    except ValueError as error:
        return str(error)
    return "nothing"


def tied_failure(rank: int, ranks: int) -> list[str]:
    """Fail on one member's rank; nobody may wait for its gradient."""
    wrong = []
    options = {
        0: {"tied": {"module.0.weight": "x"}},
        1: {"tied": {"module.0.weight": "x"}},
    }
    mine = [Fails(module) for module in chain(2)]
    runner = runner_of(mine, plan("1f1b", 2, 2), rank, options)
    items, targets = batches([2] * 2)
    for origin in range(2):
        for at in (("F", 1), ("B", 1)):
            module = mine[rank]
            module.calls, module.at = 0, at if rank == origin else None
            try:
                runner.step(torch.cat(items), target=torch.cat(targets))
                wrong.append("no error")
            except PipelineError as error:
                if error.error_type != "ArithmeticError" or error.rank != origin:
                    wrong.append(str(error))
            module.at = None
            runner.step(torch.cat(items), target=torch.cat(targets))
            runner.zero_grad()
    runner.close()
    return wrong


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
