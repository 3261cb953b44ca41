# SPDX-License-Identifier: Apache-2.0
"""Stages that run a forward and the backward beside it in one call."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.scenarios import Scenarios
from torch import nn

from torch_sm3.pipeline import PipelineError, PipelineRunner, Schedule, Stage, plan
from torch_sm3.pipeline.trace import Trace

two_ranks = Scenarios(2)

WIDTH, STAGES, M = 6, 4, 6


class Block(nn.Module):
    """A layer whose forward is in two parts."""

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seen: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append("F")
        return torch.tanh(self.linear(x))


class Fused(Block):
    """Runs a backward between its two parts, as ``behave`` says."""

    behave = "well"

    def overlap_f_b(
        self, backward: Callable[[], None], x: torch.Tensor
    ) -> torch.Tensor:
        """Return what ``forward`` returns."""
        self.seen.append("FB")
        y = self.linear(x)
        if self.behave != "forgets":
            backward()
        if self.behave == "raises":
            raise ArithmeticError("after the backward")
        if self.behave == "repeats":
            backward()
        return torch.tanh(y)


def placement_of(rank: int) -> list[int]:
    return [rank, STAGES - 1 - rank]


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(9)
    return torch.randn(2 * M, WIDTH), torch.randn(2 * M, WIDTH)


def runner_of(
    kind: type[Block], rank: int, schedule: Schedule | None = None, **options: Any
) -> tuple[PipelineRunner, dict[int, Any]]:
    blocks = {index: kind(index) for index in placement_of(rank)}
    runner = PipelineRunner(
        [Stage(block, index) for index, block in blocks.items()],
        schedule or plan("dualpipe_v", 2, M),
        loss_fn=nn.functional.mse_loss,
        **options,
    )
    return runner, blocks


def gradients(blocks: dict[int, Any]) -> list[torch.Tensor]:
    return [p.grad for block in blocks.values() for p in block.parameters()]


@two_ranks
def fused(rank: int, ranks: int) -> tuple[bool, int, int, bool]:
    x, y = batch()
    plain, own = runner_of(Block, rank)
    other, mine = runner_of(Fused, rank, trace=True)
    same = True
    for _ in range(2):
        a, b = plain.step(x, target=y), other.step(x, target=y)
        same &= torch.equal(a.losses, b.losses)
    other.save_trace("/dev/null")
    same &= all(map(torch.equal, gradients(own), gradients(mine)))
    seen = [what for block in mine.values() for what in block.seen]
    quiet = all(what == "F" for block in own.values() for what in block.seen)
    plain.close()
    other.close()
    return same, seen.count("FB"), seen.count("F"), quiet


def test_a_fused_pair_has_the_bits_of_its_halves() -> None:
    cells = re.findall(
        "OVERLAP_F_B|rank", plan("dualpipe_v", 2, M).text.split("\n", 1)[1]
    )
    _, first, second = " ".join(cells).split("rank")
    for rank, (same, pairs, alone, quiet) in enumerate(two_ranks.answers(fused)):
        assert same and quiet
        assert pairs == 2 * (first, second)[rank].count("OVERLAP_F_B") > 0
        assert pairs + alone == 2 * 2 * M


@two_ranks
def misbehaves(rank: int, ranks: int) -> list[str]:
    x, y = batch()
    runner, blocks = runner_of(Fused, rank)
    plain, own = runner_of(Block, rank)
    expected = plain.step(x, target=y)
    texts = []
    for behave in ("forgets", "raises", "repeats"):
        if rank == 1:
            blocks[2].behave = behave
        with pytest.raises(PipelineError) as info:
            runner.step(x, target=y)
        texts.append(str(info.value))
        assert all(gradient is None for gradient in gradients(blocks))
        if rank == 1:
            blocks[2].behave = "well"
        assert torch.equal(runner.step(x, target=y).losses, expected.losses)
        assert all(map(torch.equal, gradients(blocks), gradients(own)))
        runner.zero_grad()
    runner.close()
    plain.close()
    return texts


def test_a_fused_method_that_breaks_its_contract_is_named() -> None:
    first, second = two_ranks.answers(misbehaves)
    assert first == second
    forgets, raises, repeats = first
    assert re.search(r"rank 1 at 2F\d: .*stage 2 to call backward once", forgets)
    assert re.search(r"rank 1 at 2F\d: ArithmeticError: after the backward", raises)
    assert re.search(r"rank 1 at 2F\d: .*one call of backward", repeats)


class Roomy(Fused):
    """Needs much memory in the first part of its forward, and none of it later."""

    def overlap_f_b(
        self, backward: Callable[[], None], x: torch.Tensor
    ) -> torch.Tensor:
        """Return what ``forward`` returns."""
        x.new_zeros(8 * x.numel())
        backward()
        return self.forward(x)


def test_the_gradient_of_the_backward_beside_a_forward_counts_while_it_waits() -> None:
    schedule = Schedule.parse(
        "schedule 1 kind=x ranks=1 stages=2 microbatches=2 placement=0,0\n"
        "rank 0: 0F0 1F0 1B0 (0F1;0B0)OVERLAP_F_B 1F1 1B1 0B1\n"
    )
    runner = PipelineRunner(
        [Stage(Roomy(0), 0), Stage(Block(1), 1)],
        schedule,
        loss_fn=nn.functional.mse_loss,
        trace=True,
    )
    x = torch.randn(4, WIDTH, requires_grad=True)
    for _ in range(2):
        runner.step(microbatches=[x, x], targets=[x.detach(), x.detach()])
    trace = runner._session.trace(everywhere=True)
    runner.close()
    assert isinstance(trace, Trace)
    at = [action.text for action in trace.schedule.actions(0)].index("0F1")
    unit = x.nbytes
    for stamps in trace.steps[0]:
        assert stamps.peak[at] == stamps.live[at - 1] + 8 * unit
        # Both halves end at once.
        assert stamps.live[at] == stamps.live[at + 1]
        # Stage 0 keeps its result for one microbatch in place of the other; the
        # gradient is used up.
        assert stamps.live[at] == stamps.live[at - 1] - unit
        assert stamps.live[-1] == 0


class Explodes(torch.autograd.Function):
    """Raises in the backward of a microbatch."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("in the backward")


class Exploding(Fused):
    """Whose second forward has a backward that raises."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return Explodes.apply(y) if len(self.seen) == 2 else y


@two_ranks
def explodes(rank: int, ranks: int) -> str:
    x, y = batch()
    runner, blocks = runner_of(Exploding if rank == 1 else Fused, rank)
    if rank == 1:
        # Only the stage whose backwards stand beside forwards of the other one.
        blocks[1].seen.extend(["F", "F"])
    with pytest.raises(PipelineError) as info:
        runner.step(x, target=y)
    runner.close()
    return str(info.value)


def test_a_backward_that_fails_beside_a_forward_is_the_backward() -> None:
    first, second = two_ranks.answers(explodes)
    assert first == second
    assert re.search(r"rank 1 at 2[BI]1: ArithmeticError: in the backward", first)
