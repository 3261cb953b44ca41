# SPDX-License-Identifier: Apache-2.0
"""The split call of modules that do not have one of their own, and derived seeds."""

from __future__ import annotations

import pytest
import torch
from helpers.attention_checks import assert_same_result, generator_draws
from reference import philox_oracle
from torch import nn

from torch_sm3.reversible import SelfAttention
from torch_sm3.reversible._seeds import fold, philox, seed_tensor
from torch_sm3.reversible._split import draw_seed, forward_and_or_backward


class Attention(nn.Module):
    """An attention layer of the user's, with a mask and an argument of no tensor."""

    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 2, batch_first=True)
        self.gain = nn.Parameter(torch.tensor(0.7))

    def forward(self, x, mask, power):
        y, _ = self.inner(x, x, x, key_padding_mask=~mask, need_weights=False)
        return self.gain**power * y


def arguments():
    mask = torch.ones(2, 5).bool()
    mask[:, -2:] = False
    return torch.randn(2, 5, 4), mask, 3


@pytest.mark.parametrize("compute_output", [False, True])
def test_default_equals_autograd(compute_output):
    module, (x, mask, power) = Attention(), arguments()
    grad = torch.randn_like(x)
    output, state, inputs_grad, weights_grad = forward_and_or_backward(
        module, (x, mask, power), output_grad=grad, compute_output=compute_output
    )
    leaf = x.clone().requires_grad_()
    want = module(leaf, mask, power)
    want.backward(grad)
    assert (output is not None) == compute_output and state == ()
    if compute_output:
        assert torch.equal(output, want) and not output.requires_grad
    assert torch.equal(inputs_grad[0], leaf.grad) and inputs_grad[1:] == (None, None)
    for got, parameter in zip(weights_grad, module.parameters(), strict=True):
        assert torch.equal(got, parameter.grad)
    assert not x.requires_grad


def test_default_without_gradients_builds_no_graph():
    module = Attention()
    with torch.enable_grad():
        output, state, *grads = forward_and_or_backward(
            module, arguments(), update_state=False
        )
    assert not output.requires_grad
    assert state is None and grads == [None, None]


def test_default_with_other_weights():
    module, other = Attention(), Attention()
    inputs = arguments()
    weights = [p.detach() for p in other.parameters()]
    options = dict(output_grad=torch.ones(2, 5, 4))
    got = forward_and_or_backward(module, inputs, weights, **options)
    assert_same_result(got, forward_and_or_backward(other, inputs, **options), 0)
    with pytest.raises(ValueError, match="expected 5 weights, but got 4"):
        forward_and_or_backward(module, inputs, weights[1:])


def test_default_runs_no_hooks_and_skips_frozen_weights():
    module = Attention()
    for parameter in module.parameters():
        parameter.register_hook(lambda g: pytest.fail("a hook of a nested gradient"))
    module.gain.requires_grad_(False)
    *_, grads = forward_and_or_backward(
        module, arguments(), output_grad=torch.ones(2, 5, 4)
    )
    names = [name for name, _ in module.named_parameters()]
    assert [g is None for g in grads] == [name == "gain" for name in names]
    assert all(p.grad is None for p in module.parameters())


def test_default_without_anything_to_differentiate():
    class Constant(nn.Module):
        def forward(self, x):
            return torch.ones(3)

    result = forward_and_or_backward(
        Constant(), (torch.zeros(3),), output_grad=torch.ones(3)
    )
    assert result[2:] == ((None,), ())


def test_default_under_autocast():
    linear = nn.Linear(8, 8)
    x = torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        y, _, (gx,), grads = forward_and_or_backward(
            linear, (x,), output_grad=torch.ones(4, 8, dtype=torch.bfloat16)
        )
    assert y.dtype is torch.bfloat16
    assert {g.dtype for g in (gx, *grads)} == {torch.float32}


def test_default_refuses():
    with pytest.raises(ValueError, match="output or gradients"):
        forward_and_or_backward(Attention(), arguments(), compute_output=False)

    class Pair(nn.Module):
        def forward(self, x):
            return x, x

    with pytest.raises(TypeError, match="Pair to return a tensor, but got tuple"):
        forward_and_or_backward(Pair(), (torch.ones(2),))


def test_own_method_is_called():
    layer = SelfAttention(4, 2, 2, 2, attention_dropout=0.5)
    x = torch.randn(1, 6, 4)
    options = dict(rng=3, output_grad=torch.ones_like(x), update_state=False)
    got = forward_and_or_backward(layer, (x,), **options)
    assert_same_result(got, layer.forward_and_or_backward((x,), **options), 0)


def test_who_draws_a_seed():
    class Other(nn.Module):
        forward_and_or_backward = None

    dropped = SelfAttention(4, 2, 2, 2, attention_dropout=0.5)
    for module, draws in [
        (dropped, 1),
        (SelfAttention(4, 2, 2, 2), 0),
        (nn.Dropout(0.5), 0),
        (Other(), 1),
        (Other().eval(), 0),
    ]:
        assert generator_draws(lambda m=module: draw_seed(m)) == draws


@pytest.mark.parametrize("seed", [0, 1, 2**63 + 5, 2**64 - 1])
@pytest.mark.parametrize("index", [0, 1, 7, 2**40])
def test_seeds_equal_the_oracle(seed, index):
    assert list(philox(seed, index)) == philox_oracle.block(seed, index)
    assert fold(seed, index) == philox_oracle.fold(seed, index)


def test_philox_equals_the_published_vectors():
    ones = 2**64 - 1
    assert philox(ones, 2**128 - 1) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    key = 0x299F31D0_A4093822
    counter = 0x03707344_13198A2E_85A308D3_243F6A88
    assert philox(key, counter) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


def test_a_seed_is_a_key_bit_for_bit():
    for seed in (0, 5, 2**63, 2**64 - 1, -1):
        key = seed_tensor(seed, torch.device("cpu"))
        assert key.dtype is torch.int64 and int(key) % 2**64 == seed % 2**64
