# SPDX-License-Identifier: Apache-2.0
"""What the graph engine is for: double backward, closures; and what it must not do."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from helpers.reversible_models import (
    TanhMLP,
    assert_close,
    couplings,
    gradients,
    loss_of,
    mlp,
    plain,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from torch_sm3.reversible import (
    AdditiveCoupling,
    HalfResidual,
    MomentumCoupling,
    ReversibleSequence,
    is_recomputing,
    remember,
)


def data(n=4):
    return torch.randn(n, 8, dtype=torch.double, requires_grad=True)


def smooth(dropout=0.0):
    return nn.Sequential(
        nn.Linear(8, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 8)
    )


def penalty(y, x):
    """A loss with a gradient penalty, as of a critic."""
    loss = loss_of(y)
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + (grad.norm(dim=1) - 1).square().sum()


@pytest.mark.parametrize("options", [{"engine": "graph"}, {"double_backward": True}])
@pytest.mark.parametrize("exact", ["none", "grid", "sidecar"])
def test_reversible_row_19_gradient_penalty(options, exact):
    seq, x = couplings(3, smooth, exact=exact, **options).double(), data()
    penalty(seq(x, x), x).backward()
    got = gradients(seq, x)
    twin = ReversibleSequence(*seq, exact=exact, plan="store", engine="graph")
    penalty(twin(x, x), x).backward()
    assert_close(got, gradients(seq, x), 1e-8)


def test_gradient_penalty_with_dropout_and_momentum_couplings():
    seq = ReversibleSequence(
        MomentumCoupling(smooth(0.5), 0.8), AdditiveCoupling(smooth(0.5), smooth()),
        double_backward=True,
    ).double()  # fmt: skip
    x, grads = data(), []
    for run in (seq, lambda *s: plain(seq, *s)):
        torch.manual_seed(2)
        penalty(run(x, x), x).backward()
        grads.append(gradients(seq, x))
    assert_close(*grads, 1e-9)


def test_third_derivative():
    seq, x = couplings(2, lambda: TanhMLP(8, 4), engine="graph").double(), data(1)
    results = []
    for run in (seq, lambda *s: plain(seq, *s)):
        value = loss_of(run(x, x))
        for _ in range(3):
            (grad,) = torch.autograd.grad(value, x, create_graph=True)
            value = (grad * torch.linspace(-1, 1, 8)).sum()
        results.append([value, *torch.autograd.grad(value, list(seq.parameters()))])
    assert_close(*results, 1e-8)


def test_gradgradcheck():
    seq = couplings(2, lambda: TanhMLP(2, 2), double_backward=True).double()
    inputs = [torch.randn(2, 2, dtype=torch.double, requires_grad=True) for _ in "ab"]

    def call(a, b, *weights):
        first, second = seq(a, b)
        return first * 1.5 + second.sin()

    inputs += seq.parameters()
    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)


def test_a_node_refuses_and_names_the_way_out():
    seq, x = couplings(1, engine="node").double(), data()
    with pytest.raises(NotImplementedError, match="double_backward=True"):
        torch.autograd.grad(loss_of(seq(x, x)), x, create_graph=True)
    with pytest.raises(ValueError, match="engine"):
        couplings(1, engine="node", double_backward=True)


class Flips(nn.Module):
    """Saves other tensors when it is run for the second time."""

    def __init__(self, how):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.how = how

    def forward(self, x):
        y = self.linear(x)
        if not is_recomputing():
            return y.sin()
        return {
            "fewer": lambda: y + 1,
            "more": lambda: y.sin().exp(),
            "shape": lambda: (y.repeat(2, 1).sin())[: len(y)],
            "dtype": lambda: y.float().sin().to(y.dtype),
        }[self.how]()


@pytest.mark.parametrize("how", ["fewer", "more", "shape", "dtype"])
def test_other_saved_tensors_in_the_second_run(how):
    seq = ReversibleSequence(
        AdditiveCoupling(mlp(), mlp()), AdditiveCoupling(mlp(), Flips(how)),
        engine="graph",
    ).double()  # fmt: skip
    x = data()
    with pytest.raises(RuntimeError, match="F of block 1 to save the same tensors"):
        loss_of(seq(x, x)).backward()


class Closure(nn.Module):
    """Uses tensors that it does not own."""

    def __init__(self, *tensors):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.tensors = lambda: tensors

    def forward(self, x):
        y = self.linear(x)
        for tensor in self.tensors():
            y = y * torch.tanh(tensor)
        return y


@pytest.mark.parametrize("engine_name", ["auto", "graph"])
def test_function_that_closes_over_tensors(engine_name):
    leaf, source = data(1), data(1)
    produced, runs = source.exp(), []
    produced.register_hook(lambda grad: runs.append(1))
    blocks = [AdditiveCoupling(Closure(leaf, produced), mlp()) for _ in range(3)]
    seq, x = ReversibleSequence(*blocks, engine=engine_name).double(), data()
    for _ in range(2):  # the first call learns what the second one knows
        loss_of(seq(x, x)).backward(retain_graph=True)
        got = gradients(seq, x, leaf, source)
        assert runs == [1]
        runs.clear()
    loss_of(plain(seq, x, x)).backward()
    assert_close(got, gradients(seq, x, leaf, source), 1e-11)


def test_the_graph_keeps_no_tensor_of_a_function():
    seq, x = couplings(6, lambda: mlp(8), engine="graph"), torch.randn(64, 8)
    refs = []

    def keep(module, args, output):
        refs.append(weakref.ref(output.untyped_storage()))

    for block in seq:
        for function in (block.F, block.G):
            function[2].register_forward_hook(keep)
    y = seq(x, x)
    assert len(refs) == 12 and all(ref() is None for ref in refs)
    del y


def test_only_one_blocks_tensors_are_alive_in_the_backward_pass():
    seq, x = couplings(6, lambda: mlp(8), engine="graph"), torch.randn(64, 8)
    refs, most = [], []

    def keep(module, args, output):
        if is_recomputing():
            most.append(sum(ref() is not None for ref in refs))
            refs.append(weakref.ref(output.untyped_storage()))

    for block in seq:
        for function in (block.F, block.G):
            function[2].register_forward_hook(keep)
    loss_of(seq(x, x)).backward()
    assert len(most) == 12 and max(most) <= 1
    assert all(ref() is None for ref in refs)


def test_a_call_without_backward_needs_no_collector():
    seq, x = couplings(2, lambda: mlp(dropout=0.5), engine="graph"), torch.randn(4, 8)
    gc.collect()
    gc.disable()
    try:
        refs = [weakref.ref(y.untyped_storage()) for y in seq(x, x)]
        assert all(ref() is None for ref in refs)
    finally:
        gc.enable()


class Region(nn.Module):
    """Chooses in a checkpointed region."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def inner(self, x):
        y = self.linear(x)
        return y * remember(y > 0, "mask")

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


@pytest.mark.parametrize("options", [{}, {"exact": "sidecar"}, {"plan": "checkpoint"}])
def test_a_choice_in_a_checkpointed_region(options):
    seq, x = couplings(2, Region, engine="graph", **options).double(), data()
    loss_of(seq(x, x)).backward()
    got = gradients(seq, x)
    loss_of(plain(seq, x, x)).backward()
    assert_close(got, gradients(seq, x), 1e-11)


@pytest.mark.parametrize("exact", ["none", "grid", "sidecar"])
def test_empty_streams(exact):
    seq, x = couplings(2, exact=exact, engine="graph"), torch.randn(0, 8)
    loss_of(seq(x, x)).backward()
    assert all(not grad.any() for grad in gradients(seq))


def test_error_in_the_recompute_can_be_followed_by_another_pass():
    class Once(nn.Linear):
        failed = False

        def forward(self, x):
            if is_recomputing() and not self.failed:
                self.failed = True
                raise KeyError("from F")
            return super().forward(x).sin()

    blocks = [AdditiveCoupling(mlp(), Once(8, 8)) for _ in range(2)]
    seq, x = ReversibleSequence(*blocks, engine="graph").double(), data()
    loss = loss_of(seq(x, x))
    for _ in blocks:
        with pytest.raises(KeyError, match="from F"):
            loss.backward(retain_graph=True)
    gradients(seq, x)
    loss.backward()
    got = gradients(seq, x)
    loss_of(plain(seq, x, x)).backward()
    assert_close(got, gradients(seq, x), 1e-11)


def test_gradients_equal_the_plain_run_bit_for_bit():
    """Where streams are exact, F's own graph gives F's own gradients."""
    seq, x = couplings(4, exact="sidecar", engine="graph"), torch.randn(4, 8)
    x.requires_grad_()
    loss_of(seq(x, x)).backward()
    got = gradients(seq, x)
    loss_of(plain(seq, x, x)).backward()
    for a, b in zip(got, gradients(seq, x), strict=True):
        assert torch.equal(a, b)


def test_an_input_needs_grad_but_not_the_function():
    """Frozen blocks pass gradients on; blocks that nothing reaches are not run."""
    frozen, used = HalfResidual(mlp()), HalfResidual(mlp())
    frozen.requires_grad_(False)
    seq = ReversibleSequence(frozen, used, engine="graph").double()
    a, c = data(), data()
    for leaves in ((a,), (c,), (a, c), ()):
        stack = [t if any(t is leaf for leaf in leaves) else t.detach() for t in (a, c)]
        loss_of(seq(*stack)).backward()
        got = gradients(seq, a, c)
        loss_of(plain(seq, *stack)).backward()
        assert_close(got, gradients(seq, a, c), 1e-11)
