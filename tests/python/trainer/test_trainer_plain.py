# SPDX-License-Identifier: Apache-2.0
"""Trainer against the step that everyone writes by hand."""

import pytest
import torch
from helpers.trainer_models import assert_equal, batch, build, make, sm3
from reference.trainer_oracle import fold, layered, plain_step
from torch import nn

from torch_sm3.trainer import Trainer

SEED = 12345


class Model(nn.Module):
    """A model of one piece with dropout and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(3, 16),
            nn.BatchNorm1d(16),
            nn.Dropout(0.3),
            nn.Linear(16, 1),
        )
        self.hot = False

    def forward(self, x, y):
        loss = (self.net(x).squeeze(-1) - y).square().mean()
        return loss * 1e38 if self.hot else loss


def data(i, examples=8):
    g = torch.Generator().manual_seed(i)
    x = torch.randn(examples, 3, generator=g)
    return x, torch.randn(examples, generator=g)


def scaler(on):
    return torch.amp.GradScaler("cpu", init_scale=1024.0) if on else None


@pytest.mark.parametrize("scales", [False, True])
@pytest.mark.parametrize("limit", [None, 0.05])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_trainer_is_the_plain_loop(n, limit, scales):
    theirs, mine = Model(), Model()
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=0.05)
    trainer = Trainer(
        mine,
        torch.optim.AdamW(mine.parameters(), lr=0.05),
        n_microbatches=n,
        clip_grad_norm=limit,
        grad_scaler=scaler(scales),
    )
    their_scaler = scaler(scales)

    def run(part, i):
        torch.manual_seed(fold(fold(fold(SEED + step, 0), 0), i))
        return theirs(*part)

    for step in range(4):
        theirs.hot = mine.hot = scales and step == 1
        before = [p.clone() for p in mine.parameters()]
        loss, stats = trainer.one_step(data(step), rng=SEED + step)
        expected = plain_step(
            run,
            data(step),
            list(theirs.parameters()),
            [optimizer],
            -(-8 // n),
            limit,
            their_scaler,
        )
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
        assert_equal(list(mine.state_dict().values()), [*theirs.state_dict().values()])
        moved = any(
            not torch.equal(a, b)
            for a, b in zip(before, mine.parameters(), strict=True)
        )
        assert moved == (not mine.hot)
        assert set(stats) == {"loss", "gradients_l2", "weights_l2", "learning_rate"}
    if scales:
        assert trainer._scaler.get_scale() == their_scaler.get_scale() == 512.0


@pytest.mark.parametrize("kind", ["store", "reversible"])
@pytest.mark.parametrize(
    ("n", "limit", "scales"),
    [(1, None, False), (3, None, False), (2, 0.02, False), (2, 0.02, True)],
)
def test_layers_are_the_plain_loop(kind, n, limit, scales):
    built = build()
    trainer = make(
        kind,
        exact="none",
        n_microbatches=n,
        clip_grad_norm=limit,
        grad_scaler=scaler(scales),
    )
    run, parameters, layers = layered(built, fold(SEED, 0))
    optimizer = make_optimizer(parameters)
    theirs = scaler(scales)
    trainer_layers = [layer.module for layer in trainer._layers]
    for _ in range(3):
        loss, _ = trainer.one_step(batch(0, 5), rng=SEED, learning_rate=0.05)
        expected = plain_step(
            run, batch(0, 5), parameters, [optimizer], -(-5 // n), limit, theirs
        )
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    for one, other in zip(trainer_layers, layers, strict=True):
        pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
        for a, b in pairs:
            torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


def make_optimizer(parameters):
    optimizer = sm3(parameters)
    optimizer.param_groups[0]["lr"] = 0.05
    return optimizer


@pytest.mark.parametrize("offload", ["none", "host"])
@pytest.mark.parametrize("strategy", ["two_pass", "host_grads"])
def test_reversible_row_24_update_in_backward_equals_the_plain_step(strategy, offload):
    """Two microbatches, a global clip that binds, a step that the scaler skips."""
    built = build()
    trainer = make(
        "reversible",
        n_microbatches=2,
        clip_grad_norm=0.02,
        clip_strategy=strategy,
        offload=offload,
        grad_scaler=scaler(True),
    )
    run, parameters, layers = layered(built, fold(SEED, 0))
    optimizer, theirs = make_optimizer(parameters), scaler(True)
    for step in range(4):
        tokens, mask, targets, weights = batch(step)
        if step == 1:
            weights = weights.fill_(3e38)
        whole = (tokens, mask, targets, weights)
        before = [p.detach().clone() for p in trainer._model.parameters]
        _, stats = trainer.one_step(whole, rng=SEED, learning_rate=0.05)
        plain_step(run, whole, parameters, [optimizer], 2, 0.02, theirs)
        after = trainer._model.parameters
        same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert same == (step == 1)
        for one, other in zip(trainer._model.modules, layers, strict=True):
            for a, b in zip(one.parameters(), other.parameters(), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        norms = [v for k, v in stats.items() if k.endswith("gradients_l2")]
        assert step == 1 or torch.linalg.vector_norm(torch.stack(norms)) > 0.02
    assert trainer._scaler.get_scale() == theirs.get_scale() == 512.0
