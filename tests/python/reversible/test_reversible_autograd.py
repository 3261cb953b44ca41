# SPDX-License-Identifier: Apache-2.0
"""How the node engine behaves inside autograd: hooks, retaining, partial passes."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from helpers.reversible_models import (
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
    ReversibleSequence,
    Select,
    Swap,
    is_recomputing,
)

pytestmark = pytest.mark.usefixtures("engine")


def data(n=4, **options):
    return torch.randn(n, 8, dtype=torch.double, requires_grad=True, **options)


@pytest.mark.parametrize("activation", [torch.relu, torch.sigmoid])
def test_reversible_row_01_op_that_saves_its_output(activation):
    seq, x = couplings(2).double(), data()
    h = activation(x)
    loss_of(seq(h, h)).backward()
    got = gradients(seq, x)
    h = activation(x)
    loss_of(plain(seq, h, h)).backward()
    assert_close(got, gradients(seq, x), 1e-11)


def test_reversible_row_02_many_blocks_and_steps():
    torch.manual_seed(1)
    seq = couplings(110, lambda: mlp(8, norm=True))
    twin = copy.deepcopy(seq)
    for module in (seq, twin):
        with torch.no_grad():
            for p in module.parameters():
                p.mul_(0.3)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3) for m in (seq, twin)]
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(4, 8)
        loss = loss_of(seq(x, x))
        loss.backward()
        assert torch.isfinite(loss)
        loss_of(plain(twin, x, x)).backward()
        for a, b in zip(seq.parameters(), twin.parameters(), strict=True):
            assert (a.grad - b.grad).norm() <= 1e-4 * b.grad.norm() + 1e-7
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        twin.load_state_dict(seq.state_dict())


@pytest.mark.parametrize("retain", [True, False])
def test_reversible_row_03_two_losses_share_an_output(retain):
    seq, x = couplings(3).double(), data()
    y = seq(x, x)
    first, second = y[0].sin().sum(), (y[0] * y[1]).sum()
    first.backward(retain_graph=retain)
    if not retain:
        with pytest.raises(
            RuntimeError, match="backward through the graph a second time"
        ):
            second.backward()
        return
    second.backward()
    got = gradients(seq, x)
    z = plain(seq, x, x)
    (z[0].sin().sum() + (z[0] * z[1]).sum()).backward()
    assert_close(got, gradients(seq, x), 1e-11)


@pytest.mark.parametrize("pick", [0, 1])
def test_second_backward_without_retain_is_the_stock_error(pick):
    seq, x = couplings(2).double(), data()
    y = seq(x, x)
    loss_of(y).backward()
    # A new loss: its own graph is fresh, that of the sequence is freed.
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y[pick].sum().backward()


def test_retain_graph_gives_the_same_bits():
    seq, x = (
        couplings(3, lambda: mlp(dropout=0.5)),
        torch.randn(4, 8, requires_grad=True),
    )
    loss = loss_of(seq(x, x))
    loss.backward(retain_graph=True)
    first = gradients(seq, x)
    loss.backward(retain_graph=True)
    second = gradients(seq, x)
    loss.backward()
    third = gradients(seq, x)
    for a, b, c in zip(first, second, third, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


def test_reversible_row_10_raw_data_input():
    seq, x = couplings(2), torch.randn(4, 8)
    y = seq(x, x)
    assert y[0].requires_grad and y[1].requires_grad
    before = copy.deepcopy(seq.state_dict())
    loss_of(y).backward()
    torch.optim.SGD(seq.parameters(), lr=0.1).step()
    assert all(not torch.equal(before[k], v) for k, v in seq.state_dict().items())


def test_frozen_parameters_and_frozen_blocks():
    seq, x = couplings(4).double(), torch.randn(3, 8, dtype=torch.double)
    for p in seq[0].parameters():
        p.requires_grad_(False)
    for p in seq[2].F.parameters():
        p.requires_grad_(False)
    seq[3].G[1].weight.requires_grad_(False)
    loss_of(seq(x, x)).backward()
    got = gradients(seq)
    loss_of(plain(seq, x, x)).backward()
    want = gradients(seq)
    assert_close(got, want, 1e-11)
    assert sum(g is None for g in want) == 12 + 6 + 1


@pytest.mark.parametrize("grads", ["no_grad", "inference_mode", "all_frozen"])
def test_without_grad_there_is_no_node(grads):
    seq, x = couplings(2, lambda: mlp(dropout=0.5)), torch.randn(4, 8)
    if grads == "all_frozen":
        seq.requires_grad_(False)
        y = seq(x, x)
    else:
        with getattr(torch, grads)():
            y = seq(x, x)
    assert y[0].grad_fn is None and not y[0].requires_grad


def test_autograd_grad_of_some_inputs():
    seq, x = couplings(3).double(), data()
    weight = seq[1].G[4].weight
    got = torch.autograd.grad(loss_of(seq(x, x)), [weight, x])
    want = torch.autograd.grad(loss_of(plain(seq, x, x)), [weight, x])
    assert_close(got, want, 1e-11)
    assert all(p.grad is None for p in seq.parameters())
    (got,) = torch.autograd.grad(loss_of(seq(x, x)), [weight])
    assert_close([got], want[:1], 1e-11)


def test_independent_halves_may_run_in_any_order():
    """The second half-residual is run first, then the first, and the other way."""
    seq = ReversibleSequence(
        HalfResidual(mlp(dropout=0.5)),
        Select([2, 3, 0, 1]),
        HalfResidual(mlp(dropout=0.5)),
    ).double()
    stack = [data() for _ in range(4)]
    results = []
    for flip in (False, True):
        torch.manual_seed(0)
        y = seq(*stack)
        if flip:
            y[2].grad_fn._set_sequence_nr(y[0].grad_fn._sequence_nr() + 1)
        torch.autograd.backward([y[0].sum(), y[2].sin().sum()])
        results.append(gradients(seq, *stack))
    torch.manual_seed(0)
    z = plain(seq, *stack)
    torch.autograd.backward([z[0].sum(), z[2].sin().sum()])
    want = gradients(seq, *stack)
    for got in results:
        assert_close(got, want, 1e-11)


def test_reversible_row_25_hooks_fire_once():
    seq, x = couplings(2), torch.randn(4, 8, requires_grad=True)
    calls: dict[str, list[torch.Tensor]] = {}
    for name, p in seq.named_parameters():
        p.register_hook(lambda g, name=name: calls.setdefault(name, []).append(g))
        p.register_post_accumulate_grad_hook(
            lambda p, name=name: calls.setdefault(name + "!", []).append(p.grad)
        )
    x.register_hook(lambda g: calls.setdefault("x", []).append(g))
    loss_of(seq(x, x)).backward()
    assert len(calls) == 2 * len(list(seq.parameters())) + 1
    for name, p in seq.named_parameters():
        assert [torch.equal(g, p.grad) for g in calls[name]] == [True]
        assert len(calls[name + "!"]) == 1
    assert [torch.equal(g, x.grad) for g in calls["x"]] == [True]


def test_hook_that_changes_the_gradient_and_hook_of_a_tied_weight():
    shared = mlp()
    seq = ReversibleSequence(
        *[AdditiveCoupling(shared, shared) for _ in range(2)]
    ).double()
    x, fired = data(), []
    shared[1].weight.register_hook(lambda g: fired.append(g) or 2 * g)
    loss_of(seq(x, x)).backward()
    got = gradients(seq, x)
    assert len(fired) == 1
    loss_of(plain(seq, x, x)).backward()
    assert len(fired) == 2
    assert_close(got, gradients(seq, x), 1e-11)


def test_module_hooks():
    seq, x = couplings(1), torch.randn(4, 8)
    forwards, backwards = [], []
    seq[0].F[1].register_forward_hook(lambda *a: forwards.append(is_recomputing()))
    seq[0].F[1].register_full_backward_hook(lambda *a: backwards.append(1))
    loss_of(seq(x, x)).backward()
    assert forwards == [False, True] and backwards == [1]


def test_checkpoint_inside_and_outside():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp(dropout=0.5)

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    seq = couplings(2, Checkpointed).double()
    x, grads = data(), []
    for run in (
        seq,
        lambda *s: checkpoint(seq, *s, use_reentrant=False),
        lambda *s: plain(seq, *s),
    ):
        torch.manual_seed(0)
        loss_of(run(x, x)).backward()
        grads.append(gradients(seq, x))
    assert_close(grads[0], grads[2], 1e-11)
    assert_close(grads[1], grads[2], 1e-11)


def test_sequence_inside_a_function():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.seq = couplings(2, lambda: mlp(dropout=0.3))

        def forward(self, x):
            a, b = self.seq(x, x)
            return a - b

    seq, x = couplings(2, Inner).double(), data()
    grads = []
    for run in (seq, lambda *s: plain(seq, *s)):
        torch.manual_seed(0)
        loss_of(run(x, x)).backward()
        grads.append(gradients(seq, x))
    assert_close(*grads, 1e-10)


@pytest.mark.parametrize("same", [True, False])
def test_backward_pass_inside_a_hook(same):
    """Over another call, or over the one that is being differentiated."""
    seq, x = couplings(3, lambda: mlp(dropout=0.3)).double(), data()

    def run(module):
        torch.manual_seed(0)
        y, inner = module(x, x), []

        def hook(_):
            if not inner:  # the inner pass runs the hook, too
                inner.append(None)
                with torch.enable_grad():
                    z = y if same else module(x.detach(), x.detach())
                    loss = (z[0] * z[1]).sum()
                weight = seq[0].F[1].weight
                inner[0] = torch.autograd.grad(loss, weight, retain_graph=True)[0]

        y[0].register_hook(hook)
        loss_of(y).backward(retain_graph=True)
        return [*inner, *gradients(seq, x)]

    assert_close(run(seq), run(lambda *s: plain(seq, *s)), 1e-11)


def test_backward_from_several_threads():
    seq, xs = couplings(3).double(), [data() for _ in range(3)]
    losses = [loss_of(seq(x, x)) for x in xs]
    threads = [threading.Thread(target=loss.backward) for loss in losses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    got = gradients(seq, *xs)
    for x in xs:
        loss_of(plain(seq, x, x)).backward()
    assert_close(got, gradients(seq, *xs), 1e-11)


@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
def test_anomaly_mode():
    seq, x = couplings(2).double(), data()
    with torch.autograd.detect_anomaly(check_nan=True):
        loss_of(seq(x, x)).backward()
    got = gradients(seq, x)
    loss_of(plain(seq, x, x)).backward()
    assert_close(got, gradients(seq, x), 1e-11)


def test_reversible_row_14_growth_of_magnitudes_keeps_the_gradients():
    seq, x = couplings(12), torch.randn(16, 8, requires_grad=True)
    loss_of(seq(x, x)).backward()
    got = gradients(seq, x)
    loss_of(plain(seq, x, x)).backward()
    assert_close(got, gradients(seq, x), 1e-3)


def test_copy_pickle_and_state_dict_between_steps():
    seq, x = couplings(2), torch.randn(4, 8)
    loss_of(seq(x, x)).backward()
    assert next(iter(seq.state_dict())) == "blocks.0.F.0.weight"
    for twin in (copy.deepcopy(seq), pickle.loads(pickle.dumps(seq))):
        assert torch.equal(twin(x, x)[0], seq(x, x)[0])
        twin.load_state_dict(seq.state_dict())


def test_container():
    seq = couplings(5)
    assert len(seq) == 5 and seq[-1] is list(seq)[4]
    part = seq[1:3]
    assert isinstance(part, ReversibleSequence) and part[0] is seq[1] and len(part) == 2
    nested = ReversibleSequence(part, Swap(), ReversibleSequence(seq[0], seq[3:]))
    assert len(nested) == 2 + 1 + 1 + 2
    assert all(not isinstance(b, ReversibleSequence) for b in nested)


def test_new_weights_between_calls():
    """Parameters are read in every call, so replacing them works."""
    seq, x = couplings(1), torch.randn(4, 8)
    loss_of(seq(x, x)).backward()
    seq[0].F[1] = nn.Linear(8, 16)
    loss_of(seq(x, x)).backward()
    assert seq[0].F[1].weight.grad is not None
