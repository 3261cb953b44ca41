# SPDX-License-Identifier: Apache-2.0
"""SM3InBackward against the ordinary loop, bit for bit."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.sm3_models import equal, equal_states, small_model, snapshot
from helpers.sm3_ranks import assert_fine
from torch import Tensor, nn

from torch_sm3 import SM3, SM3InBackward


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 8, generator=generator) for _ in range(count)]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def twins(**options: Any) -> tuple[nn.Module, SM3, nn.Module, SM3InBackward]:
    model, other = small_model(), small_model()
    clip = options.pop("max_norm", None)
    one = SM3(model.parameters(), **options)
    two = SM3InBackward(other.parameters(), max_norm=clip, **options)
    return model, one, other, two


def assert_equal(one: SM3, two: SM3) -> None:
    assert equal(snapshot(one), snapshot(two))
    assert equal_states(one, two)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9, "weight_decay": 0.1, "beta2": 0.9},
        {"variant": "I", "compat": "optax"},
        {"fused": True},
        {"foreach": True},
        {"fused": False},
        {"lr": torch.tensor(0.2), "maximize": True},
    ],
    ids=str,
)
def test_same_bits_as_the_loop(options: dict[str, Any]) -> None:
    model, one, other, two = twins(**options)
    for x in batches(4):
        one.zero_grad()
        loss_of(model, x).backward()
        one.step()
        loss_of(other, x).backward()
        assert all(param.grad is None for param in other.parameters())
        two.step()
    assert_equal(one, two)


def test_stochastic_rounding_uses_the_same_numbers() -> None:
    model, other = small_model(torch.bfloat16), small_model(torch.bfloat16)
    one = SM3(model.parameters(), stochastic_rounding=True, seed=4)
    two = SM3InBackward(other.parameters(), stochastic_rounding=True, seed=4)
    for x in batches(3):
        one.zero_grad()
        loss_of(model, x.bfloat16()).backward()
        one.step()
        loss_of(other, x.bfloat16()).backward()
        two.step()
    assert_equal(one, two)


def test_sm3_row_25_four_micro_batches_make_one_step_on_their_sum() -> None:
    model, one, other, two = twins(momentum=0.9)
    for step in range(3):
        parts = batches(4 * (step + 1))[-4:]
        one.zero_grad()
        for x in parts:
            loss_of(model, x).backward()
        one.step()
        with two.no_step():
            for x in parts[:-1]:
                loss_of(other, x).backward()
        loss_of(other, parts[-1]).backward()
        two.step()
    assert_equal(one, two)
    assert all(int(state["step"]) == 3 for state in two.state.values())


def test_all_backwards_inside_no_step() -> None:
    model, one, other, two = twins()
    loss_of(model, batches(1)[0]).backward()
    one.step()
    with two.no_step():
        loss_of(other, batches(1)[0]).backward()
    two.step()
    assert_equal(one, two)


def test_a_gradient_that_only_an_earlier_micro_batch_has() -> None:
    first, last = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3, 2))
    optimizer = SM3InBackward([first, last], lr=0.1)
    with optimizer.no_step():
        first.sum().backward()
    last.sum().backward()
    assert first.grad is not None and last.grad is None
    optimizer.step()
    assert first.grad is None
    assert torch.equal(first, last)


def test_tied_weights_step_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x @ self.weight) @ self.weight.T

    model, other = Tied(), Tied()
    one, two = SM3(model.parameters()), SM3InBackward(other.parameters())
    for x in batches(3):
        one.zero_grad()
        loss_of(model, x).backward()
        one.step()
        loss_of(other, x).backward()
        two.step()
    assert_equal(one, two)


def test_few_gradients_exist_at_a_time() -> None:
    layers = [nn.Linear(8, 8) for _ in range(6)]
    optimizer = SM3InBackward([p for layer in layers for p in layer.parameters()])
    most = 0

    def count(_: Tensor) -> None:
        nonlocal most
        given = [
            p for layer in layers for p in layer.parameters() if p.grad is not None
        ]
        most = max(most, len(given))

    for layer in layers:
        layer.weight.register_post_accumulate_grad_hook(count)
    nn.Sequential(*layers)(batches(1)[0]).sum().backward()
    optimizer.step()
    assert most <= 2


# --- clipping ------------------------------------------------------------------


def clipped_loop(
    one: SM3, model: nn.Module, losses: list[Callable[[], Tensor]], norm: float
) -> None:
    one.zero_grad()
    for loss in losses:
        loss().backward()
    nn.utils.clip_grad_norm_(model.parameters(), norm)
    one.step()


@pytest.mark.parametrize("calls_backward", [False, True])
def test_clipping_runs_twice_with_the_same_random_numbers(calls_backward: bool) -> None:
    model, one, other, two = twins(max_norm=0.05, momentum=0.5)
    drop = nn.Dropout(0.5)

    def closure(x: Tensor) -> Tensor:
        loss = loss_of(other, drop(x))
        if calls_backward:
            loss.backward()
        return loss

    torch.manual_seed(7)
    for x in batches(4):
        clipped_loop(one, model, [lambda x=x: loss_of(model, drop(x))], 0.05)
    after = torch.get_rng_state()
    torch.manual_seed(7)
    for x in batches(4):
        loss = two.backward(lambda x=x: closure(x))
        assert loss.requires_grad
        two.step()
    assert_equal(one, two)
    assert torch.equal(torch.get_rng_state(), after)


def test_clipping_of_several_dtypes() -> None:
    def make() -> list[nn.Parameter]:
        torch.manual_seed(3)
        dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.bfloat16]
        return [nn.Parameter(torch.randn(5, 4).to(dtype)) for dtype in dtypes]

    plain, params = make(), make()
    one, two = SM3(plain), SM3InBackward(params, max_norm=0.1)

    def loss(params: list[nn.Parameter]) -> Tensor:
        return torch.stack([p.double().square().sum() for p in params]).sum()

    for _ in range(3):
        one.zero_grad()
        loss(plain).backward()
        nn.utils.clip_grad_norm_(plain, 0.1)
        one.step()
        two.backward(lambda: loss(params))
        two.step()
    assert_equal(one, two)


def test_clipping_with_accumulation_waits_for_the_sum() -> None:
    model, one, other, two = twins(max_norm=0.05)
    for step in range(2):
        parts = batches(3 * (step + 1))[-3:]
        clipped_loop(one, model, [lambda x=x: loss_of(model, x) for x in parts], 0.05)
        with two.no_step():
            for x in parts[:-1]:
                loss_of(other, x).backward()
        two.backward(lambda x=parts[-1]: loss_of(other, x))
        two.step()
    assert_equal(one, two)


def test_clipping_with_all_of_it_accumulated() -> None:
    model, one, other, two = twins(max_norm=0.05)
    parts = batches(2)
    clipped_loop(one, model, [lambda x=x: loss_of(model, x) for x in parts], 0.05)
    with two.no_step():
        for x in parts:
            two.backward(lambda x=x: loss_of(other, x))
    two.step()
    assert_equal(one, two)


def test_skipping_needs_the_first_pass_alone() -> None:
    model, one, other, two = twins(max_norm=1.0, skip_nonfinite=True)
    for i, x in enumerate(batches(4)):
        if i in (1, 2):
            x[0, 0] = torch.nan if i == 1 else torch.inf
        clipped_loop(one, model, [lambda x=x: loss_of(model, x)], 1.0)
        two.backward(lambda x=x: loss_of(other, x))
        two.step()
    assert one.skipped_steps == two.skipped_steps == 2
    assert_equal(one, two)


def test_backward_without_clipping_runs_once() -> None:
    model, one, other, two = twins()
    calls = 0

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        return loss_of(other, batches(1)[0])

    loss_of(model, batches(1)[0]).backward()
    one.step()
    two.backward(closure)
    two.step()
    assert calls == 1
    assert_equal(one, two)


# --- errors --------------------------------------------------------------------


def test_a_plain_backward_cannot_clip() -> None:
    _, _, other, two = twins(max_norm=1.0)
    before = snapshot(two)
    with pytest.raises(RuntimeError, match=r"opt\.backward\(closure\)"):
        loss_of(other, batches(1)[0]).backward()
    assert equal(before, snapshot(two)[: len(before)])


def test_a_second_gradient_in_an_iteration() -> None:
    _, _, other, two = twins()
    loss_of(other, batches(1)[0]).backward()
    with pytest.raises(RuntimeError, match=r"no_step\(\)"):
        loss_of(other, batches(1)[0]).backward()
    two.zero_grad()
    two.step()
    loss_of(other, batches(1)[0]).backward()


def test_a_hook_that_fires_twice_in_one_backward() -> None:
    from torch.utils.checkpoint import checkpoint

    layer = nn.Linear(8, 8)
    optimizer = SM3InBackward(layer.parameters())
    x = batches(1)[0].requires_grad_()
    y = checkpoint(layer, x, use_reentrant=True)
    z = checkpoint(layer, y, use_reentrant=True)
    with pytest.raises(RuntimeError, match="second one after its step"):
        z.sum().backward()
    assert optimizer.state[layer.weight]["step"] == 1


@pytest.mark.parametrize("name", ["grad_scale", "found_inf"])
def test_a_scaler(name: str) -> None:
    _, _, other, two = twins()
    setattr(two, name, torch.ones(()))
    with pytest.raises(RuntimeError, match=f"{name}.*GradScaler"):
        loss_of(other, batches(1)[0]).backward()


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"skip_nonfinite": True}, RuntimeError, "max_norm"),
        ({"differentiable": True}, RuntimeError, "differentiable"),
        ({"max_norm": 0.0}, ValueError, "'max_norm'"),
        ({"max_norm": float("inf")}, ValueError, "'max_norm'"),
        ({"lr": -1.0}, ValueError, "'lr'"),
    ],
    ids=str,
)
def test_options_that_cannot_be(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        SM3InBackward([nn.Parameter(torch.ones(2, 2))], **options)


# --- life ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))]
)
def test_copies_step_their_own_parameters(how: Callable[[Any], Any]) -> None:
    weight = nn.Parameter(torch.ones(3, 2))
    optimizer = SM3InBackward([weight], max_norm=1.0)
    twin = how(optimizer)
    (other,) = twin.param_groups[0]["params"]
    twin.backward(lambda: (other * 2).sum())
    twin.step()
    assert torch.equal(weight, torch.ones(3, 2))
    optimizer.backward(lambda: (weight * 2).sum())
    optimizer.step()
    assert torch.equal(weight, other)


def test_a_dead_optimizer_steps_nothing() -> None:
    weight = nn.Parameter(torch.ones(3, 2))
    optimizer = SM3InBackward([weight])
    del optimizer
    weight.sum().backward()
    assert torch.equal(weight, torch.ones(3, 2))
    assert weight.grad is not None


def test_load_and_go_on() -> None:
    model, one, other, two = twins(momentum=0.9)
    for x in batches(2):
        one.zero_grad()
        loss_of(model, x).backward()
        one.step()
    other.load_state_dict(model.state_dict())
    two.load_state_dict(one.state_dict())
    for x in batches(4)[2:]:
        one.zero_grad()
        loss_of(model, x).backward()
        one.step()
        loss_of(other, x).backward()
        two.step()
    assert_equal(one, two)


def test_groups_and_layers_that_come_later() -> None:
    model, one, other, two = twins()
    more, again = nn.Linear(8, 8), nn.Linear(8, 8)
    again.load_state_dict(more.state_dict())
    for layer in (more, again):
        layer.bias.requires_grad_(False)
    one.add_param_group({"params": list(more.parameters()), "lr": 0.3})
    two.add_param_group({"params": list(again.parameters()), "lr": 0.3})
    for i, x in enumerate(batches(4)):
        if i == 1:
            more.bias.requires_grad_(True)
            again.bias.requires_grad_(True)
        one.zero_grad()
        loss_of(model, more(x)).backward()
        one.step()
        loss_of(other, again(x)).backward()
        two.step()
    assert_equal(one, two)


@pytest.mark.parametrize(
    "name",
    [
        "fsdp2_in_backward",
        "fsdp2_accumulates_in_backward",
        "fsdp2_clips_in_backward",
        "ddp_in_backward_is_refused",
    ],
)
def test_on_two_ranks(name: str, two_ranks: dict[str, str]) -> None:
    assert_fine(two_ranks, name)
