# SPDX-License-Identifier: Apache-2.0
"""Attention by hashing: reference, oracle, state, and what hashing promises."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.attention_checks import (
    WRONG_CALLS,
    assert_same_result,
    generator_draws,
    numpy_weights,
    randomise,
    seeded,
    twin,
    wrong_call,
)
from reference import attention_oracle as oracle
from torch import nn

from torch_sm3.reversible import (
    AdditiveCoupling,
    HalfResidual,
    LSHSelfAttention,
    ReversibleSequence,
)
from torch_sm3.reversible._lsh_buckets import hash_vectors, rotations
from torch_sm3.reversible._split import apply_split

EQUIVALENCE = dict(
    n_heads=6,
    d_qk=7,
    d_v=17,
    causal=True,
    chunk_len=5,
    n_chunks_before=1,
    n_hashes=2,
    n_buckets=4,
    attention_dropout=0.2,
    output_dropout=0.1,
)


@pytest.mark.parametrize("n_parallel_heads", [1, 3, 6, 12, None])
@pytest.mark.parametrize(
    ("dtype", "tol"), [(torch.float32, 1e-3), (torch.float64, 1e-9)], ids=str
)
def test_slices_equal_the_reference(n_parallel_heads, dtype, tol):
    reference = LSHSelfAttention(
        13, use_reference_code=True, dtype=dtype, **EQUIVALENCE
    )
    layer = twin(reference, n_parallel_heads=n_parallel_heads, **EQUIVALENCE)
    x = torch.rand(2, 10, 13, dtype=dtype)
    options = dict(rng=11, output_grad=torch.ones_like(x))
    want = reference.forward_and_or_backward((x,), **options)
    got = layer.forward_and_or_backward((x,), **options)
    assert torch.equal(got[1], want[1])
    assert_same_result(got, want, tol)


CONFIGURATIONS = {
    "one round": dict(chunk_len=2),
    "rounds": dict(chunk_len=3, n_hashes=3),
    "causal": dict(chunk_len=2, n_hashes=3, causal=True, attention_dropout=0.3),
    "masked": dict(chunk_len=2, n_hashes=2, masked=True, bias=True),
    "causal, masked": dict(chunk_len=4, n_hashes=2, masked=True, causal=True),
    "both sides": dict(chunk_len=2, n_chunks_after=1, n_hashes=2, n_buckets=[2, 4]),
    "own chunk only": dict(chunk_len=3, n_chunks_before=0, n_hashes=2),
    "lone chunks": dict(chunk_len=1, n_chunks_before=0, n_hashes=2),
    "one long chunk": dict(chunk_len=9, n_hashes=2, attention_dropout=0.4),
    "far windows": dict(
        chunk_len=2, n_chunks_before=8, n_hashes=2, attention_dropout=0.4
    ),
    "dropout": dict(
        chunk_len=2, n_hashes=2, attention_dropout=0.4, output_dropout=0.3, bias=True
    ),
}


def make(options, **more):
    options = dict(n_buckets=4) | options
    layer = LSHSelfAttention(
        6, n_heads=2, d_qk=3, d_v=4, dtype=torch.float64, **options, **more
    )
    return seeded(randomise(layer), 5)


def inputs_of(layer, batch=2, length=7):
    x = torch.randn(batch, length, 6, dtype=torch.float64)
    if not layer.masked:
        return (x,)
    mask = torch.rand(batch, length) < 0.6
    mask[0, :3] = False
    return x, mask


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_output_equals_the_oracle(name, reference):
    layer = make(CONFIGURATIONS[name], use_reference_code=reference)
    inputs = inputs_of(layer)
    got, buckets, _, _ = layer.forward_and_or_backward(inputs, rng=5)
    x, *mask = (item.numpy() for item in inputs)
    how = oracle.options(CONFIGURATIONS[name], rng=5)
    how.n_chunks_before = layer.n_chunks_before
    want = oracle.lsh_attention(x, numpy_weights(layer), buckets.numpy(), how, *mask)
    torch.testing.assert_close(got, torch.from_numpy(want))
    assert torch.equal(layer(*inputs), got)


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_gradients_with_frozen_buckets(name, reference):
    layer = make(CONFIGURATIONS[name], n_parallel_heads=1, use_reference_code=reference)
    x, *mask = inputs_of(layer, length=5)
    buckets = layer.forward_and_or_backward((x, *mask), rng=5)[1]
    weights = tuple(layer.parameters())

    def run(x, *weights):
        return apply_split(layer, (x, *mask), weights, 5, True, buckets)

    inputs = (x.requires_grad_(), *weights)
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


def test_forward_equals_the_split_call():
    layer = make(CONFIGURATIONS["dropout"])
    (x,) = inputs_of(layer)
    grad = torch.randn_like(x)
    want = layer.forward_and_or_backward((x,), rng=5, output_grad=grad)
    leaf = x.clone().requires_grad_()
    y = layer(leaf)
    y.backward(grad)
    assert torch.equal(y, want[0]) and torch.equal(leaf.grad, want[2][0])
    for parameter, g in zip(layer.parameters(), want[3], strict=True):
        assert torch.equal(parameter.grad, g)


# --- state -------------------------------------------------------------------------


@pytest.mark.parametrize("reference", [False, True])
def test_state(reference):
    layer = make(dict(chunk_len=2, n_hashes=3), use_reference_code=reference)
    (x,) = inputs_of(layer)
    y, buckets, _, _ = layer.forward_and_or_backward((x,), rng=5)
    assert buckets.dtype is torch.int64 and buckets.shape == (2, 2, 3, 7)
    assert 0 <= buckets.min() and buckets.max() < 4
    # Given buckets are used as they are, whatever the seed would give.
    others = torch.randint(0, 4, buckets.shape)
    for state in (buckets, others):
        kept = state.clone()
        got, none, *_ = layer.forward_and_or_backward(
            (x,), state=state, rng=99, update_state=False
        )
        assert none is None and torch.equal(state, kept)
        how = oracle.Options(chunk_len=2, n_chunks_before=1)
        want = oracle.lsh_attention(x.numpy(), numpy_weights(layer), state.numpy(), how)
        torch.testing.assert_close(got, torch.from_numpy(want))
    # A new state is hashed, whatever the old one was.
    again, fresh, *_ = layer.forward_and_or_backward((x,), state=others, rng=5)
    assert torch.equal(fresh, buckets) and torch.equal(again, y)
    unkept = layer.forward_and_or_backward((x,), rng=5, update_state=False)[0]
    assert torch.equal(unkept, y)


def test_backward_pass_never_hashes(monkeypatch):
    layer = make(dict(chunk_len=2, n_hashes=2))
    (x,) = inputs_of(layer)
    y = layer(x.requires_grad_())
    monkeypatch.setattr(layer, "hash", lambda *_: pytest.fail("hashed again"))
    y.sum().backward()
    assert x.grad.abs().sum() > 0


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("as_attention", [False, True])
def test_a_reversible_block_keeps_the_buckets(as_attention, reference):
    layer = make(
        dict(chunk_len=2, n_hashes=2), n_parallel_heads=1, use_reference_code=reference
    )
    block = AdditiveCoupling(layer, nn.Identity())
    if as_attention:
        block = HalfResidual(attention=layer)
    hashes, calls = layer.hash, []

    def unstable(*arguments):
        """Hash as after a rounding error, once the first run is over."""
        calls.append(arguments)
        buckets = hashes(*arguments)
        return buckets if len(calls) <= first else buckets.flip(-1)

    first = 1 if reference else 4  # a call for every slice
    layer.hash = unstable
    (x,) = inputs_of(layer)
    x.requires_grad_()
    ReversibleSequence(block)(x, x)[0].square().sum().backward()
    got = [x.grad, *(p.grad for p in layer.parameters())]
    assert len(calls) == (first if as_attention else 2 * first)
    layer.hash = hashes
    x.grad = None
    layer.zero_grad()
    (x + layer(x)).square().sum().backward()
    want = [x.grad, *(p.grad for p in layer.parameters())]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_a_seed_fixes_the_output():
    layer = LSHSelfAttention(6, 2, 3, 4, chunk_len=4, n_hashes=2, n_buckets=8)
    x = torch.randn(2, 16, 6)
    before = torch.get_rng_state()
    one, b1, _, _ = layer.forward_and_or_backward((x,), rng=7)
    two, b2, _, _ = layer.forward_and_or_backward((x,), rng=7)
    other, b3, _, _ = layer.forward_and_or_backward((x,), rng=8)
    assert torch.equal(one, two) and torch.equal(b1, b2)
    assert not torch.equal(one, other) and not torch.equal(b1, b3)
    assert torch.equal(torch.get_rng_state(), before)


def test_only_training_draws():
    layer = LSHSelfAttention(6, 2, 3, 4, chunk_len=4, n_buckets=8)
    x = torch.randn(2, 16, 6)
    assert generator_draws(lambda: layer(x)) == 1
    assert not torch.equal(layer(x), layer(x))
    assert generator_draws(lambda: layer.eval()(x)) == 0
    assert torch.equal(layer(x), layer(x))


def test_double_backward_is_refused():
    layer = make(dict(chunk_len=2))
    (x,) = inputs_of(layer)
    y = layer(x.requires_grad_())
    with pytest.raises(NotImplementedError, match=r"LSHSelfAttention.*create_graph"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


# --- hashing -----------------------------------------------------------------------


def test_similar_vectors_share_buckets():
    seed, factors = 3, (8,)
    directions = rotations(seed, 1, 16, 50, factors)
    x = torch.randn(1, 1, 200, 16)

    def agreement(noise):
        other = x + noise * torch.randn_like(x)
        pair = [hash_vectors(item, directions, factors) for item in (x, other)]
        return (pair[0] == pair[1]).float().mean()

    near, far, opposite = agreement(0.1), agreement(100.0), agreement(0)
    assert near > 0.8 > 0.25 > far > 0.05 and opposite == 1
    mirrored = hash_vectors(-x, directions, factors)
    assert not (mirrored == hash_vectors(x, directions, factors)).any()
    scaled = hash_vectors(3 * x, directions, factors)
    assert torch.equal(scaled, hash_vectors(x, directions, factors))


def test_factors_are_digits():
    x = torch.randn(2, 3, 500, 8)
    directions = rotations(1, 3, 8, 2, (2, 4, 6))
    buckets = hash_vectors(x, directions, (2, 4, 6))
    assert buckets.shape == (2, 3, 2, 500)
    assert buckets.unique().tolist() == list(range(48))
    first = hash_vectors(x, directions[..., :1], (2,))
    last = hash_vectors(x, directions[..., 3:], (6,))
    assert torch.equal(buckets % 2, first) and torch.equal(buckets // 8, last)


def test_heads_and_rounds_hash_differently():
    x = torch.randn(1, 1, 100, 8).expand(-1, 2, -1, -1)
    buckets = hash_vectors(x, rotations(1, 2, 8, 2, (8,)), (8,))[0]
    assert not torch.equal(buckets[0], buckets[1])
    assert not torch.equal(buckets[0, 0], buckets[0, 1])


def test_pairs_that_meet_in_several_rounds_count_once():
    # One chunk holds all, so every round shows every pair.
    one = make(dict(chunk_len=16, n_hashes=1))
    many = make(dict(chunk_len=16, n_hashes=4))
    many.load_state_dict(one.state_dict())
    (x,) = inputs_of(one, length=12)
    torch.testing.assert_close(one(x), many(x))


def test_a_position_attends_itself_only_if_alone():
    layer = make(dict(chunk_len=2, n_hashes=2, causal=True))
    (x,) = inputs_of(layer, batch=1)
    changed = x.clone()
    changed[0, -1] *= 2  # the last position: only its own query and value change
    state = layer.forward_and_or_backward((x,))[1]
    with torch.no_grad():
        value = x[0, 0] @ layer.w_v
        want = torch.einsum("hv,hvd->d", value, layer.w_o)
    run = dict(state=state, update_state=False)
    y = layer.forward_and_or_backward((x,), **run)[0]
    torch.testing.assert_close(y[0, 0], want)
    # Where others are seen, scaling w_v of the position itself changes nothing:
    # the gradient of its output with respect to its own value is zero.
    z = layer.forward_and_or_backward((changed,), **run)[0]
    assert torch.equal(z[0, :-1], y[0, :-1])


# --- masks -------------------------------------------------------------------------


@pytest.mark.parametrize("value", [1e3, torch.inf, torch.nan])
@pytest.mark.parametrize("n_hashes", [1, 3])
def test_forbidden_positions_never_influence_others(value, n_hashes):
    layer = make(dict(masked=True, bias=True, chunk_len=3, n_hashes=n_hashes))
    x, mask = inputs_of(layer, length=13)
    other = x.masked_fill(~mask[..., None], value)
    seen = mask[..., None].expand_as(x)
    grad = torch.randn_like(x).masked_fill(~seen, 0)
    y, b1, g, _ = layer.forward_and_or_backward((x, mask), rng=1, output_grad=grad)
    z, b2, h, _ = layer.forward_and_or_backward((other, mask), rng=1, output_grad=grad)
    assert torch.equal(b1, b2)
    assert (b1 == 4).sum() == layer.n_heads * n_hashes * (~mask).sum()
    assert torch.equal(y[seen], z[seen])
    assert g[1] is None
    if torch.tensor(value).isfinite():
        assert torch.equal(g[0][seen], h[0][seen])


def test_no_key_is_allowed():
    layer = make(dict(masked=True, chunk_len=3, n_hashes=2))
    x, mask = inputs_of(layer)
    mask[1] = False
    y = layer(x.requires_grad_(), mask)
    y.sum().backward()
    assert y[1].abs().max() == 0 < y[0].abs().max()
    assert x.grad[1].abs().max() == 0
    assert all(p.grad.isfinite().all() for p in layer.parameters())


def test_sizes_of_zero_and_one():
    layer = make(dict(chunk_len=2, n_hashes=2, attention_dropout=0.5))
    for shape in ((0, 5, 6), (2, 0, 6), (3, 1, 6)):
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        y = layer(x)
        y.sum().backward()
        assert y.shape == x.grad.shape == shape


@pytest.mark.parametrize("n_parallel_heads", [1, 2, None])
def test_autocast(n_parallel_heads):
    sizes = dict(n_heads=4, d_qk=4, d_v=4, chunk_len=4, n_hashes=2, n_buckets=4)
    layer = LSHSelfAttention(8, n_parallel_heads=n_parallel_heads, **sizes).eval()
    wide = copy.deepcopy(layer)
    x = torch.randn(2, 16, 8)
    with torch.autocast("cpu", torch.bfloat16):
        y, buckets, _, grads = layer.forward_and_or_backward(
            (x,), output_grad=torch.ones(2, 16, 8, dtype=torch.bfloat16)
        )
    want, _, _, wide_grads = wide.forward_and_or_backward(
        (x,), state=buckets, update_state=False, output_grad=torch.ones(2, 16, 8)
    )
    assert y.dtype is torch.bfloat16 and (y - want).norm() < 0.02 * want.norm()
    for a, b in zip(grads, wide_grads, strict=True):
        assert a.dtype is torch.float32 and (a - b).norm() < 0.05 * b.norm()


# --- errors ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (dict(n_hashes=0), "at least 1, but got 0 .*'n_hashes'"),
        (dict(n_buckets=3), "an even number .* but got 3 .*'n_buckets'"),
        (dict(n_buckets=0), "'n_buckets'"),
        (dict(n_buckets=[]), "'n_buckets'"),
        (dict(n_buckets=[4, 5]), r"\[4, 5\]"),
        (dict(chunk_len=0), "'chunk_len'"),
        (dict(n_parallel_heads=4, n_heads=6), "'n_parallel_heads'"),
    ],
)
def test_wrong_arguments(wrong, match):
    with pytest.raises(ValueError, match=match):
        LSHSelfAttention(**(dict(d_model=4, n_heads=2, d_qk=2, d_v=2) | wrong))


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_wrong_inputs(name):
    error, match = WRONG_CALLS[name]
    layer = LSHSelfAttention(8, 2, 2, 2)
    with pytest.raises(error, match=match):
        layer(*wrong_call(name))


def test_wrong_state():
    layer = LSHSelfAttention(6, 2, 3, 4, chunk_len=4, n_hashes=2, n_buckets=8)
    x = torch.randn(2, 16, 6)
    for state in (torch.zeros(2, 2, 1, 16).long(), torch.zeros(2, 2, 2, 16), ()):
        with pytest.raises(ValueError, match=r"int64 of shape \(2, 2, 2, 16\)"):
            layer.forward_and_or_backward((x,), state=state, update_state=False)
