# SPDX-License-Identifier: Apache-2.0
"""Hooks see every gradient once, in the part that finds it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.pipeline_backward import backward, by_torch, by_us, gradient_for, twin
from helpers.pipeline_layers import Apply, Scale, Transformer
from torch import Tensor, nn

Event = tuple[str, str]


def record_weights(module: nn.Module, events: list[Any]) -> None:
    """Note every gradient of a weight, before and after it is accumulated."""

    def before(name: str) -> Callable[[Tensor], None]:
        return lambda grad: events.append(("before", name, grad.clone()))

    def after(name: str) -> Callable[[Tensor], None]:
        return lambda weight: events.append(("after", name, weight.grad.clone()))

    for name, weight in module.named_parameters():
        weight.register_hook(before(name))
        weight.register_post_accumulate_grad_hook(after(name))


def names(events: list[Any]) -> list[Event]:
    return [(when, name) for when, name, _ in events]


def made() -> tuple[nn.Module, list[list[Tensor]]]:
    torch.manual_seed(2)
    return Transformer(), [[torch.randn(2, 3, 6)] for _ in range(2)]


@pytest.mark.parametrize("split", ["full", "auto", "never"])
def test_hooks_of_weights_see_what_they_see_with_torch(split: str) -> None:
    module, batches = made()
    expected: list[Any] = []
    found: list[Any] = []
    reference, ours = twin(module), twin(module)
    record_weights(reference, expected)
    by_torch(reference, batches)
    record_weights(ours, found)
    by_us(ours, batches, split)
    assert names(found) == names(expected)
    assert all(torch.equal(a[2], b[2]) for a, b in zip(found, expected, strict=True))


def test_hooks_of_weights_run_in_weight() -> None:
    module, (batch, _) = made()
    events: list[Any] = []
    record_weights(module, events)
    one = backward()
    outputs = [module(*one.enter(batch, [True]))]
    one.leave(outputs)
    one.input([gradient_for(outputs[0], 0)])
    assert events == []
    one.weight()
    weights = dict(module.named_parameters())
    assert sorted(names(events)) == sorted(
        (when, name) for when in ("before", "after") for name in weights
    )


def test_weights_of_custom_functions_alone_are_ready_after_input() -> None:
    module = Apply(
        lambda m, x: Scale.apply(Scale.apply(m.a(x), m.alone) @ m.both, m.both[0]),
        a=nn.Linear(3, 3),
        alone=torch.rand(3),
        both=torch.rand(3, 3),
    )
    events: list[Any] = []
    record_weights(module, events)
    one = backward()
    outputs = [module(*one.enter([torch.rand(2, 3)], [True]))]
    one.leave(outputs)
    one.input([gradient_for(outputs[0], 0)])
    assert names(events) == [("before", "alone"), ("after", "alone")]
    one.weight()
    assert [name for _, name in names(events)].count("both") == 2


def test_hooks_between_see_one_gradient_and_may_change_it() -> None:
    torch.manual_seed(0)
    seen: list[Tensor] = []

    def hooked(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        h.register_hook(lambda grad: (seen.append(grad.clone()), grad * 2)[1])
        h.retain_grad()
        seen_at.append(h)
        return m.b(h)

    seen_at: list[Tensor] = []
    module = Apply(hooked, a=nn.Linear(3, 3), b=nn.Linear(3, 3))
    batches = [[torch.randn(4, 3)]]
    reference, ours = twin(module), twin(module)
    expected, found = by_torch(reference, batches), by_us(ours, batches, "always")
    assert len(seen) == 2 and torch.equal(seen[0], seen[1])
    kept = [h.grad for h in seen_at]
    assert kept[0] is not None and torch.equal(kept[0], 2 * seen[0])
    assert kept[1] is not None and torch.equal(kept[0], kept[1])
    for name, gradient in expected.weights.items():
        assert torch.equal(found.weights[name], gradient)  # type: ignore[arg-type]


def test_full_backward_hooks_of_modules_run_once() -> None:
    torch.manual_seed(0)
    batches = [[torch.randn(4, 3)]]
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    seen: dict[str, list[Any]] = {}
    for way in ("torch", "ours"):
        mine = twin(module)
        for layer in mine:
            layer.register_full_backward_hook(
                lambda _, found, given, way=way: seen.setdefault(way, []).append(
                    (found[0].clone(), given[0].clone())
                )
            )
        by_torch(mine, batches) if way == "torch" else by_us(mine, batches, "always")
    assert len(seen["ours"]) == len(seen["torch"]) == 3
    for ours, theirs in zip(seen["ours"], seen["torch"], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


class OwnError(Exception):
    """An exception of the user's."""


@pytest.mark.parametrize("part", ["full", "input", "weight"])
def test_an_exception_of_a_hook_is_raised_as_it_is(part: str) -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    error = OwnError("of mine")

    def fail(*_: Any) -> None:
        raise error

    def failing(x: Tensor) -> Tensor:
        h = module[0](x)
        h.register_hook(fail)
        return module[1](h)

    if part == "weight":
        module[0].weight.register_hook(fail)
    one = backward()
    stage = module if part == "weight" else failing
    (x,) = one.enter([torch.rand(2, 3)], [True])
    one.leave([stage(x)])
    gradient = torch.ones(2, 3)
    with pytest.raises(OwnError, match="of mine"):
        if part == "full":
            one.full([gradient])
        else:
            one.input([gradient])
            one.weight()
    # The next microbatch is as if nothing had been.
    module.zero_grad()
    module[0].weight._backward_hooks.clear() if part == "weight" else None
    batches = [[torch.rand(2, 3)]]
    expected = by_torch(twin(module), batches)
    found = by_us(module, batches, "always")
    assert all(torch.equal(a, found.weights[n]) for n, a in expected.weights.items())  # type: ignore[arg-type]
