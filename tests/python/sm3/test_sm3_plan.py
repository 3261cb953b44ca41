# SPDX-License-Identifier: Apache-2.0
"""Lists that are kept between steps are the lists that would be made anew."""

from __future__ import annotations

import contextlib
import copy
import random
import warnings

import pytest
import torch
from helpers.sm3_models import equal, snapshot

from torch_sm3 import SM3

SHAPES = [(), (5,), (2, 2), (3, 4), (4, 1, 6), (0, 3), (40, 120)]


class Pair:
    """Two optimizers that get the same events; the second forgets its lists."""

    def __init__(self, options: dict) -> None:
        torch.manual_seed(0)
        values = [torch.randn(shape) for shape in SHAPES]
        self.params = [
            [torch.nn.Parameter(value.clone()) for value in values] for _ in range(2)
        ]
        self.optimizers = [
            SM3([{"params": ps[:4]}, {"params": ps[4:], "lr": 0.3}], **options)
            for ps in self.params
        ]
        self.saved = [None, None]

    def step(self) -> None:
        self.optimizers[1]._plan = None
        for optimizer in self.optimizers:
            optimizer.step()

    # Events: what happens to optimizers between steps.

    def gradients(self, chance: random.Random) -> None:
        kinds = [chance.choice(["dense", "dense", "none", "sparse"]) for _ in SHAPES]
        for i, (kind, shape) in enumerate(zip(kinds, SHAPES, strict=True)):
            grad = torch.randn(shape)
            if kind == "sparse" and shape and 0 not in shape:
                grad = grad.to_sparse(1)
            for params in self.params:
                params[i].grad = None if kind == "none" else grad.clone()

    def freeze(self, chance: random.Random) -> None:
        which, value = chance.randrange(len(SHAPES)), chance.random() < 0.5
        for params in self.params:
            params[which].requires_grad_(value)

    def options(self, chance: random.Random) -> None:
        change = chance.choice(
            [
                {"lr": 0.01},
                {"momentum": 0.0},
                {"momentum": 0.9},
                {"foreach": True, "fused": None},
                {"foreach": None, "fused": None},
                {"foreach": None, "fused": False},
                {"maximize": True},
                {"variant": "I"},
            ]
        )
        group = chance.randrange(2)
        for optimizer in self.optimizers:
            optimizer.param_groups[group].update(change)

    def save(self, chance: random.Random) -> None:
        self.saved = [copy.deepcopy(o.state_dict()) for o in self.optimizers]

    def load(self, chance: random.Random) -> None:
        for optimizer, saved in zip(self.optimizers, self.saved, strict=True):
            # After a move it may not fit any more.
            with contextlib.suppress(ValueError):
                if saved is not None:
                    optimizer.load_state_dict(saved)

    def write(self, chance: random.Random) -> None:
        """Replace a state tensor, or write into it."""
        which, in_place = chance.randrange(len(SHAPES)), chance.random() < 0.5
        for optimizer, params in zip(self.optimizers, self.params, strict=True):
            state = optimizer.state.get(params[which])
            if state and in_place:
                state["accumulator_0"].fill_(2.0)
            elif state:
                state["accumulator_0"] = torch.full_like(state["accumulator_0"], 3.0)

    def forget(self, chance: random.Random) -> None:
        which = chance.randrange(len(SHAPES))
        for optimizer, params in zip(self.optimizers, self.params, strict=True):
            optimizer.state.pop(params[which], None)

    def move(self, chance: random.Random) -> None:
        """Hand a parameter to the other group, or swap two within one."""
        across = chance.random() < 0.5
        for optimizer in self.optimizers:
            first, second = (group["params"] for group in optimizer.param_groups)
            if across and len(first) > 1:
                second.append(first.pop())
            else:
                second[0], second[-1] = second[-1], second[0]

    def data(self, chance: random.Random) -> None:
        which = chance.randrange(len(SHAPES))
        value = torch.randn(SHAPES[which])
        for params in self.params:
            params[which].data = value.clone()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": 0.9, "momentum_dtype": torch.int8}, {"skip_nonfinite": True}],
    ids=str,
)
def test_kept_lists_are_never_old(options, seed) -> None:
    chance = random.Random(seed)
    pair = Pair(options)
    events = ["freeze", "options", "save", "load", "write", "forget", "move", "data"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(25):
            if chance.random() < 0.8:
                pair.gradients(chance)
            for _ in range(chance.choice([0, 0, 1, 2])):
                getattr(pair, chance.choice(events))(chance)
            pair.step()
            assert equal(*map(snapshot, pair.optimizers))


def test_lists_are_kept_from_step_to_step() -> None:
    pair = Pair({})
    pair.gradients(random.Random(2))
    optimizer = pair.optimizers[0]
    optimizer.step()
    optimizer.step()
    plan = optimizer._plan
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()
    assert optimizer._plan is plan
