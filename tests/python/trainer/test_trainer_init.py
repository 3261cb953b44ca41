# SPDX-License-Identifier: Apache-2.0
"""Initialisation layer by layer against that of the whole model."""

import logging

import pytest
import torch
from helpers.trainer_models import assert_equal
from reference.trainer_oracle import fold
from torch import nn

from torch_sm3.reversible import AdditiveCoupling
from torch_sm3.trainer import init_reversible_blocks

SEED = 5
BATCH = (torch.empty(6, 4), torch.empty(6))


class Streams(nn.Linear):
    def forward(self, x):
        h = super().forward(x)
        return h, h


class Head(nn.Module):
    n_in = 3

    def __init__(self, weight=None):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.out = nn.Linear(8, 5)
        if weight is not None:
            self.out.weight = weight

    def forward(self, a, b, y):
        return self.out(self.norm(a + b)).square().mean()


def f():
    return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU())


def factories():
    def pair():
        return AdditiveCoupling(f(), f())

    first = ([lambda: Streams(4, 8)], [pair, pair])
    return [first, ([nn.Tanh, lambda: nn.Linear(8, 8)], [pair])], Head


def whole():
    """The model in one piece, each layer under its seed."""
    blocks, loss = factories()
    made, i = [], 0
    for standard, reversible in blocks:
        for layer in ([standard] if standard else []) + [[r] for r in reversible]:
            torch.manual_seed(fold(SEED, i))
            made += [source() for source in layer]
            i += 1
    torch.manual_seed(fold(SEED, i))
    return [*made, loss()]


def modules(result):
    blocks, loss = result
    return [m for block in blocks for part in block for m in part] + [loss]


def tensors(layers):
    return [t for m in layers for t in m.state_dict().values()]


def on_meta(source):
    with torch.device("meta"):
        return source()


@pytest.mark.parametrize("kind", ["factories", "meta"])
def test_bits_are_those_of_the_whole_model(kind):
    blocks, loss = factories()
    if kind == "meta":
        blocks = [
            ([on_meta(s) for s in standard], [on_meta(r) for r in reversible])
            for standard, reversible in blocks
        ]
        loss = on_meta(loss)
    state = torch.get_rng_state()
    result = init_reversible_blocks(blocks, loss, BATCH, SEED)
    assert torch.equal(torch.get_rng_state(), state)
    assert_equal(tensors(modules(result)), tensors(whole()))
    assert all(t.device.type == "cpu" for t in tensors(modules(result)))


def test_tied_meta_weights_stay_tied():
    with torch.device("meta"):
        embedding = nn.Linear(5, 8, bias=False)
        embedding.weight = nn.Parameter(torch.empty(5, 8))
        head = Head(embedding.weight)
        head.out.weight = embedding.weight
        embedding.forward = lambda x: (x[:, :1] * embedding.weight.sum(0), x[:, :1])
    blocks, loss = init_reversible_blocks([([embedding], [])], head, BATCH, SEED)
    assert blocks[0][0][0].weight is loss.out.weight
    assert not loss.out.weight.is_meta


def test_lazy_layers_take_their_shapes_from_the_signature():
    lazy = nn.LazyLinear(7, device="meta")
    first = [lambda: nn.LazyLinear(8), nn.Dropout(0.5), lazy]
    blocks, _ = init_reversible_blocks([(first, [])], nn.Flatten(0), BATCH[0], 0)
    assert [m.in_features for m in blocks[0][0] if isinstance(m, nn.Linear)] == [4, 8]
    assert blocks[0][0][0].training


def test_weights_that_are_there_stay():
    linear = nn.Linear(4, 8)
    before = linear.weight.clone()
    blocks, _ = init_reversible_blocks([([linear], [])], nn.Flatten(0), BATCH[0], 0)
    assert blocks[0][0][0] is linear and torch.equal(linear.weight, before)


def test_what_cannot_be_initialised_is_refused():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return x * self.scale

    with pytest.raises(ValueError, match="to have reset_parameters, but got Scale"):
        init_reversible_blocks(
            [([on_meta(Scale)], [])], nn.Flatten(0), torch.empty(2, 4), 0
        )
    with pytest.raises(TypeError, match="function that makes one, but got int"):
        init_reversible_blocks([([3], [])], nn.Flatten(0), torch.empty(2, 4), 0)
    with pytest.raises(RuntimeError, match="must have same reduction dim"):
        init_reversible_blocks(
            [([lambda: nn.Linear(9, 2)], [])], nn.Flatten(0), torch.empty(2, 4), 0
        )


def test_memory_is_logged(caplog):
    caplog.set_level(logging.INFO, "torch_sm3.trainer")
    blocks, loss = factories()
    init_reversible_blocks(blocks, loss, BATCH, SEED)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 6
    assert "layer 0 (Streams): 0.0 MB added, 0.0 MB in all" in lines[0]
