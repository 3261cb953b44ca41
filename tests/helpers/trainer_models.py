# SPDX-License-Identifier: Apache-2.0
"""A small model with everything that trainers must get right, and its comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import torch_sm3
from torch_sm3.reversible import AdditiveCoupling, HalfResidual, Swap
from torch_sm3.trainer import ReversibleTrainer, Trainer

WIDTH, VOCABULARY = 8, 11
#: Where the model's side context lies: mask, targets and weights end the batch.
SIDE = {"mask": -3, "memory": -4}


class Embed(nn.Module):
    """Tokens to two streams and a memory that every layer may read."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.memory = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, tokens: Tensor) -> tuple[Tensor, ...]:
        h = self.dropout(nn.functional.embedding(tokens, self.weight))
        return h, h, torch.tanh(self.memory(h.mean(1, keepdim=True)))


class Masked(nn.Module):
    """A pre-norm MLP of a stream that also reads side context by name."""

    def __init__(self, rate: float = 0.2) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.dropout = nn.Dropout(rate)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor, memory: Tensor) -> Tensor:
        h = self.dropout(torch.nn.functional.gelu(self.up(self.norm(x) + memory)))
        return self.down(h) * mask.unsqueeze(-1)


class Cross(nn.Module):
    """A function of two context items."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.dropout(torch.tanh(self.mix(x) * memory))


def mlp(rate: float = 0.2) -> nn.Sequential:
    return nn.Sequential(
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, WIDTH),
        nn.GELU(),
        nn.Dropout(rate),
    )


class Between(nn.Module):
    """A standard layer of two items whose buffers change."""

    n_in = 2

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        h = self.norm((a + b).transpose(1, 2)).transpose(1, 2)
        return self.dropout(h), a - b


class Head(nn.Module):
    """The loss; its weight is that of the embedding."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.bias = nn.Parameter(torch.zeros(VOCABULARY))
        self.dropout = nn.Dropout(0.1)

    def forward(self, *stack: Tensor) -> Tensor:
        a, b, memory, _, targets, weights = stack
        h = self.dropout(a + b) + memory
        logits = nn.functional.linear(h, self.weight, self.bias)
        losses = nn.functional.cross_entropy(
            logits.transpose(1, 2), targets, reduction="none"
        )
        return (losses * weights).mean()


def build(seed: int = 0, tied: bool = True) -> tuple[Any, nn.Module]:
    """Two blocks and a loss with dropout, buffers, tied weights and side context."""
    torch.manual_seed(seed)
    weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH) / 3)
    head = weight if tied else nn.Parameter(torch.randn(VOCABULARY, WIDTH) / 3)
    first = [
        AdditiveCoupling(Masked(0.1), mlp()),
        HalfResidual(Cross(), n_context=2),
        Swap(),
        AdditiveCoupling(mlp(0.1), Masked(0.4)),
    ]
    second = [AdditiveCoupling(mlp(), Masked()), AdditiveCoupling(mlp(0.3), mlp())]
    blocks = [([Embed(weight)], first), ([Between()], second)]
    return blocks, Head(head)


def batch(seed: int, examples: int = 4, length: int = 3) -> tuple[Tensor, ...]:
    """Tokens, mask, targets and weights."""
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (examples, length), generator=g)
    targets = torch.randint(VOCABULARY, (examples, length), generator=g)
    mask = torch.rand(examples, length, generator=g) > 0.2
    return tokens, mask, targets, torch.rand(examples, length, generator=g)


def sm3(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch_sm3.SM3(params, lr=0.1, momentum=0.9)


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def make(kind: str, built: Any = None, optimizer: Any = sm3, **options: Any) -> Any:
    """A trainer of a model: "reversible", or "store" for its equal."""
    blocks, loss = build() if built is None else built
    options.setdefault("side", SIDE)
    options.setdefault("exact", "sidecar")
    cls: Callable[..., Any] = (
        ReversibleTrainer if kind == "reversible" else Trainer.from_blocks
    )
    return cls(blocks, loss, optimizer, **options)


def tensors(value: Any) -> list[Tensor]:
    """All tensors in nested lists, tuples and dicts, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = [value[key] for key in sorted(value)]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in tensors(item)]
    return [torch.as_tensor(value)]


def state(trainer: Any) -> list[Tensor]:
    """Weights, buffers and slots of a trainer."""
    layers = [layer.module for layer in trainer._layers]
    values = [dict(module.state_dict()) for module in layers]
    return [t.detach().clone() for t in tensors([values, trainer.slots])]


def steps(
    trainer: Any,
    n: int = 3,
    rates: Sequence[float | None] = (None, 0.03, 0.07),
    **options: Any,
) -> list[Tensor]:
    """Train, and return all that an equal trainer must have equal."""
    torch.manual_seed(99)
    found: list[Tensor] = []
    for i in range(n):
        rate = rates[i % len(rates)]
        loss, stats = trainer.one_step(
            batch(i, **options), step=i + 1, learning_rate=rate
        )
        found += [loss, *tensors(stats)]
    return [*found, *state(trainer), torch.get_rng_state()]


def assert_equal(left: Sequence[Tensor], right: Sequence[Tensor]) -> None:
    """Compare bit for bit; NaN equals NaN."""
    assert len(left) == len(right)
    for i, (a, b) in enumerate(zip(left, right, strict=True)):
        assert a.dtype == b.dtype and a.shape == b.shape, i
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
