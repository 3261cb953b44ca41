# SPDX-License-Identifier: Apache-2.0
"""A list of layers as blocks and a loss, also with a loss by chunks."""

import pytest
import torch
from helpers.memory_meter import memory_meter
from helpers.trainer_models import assert_equal, mlp, state
from torch import nn

from torch_sm3.reversible import AdditiveCoupling, ReversibleSequence, Select, Swap
from torch_sm3.trainer import (
    CrossEntropy,
    ReversibleTrainer,
    Trainer,
    WeightedMean,
    extract_reversible_blocks,
)

WIDTH, CLASSES = 8, 7


class Embed(nn.Embedding):
    def forward(self, tokens):
        h = super().forward(tokens)
        return h, h


class Mix(nn.Module):
    """Two streams to one."""

    n_in = 2
    loss_border = True

    def forward(self, a, b):
        return a + b


def coupling():
    return AdditiveCoupling(mlp(0), mlp(0))


def ending(bias=True):
    return [
        nn.LayerNorm(WIDTH),
        nn.Dropout(0.2),
        nn.Linear(WIDTH, CLASSES, bias=bias),
        nn.LogSoftmax(-1),
        CrossEntropy(),
        WeightedMean(),
    ]


def test_layers_are_flattened_and_split():
    linear, swap = nn.Linear(2, 2), Swap()
    a, b, c = coupling(), coupling(), coupling()
    layers = [
        nn.Sequential(linear, nn.ReLU()),
        [a, ReversibleSequence(b, swap)],
        (nn.Tanh(),),
        c,
        [nn.Linear(2, 2), [nn.L1Loss()]],
    ]
    blocks, loss = extract_reversible_blocks(layers)
    assert [(len(s), len(r)) for s, r in blocks] == [(2, 3), (1, 1)]
    assert blocks[0][1] == [a, b, swap] and blocks[1][1] == [c]
    assert [type(m).__name__ for m in loss.layers] == ["Linear", "L1Loss"]
    blocks, loss = extract_reversible_blocks([a, linear])
    assert blocks == [([], [a])] and loss is linear
    assert extract_reversible_blocks([linear]) == ([], linear)


@pytest.mark.parametrize(
    ("layers", "size", "text"),
    [
        ([], 0, "expected layers, but got none"),
        ([[], nn.Sequential()], 0, "expected layers, but got none"),
        ([nn.ReLU(), Swap()], 0, "to be a loss, but got the reversible Swap"),
        ([nn.ReLU()], -1, "or 0, but got -1"),
        (ending(), 3, "expected a border of the loss.*LayerNorm, Dropout"),
        ([Mix(), *ending()[3:]], 3, "at least 4 layers after.*got 3 .LogSoftmax"),
        (
            [Mix(), *ending()[:-1], nn.L1Loss()],
            3,
            "LogSoftmax, CrossEntropy, WeightedMean, but got .*CrossEntropy, L1Loss",
        ),
        ([Mix(), *ending()[:3], nn.Softmax(-1), *ending()[4:]], 3, "but got Softmax"),
    ],
)
def test_bad_models_are_refused(layers, size, text):
    with pytest.raises(ValueError, match=text):
        extract_reversible_blocks(layers, size)


def test_what_is_no_module_is_refused():
    with pytest.raises(TypeError, match="expected modules, but got int"):
        extract_reversible_blocks([nn.ReLU(), 3])


def model(border):
    torch.manual_seed(0)
    # The last Select before CrossEntropy counts, not one that is nearer to the end.
    return [
        Embed(11, WIDTH),
        [Swap(), coupling(), coupling()],
        [Mix()] if border == "class" else [nn.Identity(), coupling(), Select([0, 1])],
        *ending(),
    ]


def data(seed=0):
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(11, (3, 5), generator=g)
    targets = torch.randint(CLASSES, (3, 5), generator=g)
    return tokens, targets, torch.rand(3, 5, generator=g)


class Take(nn.Module):
    """Drops the second stream before the loss."""

    n_in = 2

    def forward(self, a, b):
        return a


def made(kind, size, layers):
    blocks, loss = extract_reversible_blocks(layers, size)
    cls = ReversibleTrainer if kind == "reversible" else Trainer.from_blocks
    return cls(
        blocks,
        loss,
        lambda p: torch.optim.SGD(p, lr=0.5),
        exact="sidecar",
    )


def eval_dropout(layers):
    for layer in layers:
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    return layers


@pytest.mark.parametrize("kind", ["reversible", "store"])
@pytest.mark.parametrize("size", [1, 4, 15, 100])
def test_chunks_do_not_change_the_loss(kind, size):
    whole = made(kind, 0, eval_dropout(model("class")))
    chunked = made(kind, size, eval_dropout(model("class")))
    for step in range(2):
        found = [t.one_step(data(step), rng=0)[0] for t in (whole, chunked)]
        torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=0)
        for a, b in zip(weights(whole), weights(chunked), strict=True):
            torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)
    found = [t.eval_step(data(9))[0] for t in (whole, chunked)]
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=0)


def weights(trainer):
    return [p.detach() for layer in trainer._layers for p in layer.owned]


def test_chunks_with_dropout_are_replayed():
    """Both trainers agree, with two passes over the loss."""
    found = []
    for kind in ("reversible", "store"):
        blocks, loss = extract_reversible_blocks(model("class"), 4)
        cls = ReversibleTrainer if kind == "reversible" else Trainer.from_blocks
        trainer = cls(
            blocks,
            loss,
            lambda p: torch.optim.SGD(p, lr=0.5),
            exact="sidecar",
            clip_grad_norm=0.01,
            n_microbatches=2,
        )
        losses = [trainer.one_step(data(i), rng=i)[0] for i in range(3)]
        found.append([*losses, *state(trainer)])
    assert_equal(*found)


def test_a_select_is_a_border():
    layers = model("select")
    layers.insert(3, Take())
    blocks, loss = extract_reversible_blocks(layers, 4)
    assert isinstance(blocks[-1][1][-1], Select)
    names = [type(layer).__name__ for layer in loss.layers]
    assert names == ["ChunkedRows", "WeightedMean"]
    chunked = loss.layers[0]
    assert chunked.n_in == 3


def test_gradients_of_a_chunked_loss_are_those_of_the_whole():
    torch.manual_seed(0)
    *_, norm, _, linear, log, entropy, mean = model("class")
    _, loss = extract_reversible_blocks([Mix(), norm, linear, log, entropy, mean], 4)
    chunked = loss.layers[1]
    x = torch.randn(3, 5, WIDTH, requires_grad=True)
    _, targets, row_weights = data()
    parameters = [x, *norm.parameters(), *linear.parameters()]
    row_losses = chunked(x, targets)
    found = torch.autograd.grad(mean(row_losses, row_weights), parameters)
    plain = entropy(log(linear(norm(x))), targets)
    expected = torch.autograd.grad(mean(plain, row_weights), parameters)
    torch.testing.assert_close(row_losses, plain)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    with pytest.raises(NotImplementedError, match="create_graph=True"):
        torch.autograd.grad(
            mean(chunked(x, targets), row_weights), x, create_graph=True
        )


def test_rows_must_share_their_leading_shape():
    _, loss = extract_reversible_blocks([Mix(), *ending()], 4)
    with pytest.raises(ValueError, match=r"leading shape \(3, 5\).*got \(3, 4\)"):
        loss.layers[1](torch.ones(3, 5, WIDTH), torch.ones(3, 4).long())


def test_losses_are_their_formulas():
    log_p = torch.randn(4, 6, dtype=torch.float64).log_softmax(-1)
    targets = torch.tensor([0, 5, 2, 2])
    row_weights = torch.tensor([1.0, 0.0, 2.0, 1.0])
    rows = CrossEntropy()(log_p, targets)
    expected = torch.tensor([-log_p[i, t] for i, t in enumerate(targets.tolist())])
    torch.testing.assert_close(rows, expected.double())
    torch.testing.assert_close(
        WeightedMean()(rows, row_weights),
        nn.functional.nll_loss(log_p[[0, 2, 2, 3]], targets[[0, 2, 2, 3]]),
    )
    assert WeightedMean()(rows, torch.zeros(4)) == 0


def test_logits_exist_for_one_chunk_at_a_time():
    torch.manual_seed(0)
    classes, rows = 2000, 256
    linear = nn.Linear(WIDTH, classes)
    layers = [Mix(), linear, nn.LogSoftmax(-1), CrossEntropy(), WeightedMean()]
    peaks = []
    for size in (0, 16):
        _, loss = extract_reversible_blocks(layers, size)
        x = torch.randn(1, rows, WIDTH, requires_grad=True)
        targets = torch.randint(classes, (1, rows))
        stack = (x, x, targets, torch.ones(1, rows))
        loss(*stack)[0].backward()
        linear.weight.grad = linear.bias.grad = x.grad = None
        with memory_meter() as read:
            loss(*stack)[0].backward()
        peaks.append(read.peak)
    logits = rows * classes * 4
    assert peaks[0] > 2 * logits and peaks[1] < logits / 3
