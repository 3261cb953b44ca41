# SPDX-License-Identifier: Apache-2.0
"""Profiles: the time and the bytes of real stages."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torch_sm3 import reversible
from torch_sm3.pipeline import Costs, Stage, plan, profile, simulate

ROWS, WIDTH = 64, 128
BYTES = 4 * ROWS * WIDTH


def stages(*modules: nn.Module) -> list[Stage]:
    return [Stage(module, index) for index, module in enumerate(modules)]


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(linear(), nn.Tanh(), linear())
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(
            self.body, x, use_reentrant=self.reentrant, preserve_rng_state=False
        )


class _Naps(torch.autograd.Function):
    """Sleeps for its forward, its input gradient and its weight gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, naps: Any) -> torch.Tensor:
        ctx.naps = naps
        time.sleep(naps[0])
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if ctx.needs_input_grad[0]:
            time.sleep(ctx.naps[1])
        time.sleep(ctx.naps[2])
        return grad, torch.zeros(()), None


class Sleepy(nn.Module):
    """Takes a given time for F, I and W, the last two as nodes of their own."""

    def __init__(self, *naps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.naps = naps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        f, i, w = self.naps
        slow = _Naps.apply(self.weight.expand(()), self.weight, (0.0, 0.0, w))
        return _Naps.apply(x, torch.zeros(()), (f, i, 0.0)) + slow


def test_times_are_those_of_the_stage() -> None:
    sample = torch.randn(4, 4)
    parts = stages(Sleepy(0.004, 0.006, 0.012), Sleepy(0.008, 0.012, 0.024))
    costs = profile(parts, sample, repeats=3, warmup=1)
    # A sleep is never shorter than asked; a busy machine makes it longer.
    assert costs.F[1] >= 0.008 and costs.F[0] >= 0.004
    assert costs.I[1] >= 0.012 and costs.B[1] >= 0.036
    assert costs.W[1] == pytest.approx(costs.B[1] - costs.I[1])
    assert costs.F[1] < costs.I[1] < costs.B[1]
    # Stage 0 has no gradient of its inputs.
    assert costs.I[0] == 0 and costs.W[0] == costs.B[0] >= 0.012


MODULES: dict[str, tuple[Any, int]] = {
    # What the graph keeps, in tensors of ROWS x WIDTH.
    "a Linear keeps its input": (linear, 1),
    "Tanh keeps its output": (nn.Tanh, 1),
    "ReLU keeps its output": (nn.ReLU, 1),
    "adding keeps nothing": (nn.Identity, 0),
    "Linear, Tanh": (lambda: nn.Sequential(linear(), nn.Tanh()), 2),
    "Linear, Tanh, Linear": (
        lambda: nn.Sequential(linear(), nn.Tanh(), linear()),
        2,
    ),
    "checkpoint": (lambda: Checkpointed(False), 1),
    "reentrant checkpoint": (lambda: Checkpointed(True), 1),
}


@pytest.mark.parametrize("name", MODULES)
def test_kept_bytes_are_exact(name: str) -> None:
    make, kept = MODULES[name]
    costs = profile(
        stages(linear(), make(), nn.Identity()), torch.randn(ROWS, WIDTH), repeats=1
    )
    assert costs.activation_bytes[1] == kept * BYTES
    assert costs.boundary_bytes == (BYTES, BYTES, 0)
    # The batch of stage 0 belongs to the caller.
    assert costs.activation_bytes[0] == 0


def test_reversible_blocks_keep_no_more_when_they_are_many() -> None:
    def blocks(depth: int) -> nn.Module:
        couplings = [
            reversible.AdditiveCoupling(nn.Linear(8, 8), nn.Linear(8, 8))
            for _ in range(depth)
        ]
        return reversible.ReversibleSequence(*couplings)

    class Streams(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x * 1, x * 2

    def kept(depth: int) -> float:
        parts = stages(Streams(), blocks(depth), Sum())
        return profile(parts, torch.randn(16, 8), repeats=1).activation_bytes[1]

    class Sum(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a + b

    assert 0 < kept(2) == kept(6) <= 4 * 16 * 8 * 4


def test_recomputation_is_time_of_the_backward_and_cannot_be_split() -> None:
    costs = profile(
        stages(linear(), Checkpointed(True)), torch.randn(ROWS, WIDTH), repeats=3
    )
    assert costs.I[1] == costs.B[1] > costs.F[1] and costs.W[1] == 0


def test_static_bytes_are_weights_gradients_buffers_and_optimizer_state() -> None:
    module = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    module[0].bias.requires_grad_(False)
    optimizer = torch.optim.Adam(x for x in module.parameters() if x.requires_grad)
    trained, frozen = 4 * (32 + 8), 4 * 4
    buffers = 4 * 8 + 8
    sample = torch.randn(16, 8)
    bare = profile(stages(module), sample, repeats=1)
    assert bare.static_bytes == (2 * trained + frozen + buffers,)
    module(sample).sum().backward()
    optimizer.step()
    full = profile(stages(module), sample, optimizer=optimizer, repeats=1)
    # Three parameters, each with two moments and a step of one float.
    assert full.static_bytes[0] - bare.static_bytes[0] == 2 * trained + 3 * 4


def test_the_loss_is_part_of_the_last_stage() -> None:
    sample, target = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    costs = profile(
        stages(linear(), linear()),
        sample,
        target=target,
        loss_fn=nn.functional.mse_loss,
        repeats=1,
    )
    # Its input, the prediction that the loss keeps, and a copy of the loss.
    assert costs.activation_bytes[1] == 2 * BYTES + 4


def test_values_travel_as_in_a_runner() -> None:
    class Forks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: torch.Tensor, n: int) -> tuple[torch.Tensor, Any]:
            rest = {"tokens": torch.arange(3), "scale": 2.0, "none": None}
            return x * self.weight * n, rest

    class Joins(nn.Module):
        def forward(self, x: torch.Tensor, rest: dict[str, Any]) -> torch.Tensor:
            assert x.requires_grad and not x.is_leaf
            assert not rest["tokens"].requires_grad and rest["none"] is None
            return x.mul_(rest["scale"])  # a stage may change its inputs

    costs = profile(stages(Forks(), Joins()), (torch.randn(ROWS, WIDTH), 3), repeats=1)
    assert costs.boundary_bytes == (BYTES + 3 * 8, 0)


def test_routes_data_and_keyword_arguments_travel_as_in_a_runner() -> None:
    class Head(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {
                "skip": x[:2].clone().requires_grad_() * 2,
                "main": (x * 1).requires_grad_(),
            }

    class Middle(nn.Module):
        def forward(
            self, value: dict[str, torch.Tensor], mask: torch.Tensor, *, scale: float
        ) -> torch.Tensor:
            assert list(value) == ["main"] and value["main"].requires_grad
            return value["main"] * mask * scale

    class Tail(nn.Module):
        def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
            assert skip.requires_grad and not skip.is_leaf
            return x[:2] + skip

    sample = torch.randn(ROWS, WIDTH), torch.ones(ROWS, WIDTH)
    parts = [
        Stage(Head(), 0, data=lambda item: item[0], routes={"skip": 2}),
        Stage(Middle(), 1, data=lambda item: {"mask": item[1]}, kwargs=["scale"]),
        Stage(Tail(), 2),
    ]
    costs = profile(parts, sample, kwargs={"scale": 0.5}, repeats=1)
    row = BYTES / ROWS
    assert costs.boundary_bytes == (BYTES, BYTES, 0)
    assert costs.route_bytes == (2 * row,)
    with pytest.raises(ValueError, match=r"profile: expected 'scale' for stage 1, but"):
        profile(parts, sample)


def test_a_loss_over_tokens_comes_with_their_count() -> None:
    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> Any:
        return (output - target).square().sum(), output.numel(), {"metric": 1.0}

    sample = torch.randn(ROWS, WIDTH)
    costs = profile(stages(linear()), sample, target=sample, loss_fn=loss_fn, repeats=1)
    assert costs.B[0] > 0


def test_a_reentrant_checkpoint_may_be_followed_by_layers() -> None:
    tail = nn.Sequential(Checkpointed(True), nn.Tanh(), linear())
    costs = profile(
        stages(linear(), tail),
        torch.randn(ROWS, WIDTH),
        target=torch.randn(ROWS, WIDTH),
        loss_fn=nn.functional.mse_loss,
        repeats=1,
    )
    assert costs.B[1] > 0 and costs.I[1] == costs.B[1]


def test_a_stage_that_must_not_be_split_runs_whole_in_i() -> None:
    parts = [Stage(linear(), 0), Stage(linear(), 1, split=False)]
    costs = profile(parts, torch.randn(ROWS, WIDTH), repeats=1)
    assert costs.I[1] == costs.B[1] and costs.W[1] == 0


def test_nothing_is_left_behind() -> None:
    module = nn.Sequential(linear(), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5))
    calls: list[torch.Tensor] = []
    for weight in module.parameters():
        weight.grad = torch.full_like(weight, 3.0)
        weight.register_post_accumulate_grad_hook(calls.append)
    before = {name: x.clone() for name, x in module.state_dict().items()}
    parts, sample = stages(module, Checkpointed(True)), torch.randn(ROWS, WIDTH)
    state = torch.get_rng_state()
    with torch.no_grad():
        profile(parts, sample)
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(
        torch.equal(x.grad, torch.full_like(x, 3.0)) for x in module.parameters()
    )
    assert calls == []


def test_a_profile_can_be_planned_and_simulated() -> None:
    costs = profile(stages(linear(), linear()), torch.randn(ROWS, WIDTH), repeats=1)
    assert isinstance(costs, Costs)
    ran = simulate(plan("1f1b", 2, 4), costs)
    assert ran.makespan > 4 * max(f + b for f, b in zip(costs.F, costs.B, strict=True))


def test_stages_must_be_whole() -> None:
    sample = torch.randn(2, WIDTH)
    with pytest.raises(ValueError, match=r"profile: expected the stages 0 to 1 in or"):
        profile([Stage(linear(), 1), Stage(linear(), 0)], sample)
    with pytest.raises(ValueError, match="profile: expected the stages"):
        profile([], sample)
    with pytest.raises(ValueError, match="profile: expected at least 1 run, but got 0"):
        profile(stages(linear()), sample, repeats=0)
