# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps that are taken first and validated in the next step."""

from __future__ import annotations

import re

import pytest
import torch
from helpers import pipeline_ranks_validate as ranks_validate
from helpers.pipeline_ranks_kinds import KINDS as EVERY
from helpers.pipeline_ranks_precision import OPTIMIZERS, torch_optimizers
from helpers.pool import Pools
from torch import nn

from torch_sm3.pipeline import PostValidator, Schedule, plan, verify
from torch_sm3.pipeline._rows import with_validation


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("case", ["fine", "clipped", "infinite"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_all_bits_are_those_of_steps_that_wait(
    pools: Pools, ranks: int, case: str, scaled: bool
) -> None:
    assert pools(ranks).run(ranks_validate.as_without, case, scaled) == [[]] * ranks


def test_every_kind_begins_anew(pools: Pools) -> None:
    assert pools(2).run(ranks_validate.every_kind) == [[]] * 2


@pytest.mark.parametrize(("kind", "chunks"), EVERY)
@pytest.mark.parametrize(("ranks", "m"), [(1, 2), (2, 4), (4, 9)])
def test_validation_follows_the_warm_up(
    kind: str, chunks: int | None, ranks: int, m: int
) -> None:
    schedule = plan(kind, ranks, m, chunks=chunks).lower()
    lines = schedule.text.splitlines()
    for rank in range(ranks):
        row = with_validation(schedule.actions(rank))
        ops = [action.op for action in row]
        at = ops.index("VALIDATE")
        assert ops.count("VALIDATE") == 1 and ops[at + 1] in ("B", "I")
        assert not {"B", "I", "W"} & set(ops[:at])
        assert [*row[:at], *row[at + 1 :]] == schedule.actions(rank)
        assert with_validation(row) == row
        cell = next(x for x in lines[rank + 1].split() if re.match(r".*\d[BI]\d", x))
        lines[rank + 1] = lines[rank + 1].replace(f" {cell}", f" VALIDATE {cell}", 1)
    assert verify(Schedule.parse("\n".join(lines) + "\n")).valid


def test_replicas_never_disagree(pools: Pools) -> None:
    assert pools(4).run(ranks_validate.replicas) == [[]] * 4


def test_any_placement_begins_anew(pools: Pools) -> None:
    assert pools(3).run(ranks_validate.placements) == [[]] * 3


@pytest.mark.parametrize(
    ("where", "wanted"),
    [
        ("optimizer", ["1 LookupError no optimizer", "kept", "True"]),
        ("stage", ["0 LookupError no stage", "stepped", "True"]),
        ("both", ["0 LookupError no both", "kept", "True"]),
    ],
)
def test_failures_while_a_step_is_pending(
    pools: Pools, where: str, wanted: list[str]
) -> None:
    assert pools(3).run(ranks_validate.failing, where) == [wanted] * 3


ALL = torch_optimizers() | OPTIMIZERS


@pytest.mark.parametrize("name", list(ALL))
def test_a_step_is_taken_back_in_all_bits(name: str) -> None:
    def train(correct: bool) -> list[object]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 1))
        optimizer = ALL[name](module.parameters())
        validator = PostValidator(optimizer)
        for step in range(4):
            loss = module(torch.full((3, 5), 1.0 + step)).square().sum()
            loss.backward()
            half = 0.5 if step % 2 else None
            if correct:
                for group in optimizer.param_groups:
                    group["lr"] = 0.1 / (step + 1)
                validator.step()
                for group in optimizer.param_groups:
                    group["lr"] = 77.0
                validator.correct(half)
                stepped = [p for x in optimizer.param_groups for p in x["params"]]
                assert all(p.grad is None for p in stepped)
                assert all(group["lr"] == 77.0 for group in optimizer.param_groups)
            else:
                for group in optimizer.param_groups:
                    group["lr"] = 0.1 / (step + 1)
                if half is not None:
                    for parameter in module.parameters():
                        parameter.grad.mul_(half)
                    optimizer.step()
            module.zero_grad()
        state = optimizer.state_dict()["state"]
        return [p.detach() for p in module.parameters()] + [
            value for entry in state.values() for value in entry.values()
        ]

    pairs = zip(train(True), train(False), strict=True)
    assert all(a.equal(b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def test_snapshots_of_sm3_are_small() -> None:
    weight = nn.Parameter(torch.ones(64, 32))
    sizes = {}
    for name in ("SM3", "Adam"):
        optimizer = OPTIMIZERS[name]([weight])
        validator = PostValidator(optimizer)
        for _ in range(2):
            weight.grad = torch.ones_like(weight)
            validator.step()
            validator.confirm()
        sizes[name] = validator.snapshot_bytes, validator.adam_bytes
    whole = 4 * 64 * 32
    assert sizes["SM3"][1] == sizes["Adam"][1] == 3 * whole
    assert whole < sizes["SM3"][0] <= whole + 4 * (64 + 32 + 8)
    assert sizes["Adam"][0] >= 3 * whole


def test_a_report_shows_what_snapshots_take(pools: Pools) -> None:
    (snapshots, text), (others, other) = pools(2).run(ranks_validate.reported)
    assert snapshots == others and text == other
    # Two parameters of 36 and 6 numbers; SM3 keeps 6 + 6 and 6 of them.
    for taken, adam in snapshots:
        assert adam == 3 * 4 * (36 + 6)
        assert 4 * (36 + 6) < taken <= 4 * (36 + 6 + 12 + 6 + 8)
    assert "snapshot of rank 1: " in text and "with Adam 504 B" in text


def test_nothing_to_take_back() -> None:
    validator = PostValidator(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))
    with pytest.raises(RuntimeError, match="none that is pending"):
        validator.correct(None)
