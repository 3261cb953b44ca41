# SPDX-License-Identifier: Apache-2.0
"""The model of the main job: equal parameters, equal gradients, and its cuts."""

import itertools

import gpt
import pytest
import torch


def shape(blocks: str, **changed: int) -> gpt.Shape:
    sizes = {"vocabulary": 11, "width": 16, "depth": 4, "heads": 2, "context": 8}
    return gpt.Shape(**{**sizes, **changed}, blocks=blocks)


def build(blocks: str, stages: int = 1, **changed: int) -> gpt.GPT:
    torch.manual_seed(1)
    return gpt.GPT(shape(blocks, **changed), stages)


def loss_and_gradients(model: gpt.GPT) -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    tokens, targets = torch.randint(11, (2, 3, 8), generator=generator)
    loss = gpt.loss_of(model(tokens), targets)
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()]


def test_kinds_have_the_same_parameters():
    sizes = {
        blocks: sorted(tuple(p.shape) for p in build(blocks).parameters())
        for blocks in gpt.BLOCKS
    }
    assert sizes["plain"] == sizes["checkpoint"] == sizes["reversible"]


def test_checkpoint_has_the_bits_of_plain():
    plain = loss_and_gradients(build("plain"))
    again = loss_and_gradients(build("checkpoint"))
    assert torch.equal(plain[0], again[0])
    assert all(map(torch.equal, plain[1], again[1]))


def test_reversible_has_the_gradients_of_its_formula():
    model = build("reversible").double()
    loss, gradients = loss_and_gradients(model)
    twin = build("plain").double()
    # The reversible model in plain autograd, over the twin's equal sublayers.
    blocks = [(block.attention, block.mlp) for block in twin.runs["0"]]

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        x1 = x2 = twin.embedding(tokens)
        for attention, mlp in blocks:
            x1 = x1 + attention(x2)
            x2 = x2 + mlp(x1)
        return twin.head((x1 + x2) * 0.5)

    twin.forward = forward
    expected_loss, expected = loss_and_gradients(twin)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=0)
    for gradient, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("blocks, stages", list(itertools.product(gpt.BLOCKS, (2, 3))))
def test_stages_make_up_the_model(blocks: str, stages: int):
    tokens = torch.randint(11, (2, 8))
    whole = build(blocks, stages)
    x: torch.Tensor = tokens
    merged: dict[str, torch.Tensor] = {}
    for index in range(stages):
        own = build(blocks, stages).keep_stages(index)
        x = own.stage(index)(x)
        merged |= own.state_dict()
    assert torch.equal(x, whole(tokens))
    assert torch.equal(x, build(blocks)(tokens))
    whole.load_state_dict(merged)


def test_a_rank_may_keep_several_stages():
    own = build("plain", 3).keep_stages(0, 2)
    first, last = own.stage(0), own.stage(2)
    assert first.head is None and last.embedding is None
    known = {id(p) for p in own.parameters()}
    assert {id(p) for s in (first, last) for p in s.parameters()} == known
    assert {name.split(".")[1] for name, _ in own.runs.named_parameters("runs")} == {
        "0",
        "2",
    }


def test_a_token_does_not_see_later_ones():
    model = build("reversible")
    tokens = torch.randint(11, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (tokens[0, 5] + 1) % 11
    before, after = model(tokens), model(changed)
    assert torch.equal(before[0, :5], after[0, :5])
    assert not torch.equal(before[0, 5:], after[0, 5:])


def test_first_loss_is_near_that_of_guessing():
    loss, _ = loss_and_gradients(build("reversible"))
    assert abs(loss.item() - torch.tensor(11.0).log().item()) < 0.5


def test_sample_is_repeatable_and_continues_the_start():
    model = build("reversible")
    start = torch.tensor([1, 2, 3], dtype=torch.uint8)
    drawn = [gpt.sample(model, start, 20, 8, temperature=0.8) for _ in range(2)]
    assert torch.equal(*drawn)
    assert drawn[0][:3].tolist() == [1, 2, 3] and len(drawn[0]) == 23


@pytest.mark.parametrize(
    "blocks, changed, message",
    [
        ("other", {}, "expected one of .* but got 'other' .*'--blocks'"),
        ("plain", {"heads": 3}, "multiple of 3 heads, but got 16 .*'--width'"),
    ],
)
def test_shape_is_checked(blocks, changed, message):
    with pytest.raises(ValueError, match=message):
        shape(blocks, **changed)


def test_more_stages_than_blocks_are_refused():
    with pytest.raises(ValueError, match="each of 5 stages, but got 4"):
        build("plain", stages=5)
