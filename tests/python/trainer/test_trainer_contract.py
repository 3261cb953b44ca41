# SPDX-License-Identifier: Apache-2.0
"""The memory contract against what is allocated, and its command line."""

import gc
import json

import pytest
import torch
from helpers.memory_meter import memory_meter
from helpers.trainer_models import adamw, batch, build, make, sm3, tensors
from torch import nn

import torch_sm3
from torch_sm3 import estimate
from torch_sm3.reversible import AdditiveCoupling
from torch_sm3.trainer import ReversibleTrainer
from torch_sm3.trainer._contract import slot_bytes

SMALL = 64 << 20


class Streams(nn.Linear):
    def forward(self, x):
        h = super().forward(x)
        return h, h


class Loss(nn.Module):
    n_in = 2

    def forward(self, a, b):
        return (a + b).square().mean()


def mlp(width):
    return nn.Sequential(
        nn.LayerNorm(width),
        nn.Linear(width, 4 * width),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Linear(4 * width, width),
    )


def deep(width=64, depth=4, **options):
    torch.manual_seed(0)
    layers = [AdditiveCoupling(mlp(width), mlp(width)) for _ in range(depth)]
    blocks = [([Streams(width, width)], layers), ([Pair(width)], layers[:1])]
    return ReversibleTrainer(
        blocks, Loss(), lambda p: torch_sm3.SM3(p, lr=1e-4), **options
    )


class Pair(nn.Linear):
    n_in = 2

    def __init__(self, width):
        super().__init__(width, width)

    def forward(self, a, b):
        return super().forward(a), b


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"exact": "sidecar"},
        {"exact": "grid", "clip_grad_norm": 1.0},
        {"n_microbatches": 3},
        {"clip_grad_norm": 1.0, "n_microbatches": 2},
    ],
)
def test_a_step_stays_within_its_terms(options):
    """Beyond the 64 MiB for small things, which these models would hide behind."""
    made = deep(**options)
    x = torch.randn(3000, 64)
    for step in range(2):
        made.one_step(x, rng=step)
    gc.collect()
    with memory_meter() as read:
        made.one_step(x, rng=2)
    terms = made.memory_contract(torch.empty(3000, 64, device="meta"))
    bound = sum(terms.values()) - terms["small things"]
    # Weights, slots, buffers and the batch were there before.
    there = {"weights", "slots", "buffers", "side context and batch"}
    above = bound - sum(terms[name] for name in there)
    assert terms["small things"] == SMALL
    assert read.peak <= 1.1 * above + 200_000
    # The bound is not empty talk either.
    assert read.peak >= 0.5 * above
    assert made.overflows == {}


def test_offloading_leaves_one_layer_on_the_device():
    made = deep(depth=12, offload="host")
    terms = made.memory_contract(torch.empty(8, 64))
    largest = max(
        sum(p.nbytes for p in layer.parameters()) for layer in made.all_layers
    )
    assert terms["weights"] == 3 * largest
    assert terms["inputs of standard layers"] == 0
    free = deep(depth=12).memory_contract(torch.empty(8, 64))
    whole = {id(p): p.nbytes for layer in made.all_layers for p in layer.parameters()}
    assert free["weights"] == sum(whole.values())
    more = deep(depth=12, offload="host", n_prefetch_layers=3, n_async_layers=0)
    assert more.memory_contract(torch.empty(8, 64))["weights"] == 4 * largest


@pytest.mark.parametrize("optimizer", [sm3, adamw])
def test_slots_are_known_before_the_first_step(optimizer):
    made = make("reversible", built=build(), optimizer=optimizer)
    before = [slot_bytes(layer) for layer in made._layers]
    made.one_step(batch(0), rng=0)
    assert before == [slot_bytes(layer) for layer in made._layers]
    total = sum(t.nbytes for t in tensors(made.slots))
    assert made.memory_contract(batch(0))["slots"] == sum(before) == total


def test_side_context_dropout_and_tied_weights_are_followed():
    made = make("reversible", built=build(), n_microbatches=2)
    state = torch.get_rng_state()
    terms = made.memory_contract(batch(0))
    assert torch.equal(torch.get_rng_state(), state)
    assert terms["gradients of tied weights"] == 2 * 11 * 8 * 4
    assert terms["side context and batch"] == sum(t.nbytes for t in batch(0))
    # Two streams and the memory of two examples, of length 3.
    assert terms["streams"] == (2 * 2 * 3 * 8 + 2 * 8) * 4 * 5


def test_a_chunked_loss_needs_the_logits_of_one_chunk():
    options = estimate.parse(["--depth=1", "--width=48", "--vocabulary=5000"])
    whole = estimate.estimate(options)
    options.loss_chunk = 64
    chunked = estimate.estimate(options)
    rows = options.batch * options.length
    assert whole["activations of a layer"] > rows * 5000 * 4
    assert 10 * chunked["activations of a layer"] < whole["activations of a layer"]


def test_command_line(capsys):
    arguments = ["--depth=3", "--width=24", "--heads=2", "--length=16"]
    assert estimate.main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["total"] == sum(v for k, v in found.items() if k != "total")
    assert estimate.main([*arguments, "--offload=host", "--two-passes"]) == 0
    text = capsys.readouterr().out
    assert "streams" in text and text.splitlines()[-1].startswith("total")
    deeper = ["--depth=6", *arguments[1:], "--json"]
    assert estimate.main(deeper) == 0
    more = json.loads(capsys.readouterr().out)
    changed = {key for key in found if found[key] != more[key]}
    assert changed == {"weights", "slots", "total"}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--depth=0"], "expected at least 1, but got 0 (argument '--depth')"),
        (["--width=10", "--heads=4"], "a multiple of 4 heads, but got 10"),
        (["--dtype=int8"], "invalid choice: 'int8'"),
    ],
)
def test_bad_arguments(arguments, text, capsys):
    with pytest.raises(SystemExit):
        estimate.parse(arguments)
    assert text in capsys.readouterr().err
