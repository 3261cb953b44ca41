# SPDX-License-Identifier: Apache-2.0
"""The TorchScript face of SM3: scripted loops, files, pickles, state dicts."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import torch_sm3


def _has_torchscript() -> bool:
    """Probe by using it: later versions of torch switch it off."""

    def plus_one(x: int) -> int:
        return x + 1

    try:
        return bool(torch.jit.script(plus_one)(1) == 2)
    except Exception:
        return False


scripted = pytest.mark.skipif(
    not _has_torchscript(), reason="this torch does not compile TorchScript"
)


def make(**options: object) -> torch.ScriptObject:
    return torch.classes.torch_sm3.SM3(**options)


class Trainer(nn.Module):
    """A model that trains itself, with the optimizer as an attribute."""

    def __init__(self, optimizer: torch.ScriptObject) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 3)
        self.optimizer = optimizer

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = (self.down(torch.tanh(self.up(x))) - y).square().mean()
        loss.backward()
        params = [self.up.weight, self.up.bias, self.down.weight, self.down.bias]
        grads: list[Tensor | None] = [p.grad for p in params]
        self.optimizer.step(params, grads)
        for grad in grads:
            if grad is not None:
                grad.zero_()
        return loss.detach()


@pytest.fixture(autouse=True)
def _one_rounding() -> Iterator[None]:
    """Run as written: fused after some calls, the model itself rounds otherwise."""
    with torch.jit.optimized_execution(False):
        yield


def train(model: Callable[[Tensor, Tensor], Tensor], seed: int) -> list[float]:
    torch.manual_seed(seed)
    return [
        float(model(torch.randn(16, 4), torch.randn(16, 3)).item()) for _ in range(4)
    ]


OPTIONS = [
    {},
    {"lr": 0.05, "momentum": 0.9},
    {"variant": "I", "beta2": 0.9, "weight_decay": 0.01, "maximize": True},
    {"compat": "optax", "momentum": 0.5, "momentum_dtype": torch.bfloat16},
]


@scripted
@pytest.mark.parametrize("options", OPTIONS)
def test_a_scripted_loop_continues_from_its_file(options: dict[str, object]) -> None:
    module = torch.jit.script(Trainer(make(**options)))
    before = module.up.weight.detach().clone()
    train(module, 0)
    assert not torch.equal(before, module.up.weight)
    file = io.BytesIO()
    torch.jit.save(module, file)
    file.seek(0)
    loaded = torch.jit.load(file)
    assert train(module, 1) == train(loaded, 1)
    for ours, theirs in zip(module.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@scripted
def test_a_scripted_loop_has_the_bits_of_the_python_optimizer() -> None:
    torch.manual_seed(0)
    module = torch.jit.script(Trainer(make(lr=0.05, momentum=0.9)))
    plain = Trainer(make())
    plain.load_state_dict(module.state_dict())
    optimizer = torch_sm3.SM3(plain.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(1)
    for _ in range(4):
        x, y = torch.randn(16, 4), torch.randn(16, 3)
        module(x, y)
        optimizer.zero_grad()
        (plain.down(torch.tanh(plain.up(x))) - y).square().mean().backward()
        optimizer.step()
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@scripted
def test_a_scripted_function_makes_an_optimizer() -> None:
    @torch.jit.script
    def descend(w: Tensor, steps: int) -> int:
        optimizer = torch.classes.torch_sm3.SM3(0.5, momentum=0.0, beta2=0.5)
        for _ in range(steps):
            grads: list[Tensor | None] = [w.clone()]
            optimizer.step([w], grads)
        optimizer.set_lr(0.25)
        return optimizer.state_bytes()

    w = torch.ones(3, 4)
    assert descend(w, 5) == (3 + 4) * 4 + 8
    assert float(w.abs().max()) < 1
