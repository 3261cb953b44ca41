# SPDX-License-Identifier: Apache-2.0
"""The recompute sees what the first run saw, and the world outside notices nothing."""

from __future__ import annotations

import copy

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

from torch_sm3.reversible import (
    AdditiveCoupling,
    HalfResidual,
    ReversibleSequence,
    is_recomputing,
)

pytestmark = pytest.mark.usefixtures("engine")


def both(seq, inputs, seed=5, wrap=lambda call: call(), loss=loss_of):
    """Return gradients, outputs and generator state of the reversible and plain run."""
    results = []
    twin = copy.deepcopy(seq)
    for module, run in ((seq, seq), (twin, lambda *x: plain(twin, *x))):
        leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
        torch.manual_seed(seed)
        y = wrap(lambda: run(*leaves))  # noqa: B023
        loss(y).backward()
        state = torch.get_rng_state()
        results.append((gradients(module, *leaves), y, state, module.state_dict()))
    return results


def assert_same_world(left, right):
    assert torch.equal(left[2], right[2])
    assert list(left[3]) == list(right[3])
    for a, b in zip(left[3].values(), right[3].values(), strict=True):
        assert torch.equal(a, b)


def test_reversible_row_08_dropout_in_a_nested_sequence():
    inner = couplings(2, lambda: mlp(dropout=0.5))
    seq = ReversibleSequence(
        AdditiveCoupling(mlp(dropout=0.5), mlp(dropout=0.5)), inner, inner[0]
    ).double()
    assert len(seq) == 4
    x = torch.randn(6, 8, dtype=torch.double, requires_grad=True)
    got, want = both(seq, (x, x))
    assert_close(got[0], want[0], 1e-11)
    assert all(torch.equal(a, b) for a, b in zip(got[1], want[1], strict=True))
    assert_same_world(got, want)


def test_reversible_row_09_generator_after_the_step():
    seq = couplings(3, lambda: mlp(dropout=0.5))
    x = torch.randn(4, 8)
    draws = []
    for run in (seq, lambda *s: plain(seq, *s)):
        torch.manual_seed(1)
        loss_of(run(x, x)).backward()
        draws.append(torch.rand(5))
    assert torch.equal(*draws)


def test_generators_of_the_user():
    """They are set back for the recompute, and stand as after the plain run."""
    generator = torch.Generator()

    class Noise(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            noise = torch.rand(x.shape, generator=generator, dtype=x.dtype)
            return self.linear(x) * noise

    seq = couplings(3, Noise, generators=[generator]).double()
    x = torch.randn(4, 8, dtype=torch.double, requires_grad=True)
    results = []
    for run in (seq, lambda *s: plain(seq, *s)):
        generator.manual_seed(1)
        loss_of(run(x, x)).backward()
        results.append([*gradients(seq, x), generator.get_state().double()])
    assert_close(*results, 1e-11)


def test_only_some_functions_draw():
    seq = ReversibleSequence(
        AdditiveCoupling(mlp(dropout=0.5), mlp()),
        AdditiveCoupling(mlp(), mlp(dropout=0.5)),
    ).double()
    x = torch.randn(4, 8, dtype=torch.double, requires_grad=True)
    got, want = both(seq, (x, x))
    assert_close(got[0], want[0], 1e-11)
    assert_same_world(got, want)


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.linear = nn.Linear(8, 8)
        self.register_buffer("table", torch.arange(1000.0))

    def forward(self, x):
        return self.linear(self.norm(x))


@pytest.mark.parametrize("training", [True, False])
def test_reversible_row_11_batch_norm_counts_once(training):
    seq = couplings(3, Norm).double().train(training)
    x = torch.randn(16, 8, dtype=torch.double, requires_grad=True)
    for _ in range(3):
        before = {n: b for n, b in seq.named_buffers()}
        got, want = both(seq, (x, x))
        assert_close(got[0], want[0], 1e-10)
        assert_same_world(got, want)
        # The tensors are the same objects as before, not copies.
        assert all(before[n] is b for n, b in seq.named_buffers())
    counts = {int(b.norm.num_batches_tracked) for b in (seq[0].F, seq[2].G)}
    assert counts == ({3} if training else {0})


def test_batch_norm_with_momentum_none_is_recomputed_from_the_old_values():
    class Running(nn.Module):
        """Its output depends on the running statistics themselves."""

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen += x.detach().abs().mean()
            return self.linear(x) * self.seen

    seq = couplings(2, Running).double()
    x = torch.randn(4, 8, dtype=torch.double, requires_grad=True)
    for _ in range(2):
        got, want = both(seq, (x, x))
        assert_close(got[0], want[0], 1e-11)
        assert_same_world(got, want)


def test_buffer_that_is_replaced():
    class Replacing(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("count", torch.ones((), dtype=torch.double))

        def forward(self, x):
            self.count = self.count + 1
            return self.linear(x) / self.count

    seq = couplings(2, Replacing).double()
    x = torch.randn(4, 8, dtype=torch.double, requires_grad=True)
    for _ in range(2):
        got, want = both(seq, (x, x))
        assert_close(got[0], want[0], 1e-11)
        assert_same_world(got, want)
    assert seq[0].F.count == 3


def test_buffer_that_changes_in_a_later_call_only_is_refused():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("state", torch.zeros(1))
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            if self.calls > 2:
                self.state += 1
            return self.linear(x)

    seq = ReversibleSequence(AdditiveCoupling(Late(), mlp()))
    x = torch.randn(2, 8)
    loss_of(seq(x, x)).backward()
    with pytest.raises(RuntimeError, match=r"block 0.*buffer 'state'"):
        seq(x, x)


def test_training_flags_of_the_first_run():
    seq = couplings(2, lambda: mlp(dropout=0.5)).double()
    x = torch.randn(4, 8, dtype=torch.double, requires_grad=True)
    seq[0].F.eval()
    torch.manual_seed(0)
    y = seq(x, x)
    seq.eval()
    seq[1].G[3].train()
    flags = [m.training for m in seq.modules()]
    loss_of(y).backward()
    assert flags == [m.training for m in seq.modules()]
    got = gradients(seq, x)
    seq.train()
    seq[0].F.eval()
    torch.manual_seed(0)
    loss_of(plain(seq, x, x)).backward()
    assert_close(got, gradients(seq, x), 1e-11)


@pytest.mark.parametrize("backward_inside", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_reversible_row_18_autocast(dtype, backward_inside):
    seq = couplings(3)
    x = torch.randn(4, 8, requires_grad=True)
    twin = copy.deepcopy(seq)
    results = []
    for module, run in ((seq, seq), (twin, lambda *s: plain(twin, *s))):
        with torch.autocast("cpu", dtype):
            y = run(x, x)
            assert [t.dtype for t in y] == [torch.float32] * 2
            loss = loss_of(y)
            if backward_inside:
                loss.backward()
        if not backward_inside:
            with torch.autocast(
                "cpu", torch.bfloat16 if dtype is torch.float16 else torch.float16
            ):
                loss.backward()
        results.append([*y, *gradients(module, x)])
    assert_close(results[0], results[1], 2e-2)
    for a, b in zip(results[0][:2], results[1][:2], strict=True):
        assert torch.equal(a, b)


def test_recompute_is_not_under_the_autocast_of_the_backward_pass():
    seen = []

    class Spy(nn.Linear):
        def forward(self, x):
            value = super().forward(x)
            seen.append(value.dtype)
            return value

    seq = couplings(1, lambda: Spy(4, 4))
    x = torch.randn(2, 4)
    y = seq(x, x)
    with torch.autocast("cpu", torch.bfloat16):
        loss_of(y).backward()
    assert seen == [torch.float32] * 4


def test_nested_autocast_and_weight_shared_with_a_plain_layer():
    """A cast made without grad in the first run must not serve a later layer."""

    class Nested(nn.Module):
        def __init__(self, shared):
            super().__init__()
            self.shared = shared

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return self.shared(x)

    shared = nn.Linear(8, 8)
    seq = ReversibleSequence(
        *[AdditiveCoupling(Nested(shared), shared) for _ in range(2)]
    )
    x = torch.randn(4, 8, requires_grad=True)
    grads = []
    for run in (seq, lambda *s: plain(seq, *s)):
        with torch.autocast("cpu", torch.bfloat16):
            y = run(x, x)
            out = shared(y[0] + y[1])
        out.float().square().mean().backward()
        grads.append(gradients(shared, x))
    assert grads[0][1] is not None
    assert_close(grads[0], grads[1], 2e-2)


def test_autocast_cache_is_switched_back_on():
    seq = couplings(1)
    x = torch.randn(2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        seq(x, x)
        assert torch.is_autocast_cache_enabled()


def test_reversible_row_15_grad_scaler_with_an_infinite_step():
    seq = couplings(2)
    twin = copy.deepcopy(seq)
    weights = []
    for module, run in ((seq, seq), (twin, lambda *s: plain(twin, *s))):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        for step in range(3):
            torch.manual_seed(step)
            x = torch.randn(4, 8)
            before = [p.detach().clone() for p in module.parameters()]
            with torch.autocast("cpu", torch.float16):
                loss = loss_of(run(x, x))
            scaler.scale(loss * (float("inf") if step == 1 else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            unchanged = all(
                torch.equal(a, b)
                for a, b in zip(before, module.parameters(), strict=True)
            )
            assert unchanged == (step == 1)
        weights.append([p.detach() for p in module.parameters()])
    assert_close(weights[0], weights[1], 2e-2)


def test_other_dtype_of_the_function_is_cast_on_the_sum():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x).bfloat16()

    seq = ReversibleSequence(*[AdditiveCoupling(Half(), Half()) for _ in range(2)])
    x = torch.randn(3, 4, requires_grad=True)
    got, want = both(seq, (x, x))
    assert got[1][0].dtype == torch.float32
    assert_close(got[0], want[0], 1e-2)


def test_error_in_the_recompute_restores_everything():
    class Failing(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.dropout = nn.Dropout(0.5)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count += 1
            x = self.dropout(self.linear(x))
            if is_recomputing():
                raise KeyError("from F")
            return x

    seq = ReversibleSequence(AdditiveCoupling(Failing(), mlp()))
    x = torch.randn(2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        y = seq(x, x)
    seq.eval()
    count = seq[0].F.count
    state = torch.get_rng_state()
    with pytest.raises(KeyError, match="from F"):
        loss_of(y).backward()
    assert torch.equal(state, torch.get_rng_state())
    assert seq[0].F.count is count and count == 1
    assert not any(m.training for m in seq.modules())
    assert not torch.is_autocast_enabled("cpu")


def test_error_in_the_first_run_restores_everything():
    class Failing(nn.Linear):
        def forward(self, x):
            raise KeyError("from F")

    seq = ReversibleSequence(AdditiveCoupling(mlp(), Failing(8, 8)))
    x = torch.randn(2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(KeyError, match="from F"):
            seq(x, x)
        assert torch.is_autocast_cache_enabled() and torch.is_grad_enabled()


def test_half_residual_of_several_layers_replays_dropout():
    seq = ReversibleSequence(
        HalfResidual(nn.Linear(8, 8), nn.Dropout(0.4), nn.Linear(8, 8)),
    ).double()
    x = torch.randn(4, 8, dtype=torch.double, requires_grad=True)
    got, want = both(seq, (x, x))
    assert_close(got[0], want[0], 1e-11)
    assert_same_world(got, want)
