# SPDX-License-Identifier: Apache-2.0
"""Ways to train the GPT of the examples: ours, and those that it is compared with."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torch_sm3
from torch_sm3.trainer import ReversibleTrainer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from gpt import GPT, Shape

OURS = "reversible, SM3 in backward"
TRAINER = "ReversibleTrainer, SM3"
ADAMW = "plain, AdamW"
ADAFACTOR = "checkpoint, Adafactor"
EAGER = "checkpoint, Adafactor in backward"

HEADS, CONTEXT, VOCABULARY = 4, 128, 256

Parameters = list[nn.Parameter]
Step = Callable[[Tensor], Tensor]


class AdafactorInBackward:
    """Steps each parameter by an Adafactor of its own as soon as its gradient exists.

    The recipe of torch's tutorial on optimizer steps in the backward pass.
    """

    def __init__(self, parameters: Parameters) -> None:
        for parameter in parameters:
            optimizer = torch.optim.Adafactor([parameter], lr=1e-2, foreach=False)

            def after(_: Tensor, own: torch.optim.Optimizer = optimizer) -> None:
                own.step()
                own.zero_grad()

            parameter.register_post_accumulate_grad_hook(after)

    def step(self) -> None:
        """Do nothing: all is done."""

    def zero_grad(self) -> None:
        """Do nothing: all is done."""


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean loss of predicting the tokens."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def loop(model: GPT, optimizer: Any) -> Step:
    """Return an ordinary step."""

    def step(tokens: Tensor) -> Tensor:
        loss = loss_of(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


class Streams(nn.Module):
    """Tokens to two equal streams."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.embedding = model.embedding

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Embed the tokens."""
        assert self.embedding is not None
        x = self.embedding(tokens)
        return x, x


class Loss(nn.Module):
    """Both streams and the tokens to a loss."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.head = model.head

    def forward(self, y1: Tensor, y2: Tensor, tokens: Tensor) -> Tensor:
        """Predict the tokens from the mean of the streams."""
        assert self.head is not None
        return loss_of(self.head((y1 + y2) * 0.5), tokens)


def trainer(model: GPT) -> Step:
    """Return a step of the trainer, with SM3, on a GPT of one run of blocks."""
    (run,) = model.runs.values()
    blocks = [([Streams(model)], list(run.sequence))]  # type: ignore[arg-type]
    made = ReversibleTrainer(
        blocks, Loss(model), lambda ps: torch_sm3.SM3(ps, lr=0.005)
    )
    return lambda tokens: made.one_step((tokens, tokens))[0]


@dataclass(frozen=True)
class Way:
    """Kind of blocks, what trains them, and what ours must reach of its parameters."""

    blocks: str
    step: Callable[[GPT], Step]
    least: float | None = None


def by(blocks: str, make: Callable[[Parameters], Any], least: float | None) -> Way:
    """Return an ordinary loop with the given optimizer."""
    return Way(blocks, lambda model: loop(model, make(list(model.parameters()))), least)


WAYS = {
    OURS: by("reversible", lambda ps: torch_sm3.SM3InBackward(ps, lr=0.005), None),
    TRAINER: Way("reversible", trainer),
    ADAMW: by("plain", lambda ps: torch.optim.AdamW(ps, lr=1e-3, fused=True), 4.0),
    ADAFACTOR: by(
        "checkpoint", lambda ps: torch.optim.Adafactor(ps, lr=1e-2, foreach=False), 1.5
    ),
    EAGER: by("checkpoint", AdafactorInBackward, None),
}


def model_of(way: Way, width: int, depth: int) -> GPT:
    """Return a model, the same one at every call."""
    torch.manual_seed(0)
    return GPT(Shape(VOCABULARY, width, depth, HEADS, CONTEXT, way.blocks))
