# SPDX-License-Identifier: Apache-2.0
"""Random stacks of random blocks, for tests of properties that all of them have."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from helpers.reversible_models import OnceRotation, Rotation
from torch import Tensor, nn

from torch_sm3.reversible import (
    AdditiveCoupling,
    AffineCoupling,
    Block,
    ConcatenatePair,
    GroupCoupling,
    HalfResidual,
    MomentumCoupling,
    PrintShape,
    Reshape,
    Select,
    Split,
    Swap,
)

ROWS = 4
MEMORY = 3


class Mixer(nn.Module):
    """Maps items of several widths to one width, and keeps values small."""

    def __init__(self, widths: list[int], width: int, random: Random) -> None:
        super().__init__()
        self.linear = nn.ModuleList([nn.Linear(w, width) for w in widths])
        self.dropout = nn.Dropout(random.choice([0.0, 0.0, 0.4]))
        if random.random() < 0.3:
            for p in self.linear[0].parameters():
                p.requires_grad_(False)

    def forward(self, *items: Tensor) -> Tensor:
        total: Any = 0
        for layer, item in zip(self.linear, items, strict=True):
            total = total + layer(item)
        return 0.5 * torch.tanh(self.dropout(total))


class SideMixer(Mixer):
    """Also takes side context: a tensor in a dict, perhaps, and a number."""

    def __init__(self, widths: list[int], width: int, random: Random) -> None:
        super().__init__([*widths, MEMORY], width, random)

    def forward(self, *items: Tensor, memory: Any, scale: float = 1.0) -> Tensor:
        tensor = memory["deep"][0] if isinstance(memory, dict) else memory
        return super().forward(*items, tensor) * scale


class AuxMixer(Mixer):
    """Also returns aux outputs."""

    def forward(self, *items: Tensor) -> Any:
        value = super().forward(*items)
        return value, {"mean": value.mean(-1)}, value.argmax(-1)


@dataclass
class Case:
    """A random stack of blocks, what it is called with, and what is used of it."""

    blocks: list[Block] = field(default_factory=list)
    stack: list[Any] = field(default_factory=list)
    side: dict[str, Any] = field(default_factory=dict)
    #: Streams that the loss depends on, and whether aux outputs matter.
    used: list[int] = field(default_factory=list)
    uses_aux: bool = False
    plan: list[str] = field(default_factory=list)


class Builder:
    """Adds random blocks to a stack of known widths."""

    def __init__(self, random: Random, kinds: list[str]) -> None:
        self.random = random
        self.kinds = kinds
        self.widths = [random.choice([2, 4]) for _ in range(random.randint(2, 4))]
        self.blocks: list[Block] = []
        self.has_side = False

    def function(self, widths: list[int], width: int) -> nn.Module:
        with_side = self.random.random() < 0.25
        self.has_side |= with_side
        return (SideMixer if with_side else Mixer)(widths, width, self.random)

    def add(self) -> None:
        kinds = [kind for kind in self.kinds if getattr(self, f"fits_{kind}")()]
        getattr(self, f"add_{self.random.choice(kinds)}")()

    def level(self, count: int) -> bool:
        """Tell whether the first ``count`` items have one width."""
        return len(self.widths) >= count and len(set(self.widths[:count])) == 1

    def fits_half(self) -> bool:
        return True

    def add_half(self) -> None:
        n = self.random.randint(1, len(self.widths) - 1)
        widths = self.widths[1 : n + 1]
        if self.random.random() < 0.25:
            function = AuxMixer(widths, self.widths[0], self.random)
            self.blocks.append(HalfResidual(function, n_context=n, has_aux=True))
        else:
            function = self.function(widths, self.widths[0])
            self.blocks.append(HalfResidual(function, n_context=n))

    def fits_additive(self) -> bool:
        return True

    def add_additive(self) -> None:
        a, b = self.widths[:2]
        self.blocks.append(
            AdditiveCoupling(self.function([b], a), self.function([a], b))
        )

    def fits_affine(self) -> bool:
        return True

    def add_affine(self) -> None:
        a, b = self.widths[:2]
        f, g = self.function([b], 2 * a), self.function([a], 2 * b)
        self.blocks.append(AffineCoupling(f, g, with_logdet=self.random.random() < 0.3))

    def fits_momentum(self) -> bool:
        return self.level(2)

    def add_momentum(self) -> None:
        w = self.widths[0]
        gamma = self.random.choice([0.5, 0.9])
        self.blocks.append(MomentumCoupling(self.function([w], w), gamma))

    def fits_ring(self) -> bool:
        return self.level(2)

    def add_ring(self) -> None:
        w, n = self.widths[0], 2
        while n < len(self.widths) and self.level(n + 1):
            n += 1
        self.blocks.append(GroupCoupling(*[self.function([w], w) for _ in range(n)]))

    def fits_custom(self) -> bool:
        return self.level(3)

    def add_custom(self) -> None:
        kind = self.random.choice([Rotation, OnceRotation])
        block = kind(2)
        block.angle = Mixer(self.widths[:1], self.widths[0], self.random)
        self.blocks.append(block)

    def fits_select(self) -> bool:
        return True

    def add_select(self) -> None:
        n = len(self.widths)
        order = self.random.sample(range(n), n)
        if n < 5 and self.random.random() < 0.3:
            order.insert(self.random.randint(0, n), self.random.randrange(n))
        self.widths = [self.widths[i] for i in order]
        self.blocks.append(Select(order))

    def fits_move(self) -> bool:
        return True

    def add_move(self) -> None:
        prefix = (ROWS,), (2, ROWS // 2)
        pair = [Reshape(*prefix), PrintShape("", 1), Reshape(*prefix[::-1])]
        self.blocks += self.random.choice([pair, [Swap(), Swap()]])

    def fits_join(self) -> bool:
        return sum(self.widths[:2]) <= 8

    def add_join(self) -> None:
        self.widths[:2] = [sum(self.widths[:2])] * 2
        self.blocks.append(ConcatenatePair())

    def fits_split(self) -> bool:
        return self.widths[0] % 2 == 0 and len(self.widths) < 6

    def add_split(self) -> None:
        self.widths[:1] = [self.widths[0] // 2] * 2
        self.blocks.append(Split(-1))


ADDITIVE = ["half", "half", "additive", "ring", "select", "move", "join", "split"]
ALL = [*ADDITIVE, "affine", "momentum", "custom", "half"]
PLANS = ["reversible"] * 5 + ["checkpoint", "store", "remember"]


def random_case(
    seed: int, additive: bool, dtype: torch.dtype, joins: bool = True
) -> Case:
    """Make the case of a seed.

    Args:
        seed: decides everything.
        additive: blocks that a grid serves, only.
        dtype: of streams and weights.
        joins: whether items are joined.
    """
    random = Random(seed)
    torch.manual_seed(seed)
    kinds = ADDITIVE if additive else ALL
    builder = Builder(random, [kind for kind in kinds if joins or kind != "join"])
    widths = list(builder.widths)
    for _ in range(random.randint(1, 8)):
        builder.add()
    case = Case(builder.blocks)
    nn.ModuleList(case.blocks).to(dtype)
    for width in widths:
        item = torch.randn(ROWS, width, dtype=dtype)
        case.stack.append(item.requires_grad_(random.random() < 0.7))
    deep = random.choice([[], [torch.arange(3)], [None, "text"]])
    case.stack += deep
    if builder.has_side:
        memory = torch.randn(ROWS, MEMORY, dtype=dtype)
        memory.requires_grad_(random.random() < 0.7)
        case.side["memory"] = random.choice([memory, {"deep": [memory], "none": None}])
        if random.random() < 0.5:
            case.side["scale"] = 0.5
    count = len(builder.widths)
    case.used = sorted(random.sample(range(count), random.randint(1, count)))
    case.uses_aux = random.random() < 0.5
    case.plan = [random.choice(PLANS) for _ in case.blocks]
    return case
