# SPDX-License-Identifier: Apache-2.0
"""The backward of one stage in two parts leaves the bits of torch's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers.pipeline_backward import assert_same, backward, by_torch, by_us, twin
from helpers.pipeline_layers import Checkpointed
from helpers.pipeline_zoo import ZOO
from torch import Tensor, nn


def made(name: str) -> tuple[nn.Module, list[list[Tensor]]]:
    case = ZOO[name]
    torch.manual_seed(3)
    module = case.make()
    batches = [[torch.randn(shape) for shape in case.shapes] for _ in range(3)]
    return module, batches


def run(function: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    module = twin(module)
    torch.manual_seed(5)
    return module, function(module, *args, **kwargs)


@pytest.mark.parametrize("split", ["full", "auto", "never"])
@pytest.mark.parametrize("name", ZOO)
def test_gradients_have_the_bits_of_torch(name: str, split: str) -> None:
    module, batches = made(name)
    _, expected = run(by_torch, module, batches)
    _, found = run(by_us, module, batches, split, free=True)
    assert_same(found, expected)


@pytest.mark.parametrize("name", ZOO)
def test_weight_gets_something_where_something_can_be_split(name: str) -> None:
    module, batches = made(name)
    if ZOO[name].splits:
        _, expected = run(by_torch, module, batches)
        _, found = run(by_us, module, batches, "always")
        assert_same(found, expected)
    else:
        with pytest.raises(ValueError, match=r"expected a stage .* \(argument 'split'"):
            run(by_us, module, batches, "always")


@pytest.mark.parametrize("split", ["full", "auto"])
@pytest.mark.parametrize("name", ZOO)
def test_first_stage_whose_inputs_have_no_gradient(name: str, split: str) -> None:
    module, batches = made(name)
    options = {"requires_grad": False}
    _, expected = run(by_torch, module, batches, **options)
    _, found = run(by_us, module, batches, split, **options)
    assert_same(found, expected)


@pytest.mark.parametrize("split", ["full", "auto"])
@pytest.mark.parametrize("absent", [(0,), (1, 2), (0, 1, 2, 3)])
def test_absent_gradients_are_skipped(absent: tuple[int, ...], split: str) -> None:
    module, batches = made("outputs")
    _, expected = run(by_torch, module, batches, absent)
    _, found = run(by_us, module, batches, split, absent=absent)
    assert_same(found, expected)


@pytest.mark.parametrize("split", ["full", "auto", "always", "never"])
def test_no_output_that_requires_grad_is_a_no_op(split: str) -> None:
    module = nn.Linear(3, 3).requires_grad_(False)
    found = by_us(module, [[torch.ones(2, 3)]], split, requires_grad=False)
    assert found.inputs == [[None]]


@pytest.mark.parametrize("split", ["full", "auto", "never"])
@pytest.mark.parametrize("mode", ["nonreentrant", "reentrant"])
@pytest.mark.parametrize("tail", ["", "_between"])
def test_checkpointed_region_is_recomputed_once(
    mode: str, tail: str, split: str
) -> None:
    module, batches = made(f"checkpoint_{mode}{tail}")
    module, _ = run(by_us, module, batches, split)
    regions = [m for m in module.modules() if isinstance(m, Checkpointed)]
    assert [region.runs for region in regions] == [2 * len(batches)] * len(regions)


def test_backward_makes_no_casts_of_its_own() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    x, gradient = torch.randn(4, 8), torch.randn(4, 8)
    found: dict[str, list[Tensor | None]] = {}
    for parts in ("torch", "full", "input"):
        module.zero_grad()
        one = backward("always")
        (inner,) = one.enter([x], [True])
        y = module(inner)
        one.leave([y])
        if parts == "torch":
            y.backward(gradient)
        else:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                getattr(one, parts)([gradient])
                if parts == "input":
                    one.weight()
        found[parts] = [weight.grad for weight in module.parameters()]
    for parts in ("full", "input"):
        for a, b in zip(found[parts], found["torch"], strict=True):
            assert torch.equal(a, b)  # type: ignore[arg-type]


def test_scaled_weight_of_a_first_stage_waits_for_weight() -> None:
    first, w = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8))
    seen: list[Tensor] = []
    scaled = w * 0.1  # its node has no edge for the number, as if it read data
    scaled.register_hook(seen.append)
    one = backward("always")
    (x,) = one.enter([torch.rand(4, 8)], [False])
    one.leave([torch.tanh(first(x)) @ scaled])
    one.input([torch.rand(4, 8)])
    assert seen == [] and first.weight.grad is None
    one.weight()
    assert len(seen) == 1 and w.grad is not None


class InParts(torch.autograd.Function):
    """A stage whose gradients come from the backward in two parts."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x, *weights)
        return InParts.call(module, x, weights)

    @staticmethod
    def call(module: nn.Module, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
        names = [name for name, _ in module.named_parameters()]
        named = dict(zip(names, weights, strict=True))
        return torch.func.functional_call(module, named, (x,))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, *weights = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        one = backward("always")
        with torch.enable_grad():
            (inner,) = one.enter([x.detach()], [True])
            one.leave([InParts.call(ctx.module, inner, weights)])
        found = one.input([grad])
        assert all(weight.grad is None for weight in weights)
        one.weight()
        return None, found[0], *(weight.grad for weight in weights)


def test_gradcheck() -> None:
    torch.manual_seed(0)
    layers = nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)
    module = nn.Sequential(*layers).double()
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    weights = [w.detach().clone().requires_grad_() for w in module.parameters()]
    assert torch.autograd.gradcheck(InParts.apply, (module, x, *weights))
