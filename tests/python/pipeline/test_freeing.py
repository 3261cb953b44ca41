# SPDX-License-Identifier: Apache-2.0
"""Outputs that were sent lose their memory, and nothing else does."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.memory_meter import memory_meter
from helpers.pipeline_backward import backward, gradient_for, tensors_of
from helpers.pipeline_layers import Apply, Reversible, Scale
from torch import Tensor, nn
from torch.nn import functional

D = 6


@pytest.fixture(autouse=True)
def _no_garbage() -> None:
    gc.collect()
    torch.manual_seed(1)


def forward(stage: Callable[..., Any], *inputs: Tensor) -> tuple[Any, list[Tensor]]:
    one = backward()
    outputs = tensors_of(stage(*one.enter(list(inputs), [True] * len(inputs))))
    one.leave(outputs)
    return one, outputs


def gradients(stage: Any, x: Tensor, free: bool) -> list[Tensor | None]:
    one, outputs = forward(stage, x)
    grads = [
        gradient_for(y, i) if y.requires_grad else None for i, y in enumerate(outputs)
    ]
    if free:
        one.free(outputs)
    stage.zero_grad()
    return [*one.full(grads), *(w.grad for w in stage.parameters())]


def assert_survives(stage: Any, freed: list[bool]) -> None:
    """Check what is freed, and that gradients do not notice."""
    x = torch.randn(4, D)
    one, outputs = forward(stage, x)
    aliases = [y.detach() for y in outputs]
    values = [y.detach().clone() for y in outputs]
    shapes = [y.shape for y in outputs]
    assert one.free(outputs) == freed
    for y, alias, value, gone in zip(outputs, aliases, values, freed, strict=True):
        assert torch.equal(alias, value)
        if gone:
            assert y.untyped_storage().nbytes() == y.element_size()
            assert y.isnan().all()
        else:
            assert torch.equal(y, value)
    assert [y.shape for y in outputs] == shapes
    del one, outputs, aliases
    for a, b in zip(gradients(stage, x, True), gradients(stage, x, False), strict=True):
        assert (a is None and b is None) or torch.equal(a, b)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "last",
    [
        nn.Linear(D, D),
        nn.Sequential(nn.Linear(D, D), nn.GELU()),
        nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D)),
        nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D)),
        nn.Sequential(nn.Linear(D, D), nn.SiLU(), nn.Dropout(0.0)),
        Apply(lambda m, x: m.a(x) + x, a=nn.Linear(D, D)),
        Apply(lambda m, x: m.a(x) * m.a(x), a=nn.Linear(D, D)),
        Apply(lambda m, x: torch.cat([m.a(x), x]), a=nn.Linear(D, D)),
    ],
)
def test_result_that_nothing_saved_is_freed(last: nn.Module) -> None:
    assert_survives(last, [True])


@pytest.mark.parametrize(
    "function",
    [
        torch.tanh,
        torch.sigmoid,
        torch.exp,
        torch.relu,
        torch.sqrt,
        lambda y: torch.softmax(y, -1),
        lambda y: torch.log_softmax(y, -1),
        lambda y: functional.elu(y, inplace=True),
    ],
)
def test_result_that_its_node_saved_survives(function: Any) -> None:
    # The bytes stay, and so does the tensor.
    stage = Apply(lambda m, x: function(m.a(x).abs() + 1), a=nn.Linear(D, D))
    assert_survives(stage, [False])


class Keeps(torch.autograd.Function):
    """Keeps its result in ways that torch knows nothing of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.result = x.exp()
        return ctx.result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.result


@pytest.mark.parametrize(
    "stage",
    [
        Apply(lambda m, x: Keeps.apply(m.a(x)), a=nn.Linear(D, D)),
        Apply(
            lambda m, x: Scale.apply(m.a(x), m.w), a=nn.Linear(D, D), w=torch.rand(D)
        ),
    ],
)
def test_result_of_a_custom_function_is_left_alone(stage: nn.Module) -> None:
    assert_survives(stage, [False])


def test_last_pair_of_a_reversible_block_survives() -> None:
    blocks = Reversible().blocks
    pair = Apply(lambda m, x: m.a(*x.chunk(2, -1)), a=blocks)
    assert_survives(pair, [False, False])
    joined = Apply(lambda m, x: torch.cat(m.a(*x.chunk(2, -1)), -1), a=blocks)
    assert_survives(joined, [True])


def test_views_and_what_came_in_are_left_alone() -> None:
    def views(m: Any, x: Tensor) -> tuple[Tensor, ...]:
        y = m.a(x)
        return y.view(2, 2, D), y[1:], *y.unbind(-1)[:2]

    assert_survives(Apply(views, a=nn.Linear(D, D)), [False] * 4)
    assert_survives(Apply(lambda m, x: x), [False])
    assert_survives(Apply(lambda m, x: x.mul_(2)), [False])
    assert_survives(
        Apply(lambda m, x: torch.ops.aten._unsafe_view(x, x.shape)), [False]
    )
    assert_survives(Apply(lambda m, x: x.view(-1)), [False])


def test_what_has_no_graph_is_left_alone() -> None:
    def stage(m: Any, x: Tensor) -> tuple[Tensor, ...]:
        return m.a(x), m.a(x).detach(), torch.arange(4), m.w

    module = Apply(stage, a=nn.Linear(D, D), w=torch.rand(D))
    assert_survives(module, [True, False, False, False])


def test_what_another_output_may_have_saved_is_left_alone() -> None:
    def stage(m: Any, x: Tensor) -> tuple[Tensor, ...]:
        y = m.a(x)
        return y, m.a(y), y * 2 + 1

    assert_survives(Apply(stage, a=nn.Linear(D, D)), [False, True, True])


def test_one_output_twice_is_freed_once() -> None:
    module = nn.Linear(D, D)
    one, outputs = forward(lambda x: [module(x)] * 2, torch.rand(2, D))
    assert one.free(outputs) == [True, True]
    grads = [torch.ones(2, D)] * 2
    (found,) = one.full(grads)
    assert torch.equal(found, torch.full((2, D), 2.0) @ module.weight)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
def test_freed_outputs_of_other_types(dtype: torch.dtype) -> None:
    weight = torch.randn(D, D, dtype=dtype, requires_grad=True)
    one = backward()
    (x,) = one.enter([torch.randn(2, D, dtype=dtype)], [True])
    y = x @ weight
    one.leave([y])
    assert one.free([y]) == [True] and y.isnan().all()
    assert one.full([torch.ones(2, D, dtype=dtype)])[0].dtype == dtype


def test_bytes_are_gone_when_the_alias_is() -> None:
    module, n = nn.Linear(D, D), 100
    x = torch.rand(n, D)
    with memory_meter() as before:
        one, outputs = forward(module, x)
    with memory_meter() as after:
        queued = outputs[0].detach()
        one.free(outputs)
    with memory_meter() as sent:
        del queued
    assert before.live == 4 * n * D
    assert after.live == 4  # the one element
    assert sent.live == -4 * n * D
    one.full([torch.ones(n, D)])


@pytest.mark.parametrize("shape", [(8, D), (2, 4, D)])
def test_dropped_outputs_hold_nothing(shape: tuple[int, ...]) -> None:
    # In three dimensions the result of a linear layer is a view: it cannot be freed,
    # but nothing holds it once the caller has dropped it.
    module = nn.Linear(D, D)
    x = torch.rand(shape)
    with memory_meter() as read:
        one, outputs = forward(module, x)
        queued = outputs[0].detach()
        del outputs
    assert read.live == 4 * 8 * D
    with memory_meter() as sent:
        del queued
    assert sent.live == -4 * 8 * D
    one.full([torch.ones(shape)])


def test_a_module_that_keeps_its_output_keeps_no_bytes() -> None:
    def stage(m: Any, x: Tensor) -> Tensor:
        m.last = m.a(x)
        return m.last

    module = Apply(stage, a=nn.Linear(D, D))
    one, outputs = forward(module, torch.rand(100, D))
    assert one.free(outputs) == [True]
    assert module.last.untyped_storage().nbytes() == 4
    assert module.last.shape == (100, D)
    one.full([torch.ones(100, D)])
