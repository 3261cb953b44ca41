# SPDX-License-Identifier: Apache-2.0
"""Functions that do unusual things, and sequences that are called in unusual places."""

from __future__ import annotations

import copy
import pickle
import threading
import time

import pytest
import torch
from helpers.memory_meter import memory_meter
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
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from torch_sm3.reversible import AdditiveCoupling, ReversibleSequence, remember

pytestmark = pytest.mark.usefixtures("engine")


def data(n=4):
    return torch.randn(n, 8, dtype=torch.double, requires_grad=True)


def check(seq, run=None, rtol=1e-10, steps=2):
    """Compare gradients, buffers and the generator with the plain run of a copy."""
    twin, x = copy.deepcopy(seq), data(6)
    for step in range(steps):
        results = []
        for module, call in (
            (seq, run or seq),
            (twin, lambda *stack: plain(twin, *stack)),
        ):
            torch.manual_seed(step)
            loss_of(call(x, x)).backward()
            state = torch.get_rng_state()
            results.append((gradients(module, x), state, list(module.buffers())))
        assert_close(results[0][0], results[1][0], rtol)
        assert torch.equal(results[0][1], results[1][1])
        assert_close(results[0][2], results[1][2], rtol)


WRAPPED = {
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(8, 8)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(8, 8)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(8, 8)),
    "both": lambda: nn.Sequential(
        parametrizations.weight_norm(nn.Linear(8, 8)),
        nn.BatchNorm1d(8),
        nn.Dropout(0.4),
        parametrizations.spectral_norm(nn.Linear(8, 8)),
    ),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_parametrized_weights(name):
    check(couplings(2, WRAPPED[name]).double())


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("wrap", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_weights_that_a_hook_computes_into_an_attribute(wrap):
    seq = couplings(2, lambda: wrap(nn.Linear(8, 8))).double()
    x = data(6)
    for _ in range(2):
        seq.eval()  # the old spectral norm moves its buffer in training
        loss_of(seq(x, x)).backward()
        got = gradients(seq, x)
        loss_of(plain(seq, x, x)).backward()
        assert_close(got, gradients(seq, x), 1e-10)


def test_weights_of_a_parametrization_that_are_cached():
    seq = couplings(2, lambda: parametrizations.weight_norm(nn.Linear(8, 8))).double()

    def run(*stack):
        with parametrize.cached():
            return seq(*stack)

    check(seq, run)


class Caches(nn.Module):
    """Keeps what it computed, to be looked at."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        self.seen = torch.tanh(self.linear(x))
        return self.seen * x


def test_function_that_keeps_a_result_in_an_attribute():
    seq = couplings(2, Caches).double()
    x = data(6)
    for _ in range(3):
        loss_of(seq(x, x)).backward()
        got = gradients(seq, x)
        loss_of(plain(seq, x, x)).backward()
        assert_close(got, gradients(seq, x), 1e-10)


class Force(nn.Module):
    """The negative gradient of an energy."""

    def __init__(self):
        super().__init__()
        self.energy = TanhMLP(8, 8)

    def forward(self, x):
        with torch.enable_grad():
            at = x if x.requires_grad else x.detach().requires_grad_()
            energy = self.energy(at).square().sum()
            (force,) = torch.autograd.grad(energy, at, create_graph=True)
        return -force


def test_function_that_differentiates():
    check(couplings(2, Force).double())


class Writes(nn.Module):
    """Writes in place to its own results."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        y = self.linear(x)
        y.add_(1)
        y[0].mul_(2)
        return torch.tanh_(y)


class Constant(nn.Module):
    def forward(self, x):
        return torch.ones_like(x)


@pytest.mark.parametrize("make", [Writes, nn.Identity])
def test_other_functions(make):
    check(couplings(2, make).double())


def test_function_without_a_gradient():
    blocks = AdditiveCoupling(Constant(), mlp()), AdditiveCoupling(mlp(), Constant())
    check(ReversibleSequence(*blocks).double())


def test_streams_that_are_views_of_one_tensor():
    seq, base = couplings(2).double(), data(8)
    grads = []
    for run in (seq, lambda *stack: plain(seq, *stack)):
        turned = base.t()
        loss_of(run(turned[:4], turned[4:])).backward()
        grads.append(gradients(seq, base))
    assert_close(*grads, 1e-11)


def test_sequence_inside_a_hook():
    outer = couplings(2, lambda: mlp(dropout=0.3)).double()
    inner, z = couplings(2, lambda: mlp(dropout=0.3)).double(), data()
    x, results = data(), []
    for run in (0, 1):
        call = (lambda m, *s: m(*s)) if run == 0 else plain
        fired = []

        def hook(grad, call=call, fired=fired):
            with torch.enable_grad():
                loss_of(call(inner, z, z)).backward()
            fired.append(1)

        torch.manual_seed(0)
        y = call(outer, x, x)
        handles = [y[0].register_hook(hook), x.register_hook(hook)]
        loss_of(y).backward()
        for handle in handles:
            handle.remove()
        results.append([*gradients(outer, x), *gradients(inner, z)])
        assert len(fired) == 2
    assert_close(*results, 1e-10)


class Inner(nn.Module):
    """A function with a sequence inside, in a checkpointed region or not."""

    def __init__(self, depth, checkpointed):
        super().__init__()
        make = mlp if depth == 0 else lambda: Inner(depth - 1, checkpointed)
        self.seq = couplings(1, make)
        self.dropout = nn.Dropout(0.3)
        self.checkpointed = checkpointed

    def forward(self, x):
        if self.checkpointed:
            a, b = checkpoint(self.seq, x, x, use_reentrant=False)
        else:
            a, b = self.seq(x, x)
        return self.dropout(torch.tanh(a - b))


@pytest.mark.parametrize("checkpointed", [False, True])
def test_sequences_inside_functions_of_sequences(checkpointed):
    check(couplings(1, lambda: Inner(1, checkpointed)).double(), rtol=1e-9, steps=1)


@pytest.mark.parametrize("reentrant", [False, True])
def test_sequence_inside_a_checkpointed_region(reentrant):
    seq = couplings(2, lambda: mlp(dropout=0.5)).double()
    check(seq, lambda *stack: checkpoint(seq, *stack, use_reentrant=reentrant))


class Slow(nn.Module):
    """Gives other threads the time to draw and to count in between."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        x = self.norm(self.linear(x))
        time.sleep(0.005)
        return nn.functional.dropout(x, 0.5)


def in_threads(calls):
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_threads_take_turns_with_generators_and_buffers():
    seq = couplings(2, Slow).double()
    twin, xs = copy.deepcopy(seq), [data(6) for _ in range(3)]
    torch.manual_seed(0)
    losses = [loss_of(seq(x, x)) for x in xs]
    state = torch.get_rng_state()
    in_threads([loss.backward for loss in losses])
    assert torch.equal(state, torch.get_rng_state())
    got = gradients(seq, *xs)
    torch.manual_seed(0)
    for x in xs:
        loss_of(plain(twin, x, x)).backward()
    assert_close(got, gradients(twin, *xs), 1e-9)
    assert_close(list(seq.buffers()), list(twin.buffers()), 1e-9)


def test_threads_share_one_graph():
    seq, x = couplings(3, lambda: mlp(dropout=0.5)).double(), data()
    loss = loss_of(seq(x, x))
    loss.backward(retain_graph=True)
    want = gradients(seq, x)
    in_threads([lambda: loss.backward(retain_graph=True)] * 3)
    assert_close(gradients(seq, x), [3 * grad for grad in want], 1e-11)


def test_module_hooks_of_sequences_and_blocks():
    seq, x = couplings(2), torch.randn(4, 8, requires_grad=True)
    fired = []
    for name, module in (("seq", seq), ("block", seq[0])):
        module.register_forward_pre_hook(lambda *_, n=name: fired.append(n + " enter"))
        module.register_forward_hook(lambda *_, n=name: fired.append(n + " leave"))
        module.register_full_backward_hook(lambda *_, n=name: fired.append(n + " back"))
    loss_of(seq(x, x)).backward()
    forward = ["seq enter", "block enter", "block leave", "seq leave"]
    assert fired[:4] == forward and sorted(fired[4:]) == ["block back", "seq back"]
    got = gradients(seq, x)
    loss_of(plain(seq, x, x)).backward()
    assert_close(got, gradients(seq, x), 1e-5)


def test_hook_of_a_block_that_changes_a_stream():
    seq, x = couplings(2), torch.randn(4, 8)
    seq[1].register_forward_pre_hook(lambda module, args: (args[0] + 1, args[1]))
    with pytest.raises(RuntimeError, match="hooks of block 1 to leave item 0"):
        seq(x, x)


def test_hook_of_a_block_that_casts_a_stream():
    """As fully_shard does under a policy of mixed precision."""
    seq = couplings(3)
    seq[1].to(torch.bfloat16)
    seq[1].register_forward_pre_hook(
        lambda module, args: tuple([x.bfloat16() for x in args])
    )
    seq[1].register_forward_hook(
        lambda module, args, result: tuple([x.float() for x in result])
    )
    x = torch.randn(4, 8, requires_grad=True)
    loss_of(seq(x, x)).backward()
    got = gradients(seq, x)
    loss_of(plain(seq, x, x)).backward()
    for a, b in zip(got, gradients(seq, x), strict=True):
        assert (a - b).norm() <= 0.02 * b.norm()


def replica_of(module):
    """A shallow copy as nn.DataParallel makes it: weights are plain attributes."""
    copies = {}
    for part in module.modules():
        twin = part._replicate_for_data_parallel()
        copies[part] = twin
        for name, weight in part._parameters.items():
            if weight is not None:
                setattr(twin, name, weight.clone())
        for name, buffer in part._buffers.items():
            twin._buffers[name] = buffer.clone()
    for part, twin in copies.items():
        for name, child in part._modules.items():
            twin._modules[name] = copies[child]
    return copies[module]


def test_reversible_row_12_two_replicas():
    """Their weights are computed: gradients reach the weights they are copies of."""
    seq, xs = couplings(2, lambda: mlp(dropout=0.5)).double(), [data(), data()]
    results = []
    for run in (lambda m, *s: m(*s), plain):
        torch.manual_seed(0)
        replicas = [replica_of(seq) for _ in xs]
        outputs = [run(replica, x, x) for replica, x in zip(replicas, xs, strict=True)]
        sum(map(loss_of, outputs)).backward()
        results.append(gradients(seq, *xs))
    assert all(grad is not None for grad in results[1])
    assert_close(*results, 1e-10)


def test_reversible_row_12_replicas_leave_no_memory():
    seq, x = couplings(3), torch.randn(4, 8)
    lives = []
    for _ in range(4):
        with memory_meter() as used:
            replicas = [replica_of(seq) for _ in range(2)]
            sum(loss_of(replica(x, x)) for replica in replicas).backward()
            del replicas
        lives.append(used.live)
    # The first step makes the gradients, and teaches what functions do.
    assert lives[1:] == [0] * 3


def test_functional_call_between_forward_and_backward():
    seq, x = couplings(2), torch.randn(4, 8)
    weights = {k: v.detach().requires_grad_() for k, v in seq.named_parameters()}
    y = torch.func.functional_call(seq, weights, (x, x))
    with pytest.raises(RuntimeError, match="block 1 to keep its weights"):
        loss_of(y).backward()


def test_functional_call_around_both_passes():
    """The weights are in place while the backward pass runs."""
    seq, x = couplings(2), torch.randn(4, 8)
    weights = {k: (2 * v).detach() for k, v in seq.named_parameters()}

    class Step(nn.Module):
        def __init__(self):
            super().__init__()
            self.seq = seq

        def forward(self, x):
            return torch.autograd.grad(loss_of(self.seq(x, x)), self.seq[0].F[1].weight)

    named = {"seq." + k: v.requires_grad_() for k, v in weights.items()}
    (got,) = torch.func.functional_call(Step(), named, (x,))
    seq.load_state_dict(weights)
    (want,) = torch.autograd.grad(loss_of(plain(seq, x, x)), seq[0].F[1].weight)
    assert_close([got], [want], 1e-5)


class Routes(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, memory):
        y = self.linear(x + memory)
        return torch.where(remember(y > 0), y, memory)


@pytest.mark.parametrize("exact", ["none", "sidecar"])
def test_hooks_see_only_what_the_call_keeps(exact):
    """Final streams, side context, remembered tensors and sidecars, each once."""
    seq = couplings(3, Routes, exact=exact).double()
    x, memory = data(), data()

    def run(hooks):
        with hooks:
            y = seq(x, x, memory=memory)
        loss_of(y).backward()
        return y, gradients(seq, x, memory)

    packed = []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda t: packed.append(t) or t, lambda t: t
    )
    y, got = run(hooks)
    pointers = [t.data_ptr() for t in packed]
    assert all(pointers.count(t.data_ptr()) == 1 for t in (*y, memory))
    masks = [t for t in packed if t.dtype == torch.uint8 and t.numel() == 4]
    assert len(masks) >= 6
    parts = 6 * 4 if exact == "sidecar" else 0
    assert len(packed) == 2 + 1 + 6 + parts
    _, offloaded = run(torch.autograd.graph.save_on_cpu())
    for a, b in zip(got, offloaded, strict=True):
        assert torch.equal(a, b)


def test_copies_and_pickles_between_the_passes():
    """No call is a part of a module."""
    seq, x = couplings(2, lambda: mlp(dropout=0.2)).double(), data()
    sizes = [len(pickle.dumps(seq))]
    torch.manual_seed(0)
    y = seq(x, x)
    twins = copy.deepcopy(seq), pickle.loads(pickle.dumps(seq))
    sizes.append(len(pickle.dumps(seq)))
    loss_of(y).backward()
    want = gradients(seq, x)
    sizes.append(len(pickle.dumps(seq)))
    # A few flags are learned, nothing that grows with the streams.
    assert max(sizes) - min(sizes) < 1000
    for twin in twins:
        torch.manual_seed(0)
        loss_of(twin(x, x)).backward()
        for a, b in zip(gradients(twin, x), want, strict=True):
            assert torch.equal(a, b)
