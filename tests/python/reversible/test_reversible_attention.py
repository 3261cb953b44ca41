# SPDX-License-Identifier: Apache-2.0
"""Self-attention in slices: reference, oracle, and the contract of the split call."""

from __future__ import annotations

import copy
import itertools
import pickle

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

from torch_sm3.reversible import HalfResidual, ReversibleSequence, SelfAttention

EQUIVALENCE = dict(
    n_heads=6,
    d_qk=7,
    d_v=17,
    causal=True,
    chunk_len=5,
    n_chunks_before=1,
    attention_dropout=0.2,
    output_dropout=0.1,
)


@pytest.mark.parametrize("n_parallel_heads", [1, 3, 6, 12, None, 99])
@pytest.mark.parametrize(
    ("dtype", "tol"), [(torch.float32, 1e-3), (torch.float64, 1e-9)], ids=str
)
def test_slices_equal_the_reference(n_parallel_heads, dtype, tol):
    reference = SelfAttention(13, use_reference_code=True, dtype=dtype, **EQUIVALENCE)
    layer = twin(reference, n_parallel_heads=n_parallel_heads, **EQUIVALENCE)
    x = torch.rand(2, 10, 13, dtype=dtype)
    options = dict(rng=11, output_grad=torch.ones_like(x))
    want = reference.forward_and_or_backward((x,), **options)
    got = layer.forward_and_or_backward((x,), **options)
    assert_same_result(got, want, tol)


CONFIGURATIONS = {
    "full": {},
    "causal": dict(causal=True),
    "masked": dict(masked=True),
    "causal, masked": dict(causal=True, masked=True, attention_dropout=0.3),
    "shared": dict(share_qk=True, bias=True),
    "chunks": dict(chunk_len=2, n_chunks_before=1, attention_dropout=0.3),
    "chunks after": dict(chunk_len=2, n_chunks_after=1, masked=True),
    "uneven chunks": dict(
        chunk_len=3, n_chunks_before=1, n_chunks_after=1, attention_dropout=0.5
    ),
    "uneven, causal": dict(chunk_len=4, causal=True, masked=True, bias=True),
    "lone chunks": dict(chunk_len=1, attention_dropout=0.3),
    "one long chunk": dict(chunk_len=9, n_chunks_before=3, n_chunks_after=2),
    "far windows": dict(chunk_len=2, n_chunks_before=8, n_chunks_after=8, causal=True),
    "dropout": dict(attention_dropout=0.4, output_dropout=0.3, bias=True),
}


def make(options, n_parallel_heads=None, **more):
    layer = SelfAttention(
        6,
        n_heads=2,
        d_qk=3,
        d_v=4,
        n_parallel_heads=n_parallel_heads,
        dtype=torch.float64,
        **options,
        **more,
    )
    return seeded(randomise(layer), 5)


def inputs_of(layer, batch=2, length=7):
    x = torch.randn(batch, length, 6, dtype=torch.float64)
    if not layer.masked:
        return (x,)
    mask = torch.rand(batch, length) < 0.6
    mask[0, :3] = False  # with causal, queries that may attend nothing
    return x, mask


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_forward_equals_the_oracle(name, reference):
    layer = make(CONFIGURATIONS[name], use_reference_code=reference)
    inputs = inputs_of(layer)
    options = oracle.options(CONFIGURATIONS[name], rng=5)
    x, *mask = (item.numpy() for item in inputs)
    want = oracle.self_attention(x, numpy_weights(layer), options, *mask)
    torch.testing.assert_close(layer(*inputs).detach(), torch.from_numpy(want))


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_gradients(name, reference):
    layer = make(CONFIGURATIONS[name], 1, use_reference_code=reference)
    inputs = inputs_of(layer, length=5)
    weights = list(layer.parameters())

    def run(x, *_):
        return layer(x, *inputs[1:])

    assert torch.autograd.gradcheck(
        run, (inputs[0].requires_grad_(), *weights), fast_mode=True
    )


@pytest.mark.parametrize("n_parallel_heads", [1, 2, 3, 6, 12])
@pytest.mark.parametrize("chunks", [{}, dict(chunk_len=2, n_chunks_before=2)])
def test_dropout_masks_do_not_depend_on_slices(n_parallel_heads, chunks):
    # Equal scores, windows of a power of two, small integers and a rate of 1/2: all
    # arithmetic is exact, so results are equal bit for bit iff the masks are.
    rates = dict(attention_dropout=0.5, output_dropout=0.5)
    layer = SelfAttention(4, 6, 4, 4, **rates, **chunks)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.copy_(torch.randint(-4, 5, weight.shape))
        layer.w_q.zero_()
    x = torch.randint(-4, 5, (2, 4 if chunks else 8, 4)).float()
    sizes = dict(n_heads=6, d_qk=4, d_v=4)
    other = twin(layer, n_parallel_heads=n_parallel_heads, **sizes, **rates, **chunks)
    options = dict(rng=3, output_grad=torch.ones_like(x))
    one = layer.forward_and_or_backward((x,), **options)
    two = other.forward_and_or_backward((x,), **options)
    assert one[0].count_nonzero() > 0
    assert torch.equal(one[0], two[0])
    assert torch.equal(one[2][0], two[2][0])
    for a, b in zip(one[3], two[3], strict=True):
        assert torch.equal(a, b)
    three = other.forward_and_or_backward((x,), **(options | dict(rng=4)))
    assert not torch.equal(three[0], two[0])


# --- the contract ------------------------------------------------------------------


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("grad", "output", "state"), list(itertools.product([False, True], repeat=3))
)
def test_what_is_asked_for_is_returned(grad, output, state, masked, reference):
    layer = make(dict(masked=masked), use_reference_code=reference)
    inputs = inputs_of(layer)
    options = dict(compute_output=output, update_state=state)
    if grad:
        options["output_grad"] = torch.ones_like(inputs[0])
    if not (grad or output):
        with pytest.raises(ValueError, match="output or gradients"):
            layer.forward_and_or_backward(inputs, **options)
        return
    got = layer.forward_and_or_backward(inputs, **options)
    assert [part is not None for part in got] == [output, state, grad, grad]
    tensors = [part for part in got[:1] if part is not None]
    if grad:
        assert len(got[2]) == len(inputs) and got[2][1:] == (None,) * masked
        assert [g.shape for g in got[3]] == [p.shape for p in layer.parameters()]
        tensors += [got[2][0], *got[3]]
    assert not any(t.requires_grad for t in tensors)
    assert all(p.grad is None for p in layer.parameters())


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_all_ways_to_call_give_the_same_bits(name):
    # Exact modes rebuild a stream from the output of the second run.
    layer = make(CONFIGURATIONS[name], 1)
    x, *mask = inputs_of(layer)
    grad = torch.randn_like(x)
    alone = layer.forward_and_or_backward((x, *mask), rng=5)[0]
    both = layer.forward_and_or_backward((x, *mask), rng=5, output_grad=grad)
    grads = layer.forward_and_or_backward(
        (x, *mask), rng=5, output_grad=grad, compute_output=False
    )
    x.requires_grad_()
    y = layer(x, *mask)
    y.backward(grad)
    with torch.no_grad():
        bare = layer(x, *mask)
    assert all(torch.equal(alone, other) for other in (both[0], y, bare))
    for result in (both, grads):
        assert torch.equal(result[2][0], x.grad)
        for got, weight in zip(result[3], layer.parameters(), strict=True):
            assert torch.equal(got, weight.grad)


def test_weights_in_place_of_the_layers_own():
    layer, other = make(dict(bias=True)), make(dict(bias=True))
    (x,) = inputs_of(layer)
    options = dict(rng=2, output_grad=torch.randn_like(x))
    before = copy.deepcopy(layer.state_dict())
    weights = [p.detach() for p in other.parameters()]
    got = layer.forward_and_or_backward((x,), weights, **options)
    want = other.forward_and_or_backward((x,), **options)
    assert_same_result(got, want, 0)
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name])
    with pytest.raises(ValueError, match="expected 8 weights, but got 7"):
        layer.forward_and_or_backward((x,), weights[1:])


def test_parameters_follow_the_documented_order():
    layer = make(dict(bias=True))
    names = [name for name, _ in layer.named_parameters()]
    assert names == ["w_q", "w_k", "w_v", "w_o", "b_q", "b_k", "b_v", "b_o"]
    shared = make(dict(share_qk=True))
    assert [name for name, _ in shared.named_parameters()] == ["w_q", "w_v", "w_o"]


def test_frozen_weights_have_no_gradient():
    layer = make({})
    layer.w_v.requires_grad_(False)
    (x,) = inputs_of(layer)
    _, _, _, grads = layer.forward_and_or_backward((x,), output_grad=torch.ones_like(x))
    assert [g is None for g in grads] == [False, False, True, False]
    layer(x).sum().backward()
    assert [p.grad is None for p in layer.parameters()] == [False, False, True, False]


def test_nothing_is_cached_between_calls():
    layer = make(dict(attention_dropout=0.5))
    (x,) = inputs_of(layer)
    before = set(vars(layer))
    layer.forward_and_or_backward((x,), output_grad=x)
    layer(x).sum().backward()
    assert set(vars(layer)) == before
    pickle.dumps(copy.deepcopy(SelfAttention(6, 2, 3, 4)))


def test_only_training_with_dropout_draws():
    layer = SelfAttention(6, 2, 3, 4, attention_dropout=0.1)
    x = torch.randn(1, 3, 6)
    assert generator_draws(lambda: layer(x)) == 1
    assert generator_draws(lambda: layer.forward_and_or_backward((x,), rng=1)) == 0
    assert generator_draws(lambda: layer.eval()(x)) == 0
    assert generator_draws(lambda: SelfAttention(6, 2, 3, 4, device="meta")) == 0
    plain = SelfAttention(6, 2, 3, 4)
    assert generator_draws(lambda: plain(x)) == 0
    assert torch.equal(layer(x), layer(x))
    assert not torch.equal(layer.train()(x), layer(x))


def test_training_flag_of_the_forward_pass_holds():
    layer = make(dict(attention_dropout=0.5, output_dropout=0.2))
    (x,) = inputs_of(layer)
    x.requires_grad_()
    (want,) = torch.autograd.grad(layer(x).square().sum(), x)
    y = layer(x)
    layer.eval()
    (got,) = torch.autograd.grad(y.square().sum(), x)
    assert torch.equal(got, want)


# --- autograd ----------------------------------------------------------------------


def test_forward_keeps_inputs_and_weights_only():
    layer = SelfAttention(8, 4, 2, 2, n_parallel_heads=2)
    x = torch.randn(2, 64, 8, requires_grad=True)
    saved = {}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = layer(x)
    assert sum(saved.values()) == x.nbytes + sum(p.nbytes for p in layer.parameters())
    assert y.grad_fn is not None


@pytest.mark.parametrize("n_parallel_heads", [1, None])
def test_in_a_reversible_block(n_parallel_heads):
    layer = SelfAttention(
        6, 2, 3, 4, causal=True, attention_dropout=0.3, output_dropout=0.2
    ).double()
    layer.n_parallel_heads = n_parallel_heads
    norm = nn.LayerNorm(6).double()
    x = torch.randn(2, 7, 6, dtype=torch.float64, requires_grad=True)
    results = []
    for run in (
        lambda: ReversibleSequence(HalfResidual(norm, attention=layer))(x, x)[0],
        lambda: ReversibleSequence(HalfResidual(norm, layer))(x, x)[0],
        lambda: x + layer(norm(x)),
    ):
        torch.manual_seed(1)
        y = run()
        grads = torch.autograd.grad(y.sin().sum(), [x, *layer.parameters()])
        results.append((y.detach(), *grads, torch.rand(1)))
    for result in results[:2]:
        for a, b in zip(result, results[2], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_double_backward_is_refused():
    layer = make({})
    (x,) = inputs_of(layer)
    x.requires_grad_()
    y = layer(x)
    with pytest.raises(NotImplementedError, match="create_graph"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    layer.use_reference_code = True
    (grad,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    assert torch.autograd.grad(grad.square().sum(), x)[0].abs().sum() > 0


def test_weights_must_not_change_before_backward():
    layer = make({})
    (x,) = inputs_of(layer)
    y = layer(x)
    with torch.no_grad():
        layer.w_q.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_hooks_fire_once():
    layer = make({})
    fired = []
    for name, parameter in layer.named_parameters():
        parameter.register_hook(lambda g, name=name: fired.append((name, g.clone())))
    (x,) = inputs_of(layer)
    layer(x).sum().backward()
    assert sorted(name for name, _ in fired) == ["w_k", "w_o", "w_q", "w_v"]
    for name, grad in fired:
        assert torch.equal(grad, getattr(layer, name).grad)


def test_a_parametrized_weight():
    layer = make({})
    nn.utils.parametrizations.weight_norm(layer, "w_q")
    (x,) = inputs_of(layer)
    layer(x).square().sum().backward()
    got = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    layer.use_reference_code = True
    layer(x).square().sum().backward()
    for a, p in zip(got, layer.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad)


def test_autocast():
    layer = SelfAttention(8, 4, 4, 4, bias=True, n_parallel_heads=2)
    plain = SelfAttention(8, 4, 4, 4, bias=True, use_reference_code=True)
    plain.load_state_dict(randomise(layer).state_dict())
    x = torch.randn(2, 16, 8)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
        layer(x).float().square().sum().backward()
    inside = [p.grad for p in layer.parameters()]
    layer.zero_grad()
    y.float().square().sum().backward()
    for a, p in zip(inside, layer.parameters(), strict=True):
        assert torch.equal(a, p.grad)
    plain(x).square().sum().backward()
    assert y.dtype is torch.bfloat16
    # In full attention the gradient of b_k is zero, but for rounding.
    scale = max(p.grad.norm() for p in plain.parameters())
    for a, b in zip(layer.parameters(), plain.parameters(), strict=True):
        assert a.grad.dtype is torch.float32
        assert (a.grad - b.grad).norm() < 0.02 * scale


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision(dtype):
    layer = SelfAttention(8, 4, 4, 4, n_parallel_heads=1, masked=True, dtype=dtype)
    wide = twin(
        SelfAttention(8, 4, 4, 4, masked=True), n_heads=4, d_qk=4, d_v=4, masked=True
    )
    wide.load_state_dict(layer.state_dict())
    x, mask = torch.randn(2, 16, 8, dtype=dtype), torch.rand(2, 16) < 0.7
    got = layer.forward_and_or_backward((x, mask), output_grad=torch.ones_like(x))
    want = wide.forward_and_or_backward(
        (x.float(), mask), output_grad=torch.ones(2, 16, 8)
    )
    for a, b in zip((got[0], *got[3]), (want[0], *want[3]), strict=True):
        assert a.dtype is dtype
        assert (a.float() - b).norm() < 0.03 * b.norm()


# --- masks -------------------------------------------------------------------------


@pytest.mark.parametrize("value", [1e6, torch.inf, torch.nan])
@pytest.mark.parametrize("chunks", [{}, dict(chunk_len=3, n_chunks_before=1)])
def test_forbidden_positions_never_influence_others(value, chunks):
    layer = make(dict(masked=True, bias=True, **chunks))
    x, mask = inputs_of(layer)
    other = x.masked_fill(~mask[..., None], value)
    seen = mask[..., None].expand_as(x)
    y, z = layer(x, mask), layer(other, mask)
    assert torch.equal(y[seen], z[seen])
    if not torch.tensor(value).isfinite():
        return  # what those positions attended themselves is no number
    grad = torch.randn_like(x).masked_fill(~seen, 0)
    got = layer.forward_and_or_backward((other, mask), output_grad=grad)[2][0]
    want = layer.forward_and_or_backward((x, mask), output_grad=grad)[2][0]
    assert torch.equal(got[seen], want[seen])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("reference", [False, True])
def test_queries_that_may_attend_nothing_yield_zero(reference, causal):
    layer = make(dict(masked=True, causal=causal), use_reference_code=reference)
    x, mask = inputs_of(layer)
    mask[1] = False
    if causal:
        mask[1, -1] = True
    x.requires_grad_()
    y = layer(x, mask)
    y.sum().backward()
    assert y[1, :-1].abs().max() == 0 < y[0].abs().max()
    assert (y[1, -1].abs().max() > 0) == causal
    assert x.grad[1, :-1].abs().max() == 0
    assert all(p.grad.isfinite().all() for p in layer.parameters())


def test_sizes_of_zero_and_one():
    layer = make(dict(chunk_len=2, n_chunks_before=1, attention_dropout=0.5))
    for shape in ((0, 5, 6), (2, 0, 6), (3, 1, 6)):
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        y = layer(x)
        y.sum().backward()
        assert y.shape == x.grad.shape == shape


# --- errors ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "batch", "fits"),
    [
        (1, 2, True),
        (2, 2, True),
        (3, 2, True),
        (6, 2, True),
        (12, 2, True),
        (12, 4, True),
        (13, 2, True),  # more than there are
        (18, 2, True),
        (0, 2, False),
        (-6, 2, False),
        (4, 2, False),
        (5, 2, False),
        (9, 4, False),
        (18, 4, False),
        (12, 3, False),
    ],
)
def test_n_parallel_heads(count, batch, fits):
    def run():
        layer = SelfAttention(4, 6, 2, 2, n_parallel_heads=count)
        return layer(torch.randn(batch, 3, 4))

    if fits:
        assert run().shape == (batch, 3, 4)
    else:
        with pytest.raises(ValueError, match=rf"but got {count} .*'n_parallel_heads'"):
            run()


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (dict(n_heads=0), "at least 1, but got 0 .*'n_heads'"),
        (dict(d_v=0), "'d_v'"),
        (dict(chunk_len=0), "'chunk_len'"),
        (dict(chunk_len=2, n_chunks_after=-1), "at least 0, but got -1"),
        (dict(n_chunks_before=1), "0 without chunk_len, but got 1"),
        (dict(attention_dropout=1.5), r"a rate in \[0, 1\], but got 1.5"),
        (dict(output_dropout=-0.1), "'output_dropout'"),
        (dict(output_dropout=float("nan")), "'output_dropout'"),
    ],
)
def test_wrong_arguments(wrong, match):
    with pytest.raises(ValueError, match=match):
        SelfAttention(**(dict(d_model=4, n_heads=2, d_qk=2, d_v=2) | wrong))


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_wrong_inputs(name):
    error, match = WRONG_CALLS[name]
    layer = SelfAttention(8, 2, 2, 2)
    with pytest.raises(error, match=match):
        layer(*wrong_call(name))
    with pytest.raises(error, match=match):
        layer.forward_and_or_backward(wrong_call(name))


def test_wrong_masks_and_gradients():
    layer = SelfAttention(8, 2, 2, 2, masked=True)
    x = torch.randn(2, 5, 8)
    with pytest.raises(TypeError, match="2 inputs with masked=True, but got 1"):
        layer(x)
    with pytest.raises(TypeError, match=r"a boolean tensor, but got torch\.float32"):
        layer(x, torch.ones(2, 5))
    with pytest.raises(ValueError, match=r"shape \(2, 5\), but got \(2, 4\)"):
        layer(x, torch.ones(2, 4).bool())
    with pytest.raises(ValueError, match="'output_grad'"):
        layer.forward_and_or_backward(
            (x, torch.ones(2, 5).bool()), output_grad=torch.ones(2, 5)
        )
