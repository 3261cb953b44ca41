# SPDX-License-Identifier: Apache-2.0
"""The runner class of TorchScript: scripted stages over Gloo."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.scenarios import Scenarios
from torch import nn

from torch_sm3.pipeline import plan

two_ranks = Scenarios(2)

WIDTH, M = 5, 3


class First(nn.Module):
    """Return two streams, one of them changed in place by the next stage."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.linear(x)
        return torch.tanh(y), y * 2


class Second(nn.Module):
    """Join the streams."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 1)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.linear(a.add_(b))


class Loss(nn.Module):
    """Mean squared error."""

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(output, target)


class Routed(nn.Module):
    """Send a value past the next stage."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.linear(x)
        return {"x": torch.tanh(y), "skip": y}


class Middle(nn.Module):
    """Take what is not routed."""

    def forward(self, values: dict[str, torch.Tensor]) -> torch.Tensor:
        return values["x"] * 3


class Join(nn.Module):
    """Take the routed value by name."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        return self.linear(x + skip)


class Trainer(nn.Module):
    """Make and drive a runner inside TorchScript."""

    def __init__(self, stage: nn.Module, index: int) -> None:
        super().__init__()
        self.stage = stage
        self.loss = Loss()
        self.index = index

    def forward(
        self,
        group: torch.classes.c10d.ProcessGroup,  # type: ignore[name-defined]
        x: torch.Tensor,
        y: torch.Tensor,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        schedule = torch.classes.torch_sm3.PipelineSchedule("1f1b", 2, 1, 3)
        runner = torch.classes.torch_sm3.PipelineRunner(schedule, group)
        runner.add_stage(self.index, self.stage)
        runner.set_loss(self.loss)
        result = runner.step([x], y)
        runner.close()
        return result


def modules() -> list[nn.Module]:
    torch.manual_seed(3)
    return [First(), Second()]


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(4)
    return torch.randn(7, WIDTH), torch.randn(7, 1)


def one_loop(stages: list[nn.Module]) -> list[torch.Tensor]:
    """Train on the same microbatches in turn; return their losses."""
    losses = []
    for x, y in zip(*(whole.tensor_split(M) for whole in batch()), strict=True):
        value: Any = x
        for stage in stages:
            # Clones, since a stage may change in place what autograd keeps here.
            parts = value if isinstance(value, tuple) else (value,)
            value = stage(*(part.clone() for part in parts))
        loss = Loss()(value, y)
        (loss / M).backward()
        losses.append(loss.detach())
    return losses


def runner_of(stages: dict[int, nn.Module], text: str) -> Any:
    schedule = torch.classes.torch_sm3.PipelineSchedule.parse(text)
    group = dist.new_group(backend="gloo").boxed()
    runner = torch.classes.torch_sm3.PipelineRunner(schedule, group)
    for index, stage in stages.items():
        runner.add_stage(index, torch.jit.script(stage))
    runner.set_loss(torch.jit.script(Loss()))
    return runner


@two_ranks
def trains(rank: int, ranks: int) -> bool:
    own, whole = modules(), modules()
    text = plan("1f1b", 2, M).text
    runner = runner_of({rank: own[rank]}, text)
    x, y = batch()
    loss, losses = runner.step([x], y)
    expected = torch.stack(one_loop(whole))
    # Close, not equal: TorchScript may compute a linear layer in another way.
    good = torch.allclose(losses, expected)
    good &= torch.allclose(loss, expected.mean())
    for mine, other in zip(
        own[rank].parameters(), whole[rank].parameters(), strict=True
    ):
        good &= torch.allclose(mine.grad, other.grad)
    before = [p.grad.clone() for p in own[rank].parameters()]
    loss, losses, outputs = runner.eval([x], y, True)
    good &= torch.allclose(losses, expected) and len(outputs) == M * rank
    good &= runner.eval([x])[0] is None
    good &= all(map(torch.equal, before, (p.grad for p in own[rank].parameters())))
    runner.close()
    return good


def test_scripted_stages_train_as_one_loop_does() -> None:
    assert two_ranks.answers(trains) == [True, True]


@two_ranks
def inside(rank: int, ranks: int) -> bool:
    own, whole = modules(), modules()
    trainer = torch.jit.script(Trainer(own[rank], rank))
    _, losses = trainer(dist.new_group(backend="gloo").boxed(), *batch())
    good = torch.allclose(losses, torch.stack(one_loop(whole)))
    for mine, other in zip(
        own[rank].parameters(), whole[rank].parameters(), strict=True
    ):
        good &= torch.allclose(mine.grad, other.grad)
    return good


def test_a_scripted_module_drives_the_runner() -> None:
    assert two_ranks.answers(inside) == [True, True]


class Clipping(nn.Module):
    """Clip the gradients of all ranks inside TorchScript."""

    def forward(
        self,
        runner: torch.classes.torch_sm3.PipelineRunner,  # type: ignore[name-defined]
        max_norm: float,
    ) -> tuple[bool, float]:
        applied, norm = runner.clip_grad_norm(max_norm)
        return applied, norm


@two_ranks
def clipped(rank: int, ranks: int) -> list[str]:
    own, whole = modules(), modules()
    runner = runner_of({rank: own[rank]}, plan("1f1b", 2, M).text)
    x, y = batch()
    runner.step([x], y)
    one_loop(whole)
    every = [p for stage in whole for p in stage.parameters()]
    wanted = float(torch.nn.utils.clip_grad_norm_(every, 0.05))
    applied, norm = torch.jit.script(Clipping())(runner, 0.05)
    assert applied and norm == pytest.approx(wanted) and norm > 0.05
    pairs = zip(own[rank].parameters(), whole[rank].parameters(), strict=True)
    assert all(torch.allclose(mine.grad, other.grad) for mine, other in pairs)
    # What is small enough stays.
    before = [p.grad.clone() for p in own[rank].parameters()]
    assert runner.clip_grad_norm(1.0)[0]
    # Gradients that are not finite are left alone, and no rank is to step.
    if rank == 0:
        next(own[0].parameters()).grad[0, 0] = float("inf")
        before[0][0, 0] = float("inf")
    assert not runner.clip_grad_norm(0.01)[0]
    assert all(map(torch.equal, before, (p.grad for p in own[rank].parameters())))
    texts = []
    for wrong in (-1.0, 1.0 + rank):
        with pytest.raises(ValueError, match="argument 'max_norm'") as info:
            runner.clip_grad_norm(wrong)
        texts.append(str(info.value).partition("\n")[0])
    runner.close()
    return texts


def test_the_norm_is_that_of_all_stages() -> None:
    first, second = two_ranks.answers(clipped)
    assert first == second
    assert "expected max_norm of at least 0, but got -1" in first[0]
    assert "expected max_norm 1 as on rank 0, but got 2 on rank 1" in first[1]


@two_ranks
def routed(rank: int, ranks: int) -> bool:
    torch.manual_seed(5)
    first, middle, last = Routed(), Middle(), Join()
    x, y = batch()
    for a, b in zip(x.tensor_split(M), y.tensor_split(M), strict=True):
        sent = first(a)
        value = last(middle(sent), sent["skip"])
        (Loss()(value, b) / M).backward()
    expected = [p.grad.clone() for p in (*first.parameters(), *last.parameters())]
    first.zero_grad()
    last.zero_grad()
    head = f"schedule 1 kind=x ranks=2 stages=3 microbatches={M} placement=0,1,0\n"
    rows = ["".join(f"{s}F{i} " for s in st for i in range(M)) for st in ([0, 2], [1])]
    rows[0] += "".join(f"{s}B{i} " for s in (2, 0) for i in range(M))
    rows[1] += "".join(f"1B{i} " for i in range(M))
    stages = {0: first, 2: last} if rank == 0 else {1: middle}
    text = head + "".join(f"rank {r}: {row}\n" for r, row in enumerate(rows))
    runner = runner_of(stages, text)
    if rank == 0:
        runner.add_route(0, "skip", 2)
    runner.step([x], y)
    runner.close()
    got = [p.grad for p in (*first.parameters(), *last.parameters())]
    return rank == 1 or all(map(torch.allclose, got, expected))


def test_a_route_arrives_by_name() -> None:
    assert two_ranks.answers(routed) == [True, True]


@two_ranks
def fails(rank: int, ranks: int) -> str:
    own = modules()
    text = plan("1f1b", 2, M).text
    runner = runner_of({rank: own[rank]}, text)
    x, y = batch()
    with pytest.raises(RuntimeError, match="pipeline: rank 1 at 1F0") as info:
        runner.step([x], torch.randn(7, 4, 5, 6))
    with pytest.raises(ValueError, match="at least 3 samples"):
        runner.step([x[:2]], y)
    with pytest.raises(RuntimeError, match="before its first step"):
        runner.add_stage(0, torch.jit.script(own[rank]))
    runner.step([x], y)
    runner.close()
    return str(info.value).splitlines()[0]


def test_a_failed_step_says_the_same_on_all_ranks() -> None:
    first, second = two_ranks.answers(fails)
    assert first == second


class TokenLoss(nn.Module):
    """Sum over those samples whose target is positive, and their number."""

    def forward(
        self, output: torch.Tensor, target: torch.Tensor
    ) -> tuple[torch.Tensor, int]:
        counts = (target > 0).to(output.dtype)
        loss = ((output - target).square() * counts).sum()
        return loss, int(counts.sum().item())


class Plain(nn.Module):
    """One layer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(torch.tanh(self.linear(x)), 0.0)


@two_ranks
def tied_tokens(rank: int, ranks: int) -> bool:
    torch.manual_seed(6)
    x, y = torch.randn(7, WIDTH), torch.randn(7, WIDTH)
    shared, loss = Plain(0), TokenLoss()
    total, count = torch.zeros(()), 0
    for a, b in zip(x.tensor_split(M), y.tensor_split(M), strict=True):
        part, number = loss(shared(shared(a)), b)
        total, count = total + part, count + number
    (total / count).backward()
    schedule = torch.classes.torch_sm3.PipelineSchedule("zb_h1", 2, 1, M)
    group = dist.new_group(backend="gloo").boxed()
    runner = torch.classes.torch_sm3.PipelineRunner(
        schedule, group, loss_reduction="tokens", deterministic=True, seed=3
    )
    own = Plain(rank)
    runner.add_stage(rank, torch.jit.script(own), split=("auto", "never")[rank])
    with pytest.raises(ValueError, match="a parameter's name, but got 'bias'"):
        runner.add_tie(rank, "bias", "w")
    for name in ("weight", "bias"):
        runner.add_tie(rank, f"linear.{name}", name)
    runner.set_loss(torch.jit.script(loss))
    got, _ = runner.step([x], y)
    runner.close()
    good = torch.allclose(got, total / count)
    for mine, other in zip(own.parameters(), shared.parameters(), strict=True):
        good &= torch.equal(mine, other) and torch.allclose(mine.grad, other.grad)
    with pytest.raises(RuntimeError, match="no backward of a loss that step returned"):
        got.backward()
    return good


def test_tokens_and_tied_weights() -> None:
    assert two_ranks.answers(tied_tokens) == [True, True]


@two_ranks
def interrupted(rank: int, ranks: int) -> str:
    """Ctrl-C while rank 0 waits in the library for a rank that comes late."""
    own = modules()
    runner = runner_of({rank: own[rank]}, plan("1f1b", 2, M).text)
    x, y = batch()
    runner.eval([x], y)
    text = ""
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        # Whatever this process was started with: in the background it is ignored.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        called = threading.Event()

        def strike() -> None:
            called.wait()
            time.sleep(0.5)  # the library waits by now
            os.kill(os.getpid(), signal.SIGINT)
            store.set("struck", "")

        threading.Thread(target=strike).start()
        # Python serves the signal once the library has told all ranks.
        with pytest.raises(KeyboardInterrupt):
            called.set()
            try:
                runner.step([x], y)
            except RuntimeError as error:
                text = str(error)
            while True:
                time.sleep(0.01)
        signal.signal(signal.SIGINT, before)
    else:
        store.wait(["struck"])
        with pytest.raises(RuntimeError) as info:
            runner.step([x], y)
        text = str(info.value)
    assert all(p.grad is None for p in own[rank].parameters())
    loss, _ = runner.step([x], y)
    assert torch.allclose(loss, torch.stack(one_loop(modules())).mean())
    runner.close()
    return text.partition("\n")[0]


def test_ctrl_c_in_a_wait_reaches_all_ranks() -> None:
    first, second = two_ranks.answers(interrupted)
    assert second.startswith("pipeline: rank 0 at 0")
    assert second.endswith(": KeyboardInterrupt: interrupted")
    assert first in ("", second)


def test_wrong_arguments_are_named() -> None:
    schedule = torch.classes.torch_sm3.PipelineSchedule("none", 1, 1, 2)
    with pytest.raises(TypeError, match="expected a PipelineSchedule, but got String"):
        torch.classes.torch_sm3.PipelineRunner("none", None)
    with pytest.raises(ValueError, match=r"loss_reduction in \{mean, .*, tokens\}"):
        torch.classes.torch_sm3.PipelineRunner(schedule, None, "median")
    runner = torch.classes.torch_sm3.PipelineRunner(schedule, None)
    with pytest.raises(TypeError, match="expected a scripted module, but got"):
        runner.add_stage(0, torch.ones(1))
    with pytest.raises(ValueError, match="a stage that was added, but got 0"):
        runner.add_route(0, "x", 1)
