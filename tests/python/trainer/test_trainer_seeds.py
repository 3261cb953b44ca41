# SPDX-License-Identifier: Apache-2.0
"""Seeds of ranks, layers and microbatches."""

import random

import pytest
import torch
from helpers.trainer_models import batch, build, make
from reference import trainer_oracle as oracle
from torch import nn

from torch_sm3.trainer import ReversibleTrainer, Trainer
from torch_sm3.trainer._seeds import draw, fold, philox, seeded


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [
        (0, 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (2**64 - 1, 2**128 - 1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            0x299F31D0A4093822,
            0x0370734413198A2E85A308D3243F6A88,
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_has_the_known_answers(key, counter, words):
    """Those of the paper's own library, Random123."""
    assert " ".join(f"{word:08x}" for word in philox(key, counter)) == words


def test_fold_is_the_oracles():
    rng = random.Random(0)
    for _ in range(50):
        seed, index = rng.getrandbits(64), rng.getrandbits(40)
        assert fold(seed, index) == oracle.fold(seed, index)
    assert fold(0, 0) == 0xE169C58D6627E8D5
    assert len({fold(3, i) for i in range(1000)}) == 1000


class Draws(nn.Module):
    """Notes the first number that it can draw."""

    n_in = 1

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))
        self.seen = []

    def forward(self, x):
        self.seen.append(torch.rand(()))
        return (x * self.w).mean() if x.dim() == 1 else x.mean(1) * self.w


def test_layers_and_microbatches_run_under_their_own_seeds():
    layers, loss = [Draws(), Draws()], Draws()
    blocks = [([layers[0]], []), ([nn.Identity()], []), ([nn.Identity()], [])]
    sgd = lambda p: torch.optim.SGD(p, lr=0.0)  # noqa: E731
    made = ReversibleTrainer(blocks, loss, sgd, n_microbatches=2)
    made.one_step(torch.ones(4, 2), rng=3)  # the first call runs a layer twice
    for module in (layers[0], loss):
        module.seen.clear()
    made.one_step(torch.ones(4, 2), rng=42)
    base = oracle.fold(42, 0)
    for module, index in ((layers[0], 0), (loss, 3)):
        for microbatch in (0, 1):
            torch.manual_seed(oracle.fold(oracle.fold(base, index), microbatch))
            assert torch.rand(()) == module.seen[microbatch]


def test_generators_are_restored_and_rng_takes_three_forms():
    made = make("reversible", built=build())
    torch.manual_seed(5)
    state = torch.get_rng_state()
    made.one_step(batch(0), rng=1)
    assert torch.equal(torch.get_rng_state(), state)
    made.one_step(batch(0), rng=torch.Generator().manual_seed(3))
    assert torch.equal(torch.get_rng_state(), state)
    made.one_step(batch(0))
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    torch.empty((), dtype=torch.int64).random_()
    assert torch.equal(torch.get_rng_state(), after)


def test_a_generator_gives_one_draw():
    one, other = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    assert draw("op", one) == int(
        torch.empty((), dtype=torch.int64).random_(generator=other)
    )
    assert draw("op", -1) == 2**64 - 1


def test_generators_are_restored_after_an_error():
    state = torch.get_rng_state()
    with pytest.raises(KeyError), seeded(3, torch.device("cpu")):
        torch.rand(2)
        raise KeyError
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("rng", [1.5, "seed", True])
def test_other_seeds_are_refused(rng):
    model = nn.Sequential(nn.Linear(2, 1), nn.Flatten(0))
    made = Trainer(model, torch.optim.SGD(model.parameters()))
    with pytest.raises(TypeError, match=r"one_step: expected an int.*'rng'"):
        made.one_step(torch.ones(1, 2), rng=rng)
