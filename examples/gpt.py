# SPDX-License-Identifier: Apache-2.0
"""A small GPT whose blocks keep, recompute or reverse their activations.

The three kinds share the sublayers below and so have the same parameters:

- ``plain``: the usual pre-norm residual block; autograd keeps every activation.
- ``checkpoint``: the same block; autograd keeps its input and recomputes the rest.
- ``reversible``: two residual streams, ``y1 = x1 + attention(x2)`` and
  ``y2 = x2 + mlp(y1)``; the inputs are computed back from the outputs, so nothing
  but the last pair is kept. Both streams start as the embedding and are averaged
  at the end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torch_sm3.reversible import AdditiveCoupling, ReversibleSequence

BLOCKS = ("reversible", "plain", "checkpoint")


@dataclass(frozen=True)
class Shape:
    """What a model is built from."""

    vocabulary: int
    width: int
    depth: int
    heads: int
    context: int
    blocks: str

    def __post_init__(self) -> None:
        if self.blocks not in BLOCKS:
            raise ValueError(
                f"gpt: expected one of {BLOCKS}, but got {self.blocks!r} "
                "(argument '--blocks')"
            )
        if self.width % self.heads:
            raise ValueError(
                f"gpt: expected a multiple of {self.heads} heads, but got "
                f"{self.width} (argument '--width')"
            )


def alibi(heads: int, context: int) -> Tensor:
    """Return what attention adds to its scores, (heads, context, context).

    Minus infinity hides later tokens; earlier ones lose in proportion to their
    distance, at a rate of each head's own (Press et al., arXiv 2108.12409). It stands
    in for position embeddings and needs no training, so a model that trains for a
    minute sees its nearest neighbours from the first step.
    """
    place = torch.arange(context)
    distance = (place[:, None] - place[None, :]).float()
    slopes = 2.0 ** torch.linspace(1, -5, heads)
    bias = -slopes[:, None, None] * distance
    return bias.masked_fill(distance < 0, -math.inf)


class Attention(nn.Module):
    """Normalises and lets each token attend to itself and those before it."""

    def __init__(self, width: int, bias: Tensor) -> None:
        super().__init__()
        self.heads = bias.shape[0]
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, tokens, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, self.bias[:, :tokens, :tokens])
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))


class MLP(nn.Module):
    """Normalises and transforms each token on its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        return self.down(F.gelu(self.up(self.norm(x))))


class ResidualBlock(nn.Module):
    """The usual transformer block, optionally checkpointed."""

    def __init__(self, attention: nn.Module, mlp: nn.Module, recompute: bool) -> None:
        super().__init__()
        self.attention, self.mlp, self.recompute = attention, mlp, recompute

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        if self.recompute and torch.is_grad_enabled():
            result: Tensor = checkpoint(self.both, x, use_reentrant=False)
            return result
        return self.both(x)

    def both(self, x: Tensor) -> Tensor:
        """Run the two sublayers."""
        x = x + self.attention(x)
        return x + self.mlp(x)


class ReversibleBlocks(nn.Module):
    """A run of reversible blocks from one tensor to one tensor.

    Between two pipeline stages both streams travel side by side in one tensor, so
    that a stage has one input and one output whatever its blocks are.
    """

    def __init__(self, blocks: list[AdditiveCoupling], first: bool, last: bool) -> None:
        super().__init__()
        self.sequence = ReversibleSequence(*blocks)
        self.first, self.last = first, last

    def forward(self, x: Tensor) -> Tensor:
        """Split the streams, run the blocks, and join or average the streams."""
        x1, x2 = (x, x) if self.first else x.chunk(2, dim=-1)
        y1, y2 = self.sequence(x1, x2)
        return (y1 + y2) * 0.5 if self.last else torch.cat((y1, y2), dim=-1)


class Head(nn.Module):
    """Turns the last activations into one logit for each character."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape.width)
        self.out = nn.Linear(shape.width, shape.vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, width) to (batch, tokens, vocabulary)."""
        return self.out(self.norm(x))


class GPT(nn.Module):
    """The model, or the pipeline stages of one rank.

    Args:
        shape: sizes and kind of blocks.
        stages: number of runs that the blocks are cut into.
    """

    def __init__(self, shape: Shape, stages: int = 1) -> None:
        super().__init__()
        if not 1 <= stages <= shape.depth:
            raise ValueError(
                f"gpt: expected at least one block for each of {stages} stages, but "
                f"got {shape.depth} (argument '--depth')"
            )
        self.shape = shape
        self.last = stages - 1
        # Shared by all layers and no buffer: it is neither trained nor broadcast.
        self.bias = alibi(shape.heads, shape.context)
        self.embedding: nn.Embedding | None = nn.Embedding(
            shape.vocabulary, shape.width
        )
        self.head: Head | None = Head(shape)
        cuts = [shape.depth * i // stages for i in range(stages + 1)]
        self.runs = nn.ModuleDict()
        for i in range(stages):
            sublayers = [
                (Attention(shape.width, self.bias), MLP(shape.width))
                for _ in range(cuts[i + 1] - cuts[i])
            ]
            run = make_run(shape.blocks, sublayers, i == 0, i == stages - 1)
            self.runs[str(i)] = run
        initialise(self, shape.depth)

    def keep_stages(self, *indices: int) -> GPT:
        """Drop all other stages, in place; the names of the parameters stay."""
        if 0 not in indices:
            self.embedding = None
        if self.last not in indices:
            self.head = None
        for name in list(self.runs):
            if int(name) not in indices:
                del self.runs[name]
        return self

    def stage(self, index: int) -> Part:
        """Return one stage, whose parameters stay those of this model."""
        return Part(
            self.embedding if index == 0 else None,
            self.runs[str(index)],
            self.head if index == self.last else None,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens) to logits."""
        if self.embedding is not None:
            x = self.embedding(x)
        for run in self.runs.values():
            x = run(x)
        return x if self.head is None else self.head(x)


class Part(nn.Module):
    """One stage: a run of blocks, the embedding before the first, the head at last."""

    def __init__(
        self, embedding: nn.Embedding | None, run: nn.Module, head: Head | None
    ) -> None:
        super().__init__()
        self.embedding, self.run, self.head = embedding, run, head

    def forward(self, x: Tensor) -> Tensor:
        """Map what the stage gets to what it sends, at last to logits."""
        if self.embedding is not None:
            x = self.embedding(x)
        x = self.run(x)
        return x if self.head is None else self.head(x)


def make_run(
    kind: str, sublayers: list[tuple[Attention, MLP]], first: bool, last: bool
) -> nn.Module:
    """Join sublayers into blocks and blocks into a map from one tensor to one."""
    if kind == "reversible":
        couplings = [AdditiveCoupling(f, g) for f, g in sublayers]
        return ReversibleBlocks(couplings, first, last)
    recompute = kind == "checkpoint"
    return nn.Sequential(*(ResidualBlock(f, g, recompute) for f, g in sublayers))


def initialise(model: nn.Module, depth: int) -> None:
    """Set the weights so that the residual streams keep their size at any depth."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.5)
        elif isinstance(module, nn.Linear):
            std = 1 / math.sqrt(module.in_features)
            if name.endswith((".out", ".down")):
                std /= math.sqrt(2 * depth)
            nn.init.normal_(module.weight, std=std)
            nn.init.zeros_(module.bias)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy in nats per character."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def sample(
    model: nn.Module, start: Tensor, count: int, context: int, temperature: float
) -> Tensor:
    """Continue a text by drawing from the model, with a seed of its own.

    Args:
        model: maps (1, tokens) to (1, tokens, vocabulary).
        start: the numbers to begin with.
        count: how many to draw.
        context: how far back the model sees.
        temperature: below 1 favours likely characters.

    Returns:
        ``start`` and the drawn numbers.
    """
    generator = torch.Generator().manual_seed(0)
    ids = start.long()
    for _ in range(count):
        logits = model(ids[None, -context:])[0, -1] / temperature
        drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        ids = torch.cat((ids, drawn))
    return ids
