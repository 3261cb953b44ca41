# SPDX-License-Identifier: Apache-2.0
"""Every kind over Gloo against one process with plain autograd, bit for bit."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.processes import run_ranks
from helpers.scenarios import Scenarios
from reference.pipeline_models import (
    loss_fn,
    make_batch,
    make_stages,
    single_process,
)
from torch import nn

from torch_sm3.pipeline import (
    PipelineError,
    PipelineRunner,
    Schedule,
    ScheduleError,
    Stage,
    plan,
)

one_rank, two_ranks, three_ranks = Scenarios(1), Scenarios(2), Scenarios(3)

MICROBATCHES = (1, 2, 3, 5, 8)


@one_rank
@two_ranks
@three_ranks
def check_all_kinds(rank: int, ranks: int) -> list[str]:
    """Compare all kinds and sizes with one process; return what differs."""
    wrong = []
    for kind in ("none",) if ranks == 1 else ("gpipe", "1f1b"):
        for m in MICROBATCHES:
            tokens, target = make_batch(8)
            parts, whole = make_stages(ranks), make_stages(ranks)
            runner = PipelineRunner(
                [Stage(parts[rank], rank)],
                plan(kind, ranks, m),
                loss_fn=loss_fn,
                timeout=20,
            )
            before = runner.eval(tokens, target=target)
            result = runner.step(tokens, target=target, return_outputs=True)
            after = runner.eval(tokens, target=target)
            expected, losses = single_process(whole, tokens, target, m)
            case = f"{kind} p={ranks} m={m} rank={rank}: "
            wrong += [
                case + name
                for name, same in {
                    "loss": torch.equal(result.loss, expected),
                    "losses": torch.equal(result.losses, torch.stack(losses)),
                    "eval": torch.equal(before.loss, expected),
                    "eval after step": torch.equal(after.loss, expected),
                    "outputs": (result.outputs is None) == (rank + 1 < ranks),
                    **equal_gradients(parts[rank], whole[rank]),
                }.items()
                if not same
            ]
            runner.close()
    return wrong


def equal_gradients(got: nn.Module, expected: nn.Module) -> dict[str, bool]:
    return {
        name: other.grad is not None and torch.equal(mine.grad, other.grad)
        for (name, mine), other in zip(
            got.named_parameters(), expected.parameters(), strict=True
        )
    }


@pytest.mark.parametrize("scenarios", [one_rank, two_ranks, three_ranks])
def test_gradients_and_losses_have_the_bits_of_one_process(
    scenarios: Scenarios,
) -> None:
    assert scenarios.answers(check_all_kinds) == [[]] * scenarios.ranks


@two_ranks
def check_autocast(rank: int, ranks: int) -> bool:
    tokens, target = make_batch(8)
    parts, whole = make_stages(ranks), make_stages(ranks)
    runner = PipelineRunner(
        [Stage(parts[rank], rank)], plan("1f1b", ranks, 4), loss_fn=loss_fn
    )
    with torch.autocast("cpu", torch.bfloat16):
        result = runner.step(tokens, target=target)
    runner.close()
    losses = []
    for part, wanted in zip(tokens.split(2), target.split(2), strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            value: Any = (part,)
            for stage in whole:
                value = stage(*value)
            loss = loss_fn(value, wanted)
        (loss / 4).backward()
        losses.append(loss.detach())
    return torch.equal(result.losses, torch.stack(losses)) and all(
        equal_gradients(parts[rank], whole[rank]).values()
    )


def test_autocast_of_the_caller_covers_the_forwards_only() -> None:
    assert two_ranks.answers(check_autocast) == [True] * 2


def open_and_close(rank: int, ranks: int) -> int:
    tokens, target = make_batch(8)
    module = make_stages(ranks)[rank]
    threads = []
    for _ in range(5):
        runner = PipelineRunner(
            [Stage(module, rank)], plan("1f1b", ranks, 4), loss_fn=loss_fn
        )
        runner.step(tokens, target=target)
        runner.close()
        runner.close()
        with pytest.raises(RuntimeError, match="got close"):
            runner.step(tokens, target=target)
        threads.append(len(os.listdir("/proc/self/task")))
    # Closed after all groups were destroyed, and never closed at all.
    late, never = (
        PipelineRunner([Stage(module, rank)], plan("1f1b", 2, 4), loss_fn=loss_fn)
        for _ in range(2)
    )
    never.step(tokens, target=target)
    dist.destroy_process_group()
    late.close()
    globals()["leaked"] = never
    return threads[-1] - threads[1]


def test_runners_leave_no_threads_and_no_hang() -> None:
    # Gloo may keep a thread of its own or two; five runners' worth it is not.
    assert all(grown <= 2 for grown in run_ranks(2, open_and_close))


def test_one_rank_needs_no_process_group() -> None:
    tokens, target = make_batch(8)
    (mine,), (whole,) = make_stages(1), make_stages(1)
    runner = PipelineRunner([Stage(mine, 0)], plan("none", 1, 4), loss_fn=loss_fn)
    for _ in range(2):
        runner.step(tokens, target=target)
        single_process([whole], tokens, target, 4)
    assert all(equal_gradients(mine, whole).values())
    with pytest.raises(ValueError, match="expected a target"):
        runner.step(tokens)
    with pytest.raises(ValueError, match=r"at least 4 samples.*but got 3"):
        runner.step(tokens[:3], target=target)
    with pytest.raises(TypeError, match="expected a Schedule, but got str"):
        PipelineRunner([Stage(mine, 0)], "1f1b")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected Stage objects, but got Whole"):
        PipelineRunner([mine], plan("none", 1, 4), loss_fn=loss_fn)
    with pytest.raises(ValueError, match="a schedule of 1 ranks, but got 2"):
        PipelineRunner([Stage(mine, 0)], plan("1f1b", 2, 4), loss_fn=loss_fn)
    runner = PipelineRunner([Stage(mine, 0)], plan("forward", 1, 4), loss_fn=loss_fn)
    with pytest.raises(RuntimeError, match="call eval instead"):
        runner.step(tokens, target=target)
    outputs = runner.eval(tokens, return_outputs=True).outputs
    assert outputs is not None
    torch.testing.assert_close(torch.cat(outputs), mine(tokens).detach())


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            "rank 0: 0F0 0B0 0F1",
            "one B, or one I and W, of stage 0 and microbatch 1",
        ),
        (
            "rank 0: 0F0 0F1 0SEND_F0",
            "between stages on different ranks, but got 0SEND",
        ),
    ],
)
def test_a_schedule_that_leaves_something_out_is_refused(
    rows: str, message: str
) -> None:
    head = "schedule 1 kind=x ranks=1 stages=1 microbatches=2 placement=loop\n"
    stage = Stage(nn.Linear(1, 1), 0)
    with pytest.raises(ScheduleError, match=message):
        PipelineRunner([stage], Schedule.parse(head + rows), loss_fn=loss_fn)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda output, target: 3.0, "a scalar tensor, but got float"),
        (lambda output, target: output, r"a scalar tensor, but got shape \(2, 5, 17\)"),
    ],
)
def test_a_loss_that_is_no_scalar_is_named(loss: Any, message: str) -> None:
    tokens, target = make_batch(8)
    (module,) = make_stages(1)
    runner = PipelineRunner([Stage(module, 0)], plan("gpipe", 1, 4), loss_fn=loss)
    with pytest.raises(PipelineError, match=message) as info:
        runner.step(tokens, target=target)
    assert info.value.action == "0F0" and isinstance(info.value.__cause__, TypeError)


def test_wrong_stages_are_named() -> None:
    with pytest.raises(TypeError, match=r"torch.nn.Module, but got int"):
        Stage(3, 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 0, but got -1"):
        Stage(nn.Linear(1, 1), -1)
