# SPDX-License-Identifier: Apache-2.0
"""Small models cut into stages, and the run of one process that they must equal."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional


class Embed(nn.Module):
    """Return two streams and the tokens' parity: a tuple of mixed dtypes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, width)
        self.linear = nn.Linear(width, width)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = self.embedding(tokens)
        return first * 2, torch.tanh(self.linear(first)), tokens % 2


class Mix(nn.Module):
    """Change the first stream in place, as a stage may, and pass the parity on."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(
        self, a: torch.Tensor, b: torch.Tensor, parity: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        a.add_(torch.tanh(self.linear(b)))
        return a, b * parity.unsqueeze(-1), parity


class Head(nn.Module):
    """Turn the two streams into logits; one weight is used twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.out = nn.Linear(width, 17)

    def forward(
        self, a: torch.Tensor, b: torch.Tensor, parity: torch.Tensor
    ) -> torch.Tensor:
        return self.out(self.linear(torch.tanh(self.linear(a))) + b)


class Whole(nn.Module):
    """Embed, mix and predict: the model on one rank."""

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        value: Any = (tokens,)
        for part in self.parts:
            value = part(*value)
        return value


def make_stages(count: int, width: int = 8) -> list[nn.Module]:
    """Return the same model, equal bits each time, in ``count`` stages."""
    torch.manual_seed(7)
    parts: list[nn.Module] = [Embed(width), Mix(width), Head(width)]
    if count == 1:
        return [Whole(parts)]
    if count == 2:
        # The second stage is mix and head together.
        return [parts[0], Tail(parts[1:])]
    return [parts[0], *(parts[1:] if count == 3 else [Mix(width), *parts[1:]])]


class Tail(nn.Module):
    """Run several parts one after the other."""

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, *value: torch.Tensor) -> Any:
        for part in self.parts:
            value = part(*value)
        return value


def loss_fn(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy over all positions."""
    return functional.cross_entropy(logits.flatten(0, -2), target.flatten())


def make_batch(size: int, length: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and targets, the same on every rank."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(17, (size, length), generator=generator)
    return tokens, torch.randint(17, (size, length), generator=generator)


def single_process(
    stages: list[nn.Module],
    tokens: torch.Tensor,
    target: torch.Tensor,
    microbatches: int,
    weights: list[float] | None = None,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Add the gradients of each microbatch up in one process, by plain autograd.

    Args:
        stages: the model.
        tokens: inputs.
        target: targets.
        microbatches: into how many parts the batch is cut.
        weights: factor of each part's loss, 1/m if None.

    Returns:
        The loss and that of each part; gradients are left in ``.grad``.
    """
    weights = weights or [1.0 / microbatches] * microbatches
    losses = []
    cuts = zip(
        tokens.tensor_split(microbatches),
        target.tensor_split(microbatches),
        strict=True,
    )
    for weight, (part, wanted) in zip(weights, cuts, strict=True):
        value: Any = (part,)
        for stage in stages:
            value = stage(*value)
        loss = loss_fn(value, wanted)
        (loss * weight).backward()
        losses.append(loss.detach())
    total = torch.zeros(())
    for loss, weight in zip(losses, weights, strict=True):
        total = total + loss * weight
    return total, losses
