# SPDX-License-Identifier: Apache-2.0
"""Every kind of reversible block in the trainers."""

import pytest
import torch
from helpers.trainer_models import WIDTH, assert_equal, mlp, sm3, state, tensors
from torch import nn

from torch_sm3.reversible import (
    AdditiveCoupling,
    AffineCoupling,
    Block,
    ConcatenatePair,
    GroupCoupling,
    HalfResidual,
    MomentumCoupling,
    Select,
    SelfAttention,
    Swap,
)
from torch_sm3.trainer import ReversibleTrainer, Trainer


class Streams(nn.Linear):
    """One item to several streams."""

    def __init__(self, count=2):
        super().__init__(4, WIDTH)
        self.count = count

    def forward(self, x):
        h = super().forward(x)
        return tuple(h + i for i in range(self.count))


class Total(nn.Module):
    """A loss of all streams and aux outputs."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, *stack):
        found = sum((x.float().sin() * self.scale).mean() * (i + 1)
                    for i, x in enumerate(stack) if x.is_floating_point())  # fmt: skip
        return found


class Rotate(Block):
    """A block of the user's own, with a weight and dropout in it."""

    n_in = n_out = 2

    def __init__(self):
        super().__init__()
        self.angle = nn.Parameter(torch.tensor(0.3))
        self.inner = mlp(0.3)

    def forward(self, a, b):
        c, s = self.angle.cos(), self.angle.sin()
        a, b = c * a - s * b, s * a + c * b
        return a + self.inner(b), b

    def inverse(self, a, b):
        a = a - self.inner(b)
        c, s = self.angle.cos(), self.angle.sin()
        return c * a + s * b, c * b - s * a


class Twice(nn.Module):
    """Scale and shift of an affine coupling."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(mlp(0.1), nn.Linear(WIDTH, 2 * WIDTH))

    def forward(self, x):
        return self.inner(x)


def attention(**options):
    return SelfAttention(WIDTH, 2, 4, 4, causal=True, attention_dropout=0.2, **options)


MODELS = {
    "affine with aux": lambda: (
        [
            AffineCoupling(Twice(), Twice(), with_logdet=True),
            AdditiveCoupling(mlp(), mlp()),
            AffineCoupling(Twice(), Twice(), with_logdet=True),
        ],
        2,
    ),
    "momentum": lambda: ([MomentumCoupling(mlp(), gamma=0.9) for _ in range(3)], 2),
    "three streams": lambda: (
        [GroupCoupling(mlp(), mlp(), mlp()), Select([2, 0, 1])] * 2,
        3,
    ),
    "custom": lambda: ([Rotate(), Swap(), Rotate()], 2),
    "attention": lambda: (
        [
            HalfResidual(nn.LayerNorm(WIDTH), attention=attention()),
            Swap(),
            HalfResidual(mlp()),
            Swap(),
        ]
        * 2,
        2,
    ),
    "duplicates": lambda: (
        [AdditiveCoupling(mlp(), mlp()), Select([0, 1, 0]), HalfResidual(mlp())],
        2,
    ),
    "concatenated": lambda: (
        [AdditiveCoupling(mlp(), mlp()), ConcatenatePair(), Wide()],
        2,
    ),
}


class Wide(HalfResidual):
    def __init__(self):
        super().__init__(nn.Linear(2 * WIDTH, 2 * WIDTH), nn.Dropout(0.2))


def made(cls, name, **options):
    torch.manual_seed(0)
    blocks, count = MODELS[name]()
    return cls([([Streams(count)], blocks)], Total(), sm3, exact="sidecar", **options)


@pytest.mark.parametrize("offload", ["none", "host"])
@pytest.mark.parametrize("name", MODELS)
def test_every_block_trains_as_when_stored(name, offload):
    options = {"n_microbatches": 2, "clip_grad_norm": 0.05}
    one = made(ReversibleTrainer, name, offload=offload, **options)
    other = made(Trainer.from_blocks, name, **options)
    torch.manual_seed(1)
    for step in range(3):
        x = torch.randn(4, 5, 4)
        results = [t.one_step(x, rng=step) for t in (one, other)]
        assert_equal(*(tensors([loss, stats]) for loss, stats in results))
        assert results[0][1].keys() == results[1][1].keys()
    assert_equal(*(state(t) for t in (one, other)))
    assert_equal(*([t.eval_step(x)[0]] for t in (one, other)))


@pytest.mark.parametrize("name", MODELS)
def test_every_block_has_a_contract(name):
    trainer = made(ReversibleTrainer, name)
    terms = trainer.memory_contract(torch.empty(4, 5, 4))
    assert terms["streams"] > 0 and terms["activations of a layer"] > 0
