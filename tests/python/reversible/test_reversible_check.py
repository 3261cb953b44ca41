# SPDX-License-Identifier: Apache-2.0
"""check_reversible: what it finds, what it plans, and that it changes nothing."""

import copy

import pytest
import torch
from helpers.reversible_models import couplings, loss_of, mlp
from torch import nn

from torch_sm3.reversible import (
    AdditiveCoupling,
    Block,
    HalfResidual,
    LSHSelfAttention,
    ReversibleSequence,
    Swap,
    check_reversible,
    remember,
)


class Calls(nn.Module):
    """A module that is a function, with a matrix that its graph saves a lot for."""

    def __init__(self, function, width=8):
        super().__init__()
        self.function = function
        self.mlp = mlp(width)

    def forward(self, x):
        return self.function(self, self.mlp(x))


def deep(function, count=6):
    """A stack long enough that storing it is no option."""
    blocks = [AdditiveCoupling(mlp(), mlp()) for _ in range(count - 1)]
    return ReversibleSequence(AdditiveCoupling(Calls(function), mlp()), *blocks)


def data(n=4, **options):
    torch.manual_seed(0)
    return torch.randn(n, 8, **options), torch.randn(n, 8, **options)


def first(function):
    """Report and plan of one block with this function."""
    report = check_reversible(deep(function), *data())
    return report.blocks[0], report.plan[0]


def test_sound_blocks_are_reversible():
    report = check_reversible(couplings(6), *data())
    assert report.ok
    assert [entry.plan for entry in report.plan] == ["reversible"] * 6
    for block in report.blocks:
        assert block.repeatable and block.same_with_grad and not block.error
        assert not (block.generators or block.buffers or block.choices)
        assert 0 < block.max_ulp and 0 < block.max_rel < 1e-5
        assert block.grad_rel < 1e-4
        assert block.stream_bytes == 2 * 4 * 8 * 4
        assert block.saved_bytes > block.stream_bytes
    assert len(str(report).splitlines()) == 6
    assert "reversible, nothing speaks against it" in report.explain()


def test_exact_modes_come_back_exactly():
    for exact in ("grid", "sidecar"):
        report = check_reversible(couplings(6, exact=exact), *data())
        assert all(b.max_ulp == 0 and b.grad_rel == 0 for b in report.blocks)


def test_dropout_and_batch_norm_are_reported():
    block, entry = first(lambda self, x: nn.functional.dropout(x, 0.5))
    assert block.generators == ("cpu",) and entry.plan == "reversible"
    norm = nn.BatchNorm1d(8)
    seq = ReversibleSequence(
        *[AdditiveCoupling(nn.Sequential(norm, mlp()), mlp()) for _ in range(6)]
    )
    block = check_reversible(seq, *data()).blocks[0]
    assert set(block.buffers) == {
        "running_mean",
        "running_var",
        "num_batches_tracked",
    }


CHOICES = {
    "topk": lambda scores: scores.topk(2).indices,
    "argmax": lambda scores: scores.argmax(-1, keepdim=True),
    "sort": lambda scores: scores.sort().indices,
    "max": lambda scores: scores.max(-1, keepdim=True).indices,
}


@pytest.mark.parametrize("name", CHOICES)
def test_choices_are_found_unless_remembered(name):
    choose = CHOICES[name]
    block, entry = first(lambda self, x: x * 0 + x.gather(-1, choose(x)).mean())
    assert block.choices == (name,)
    assert entry.plan == "checkpoint" and "remember" in entry.reason
    kept, entry = first(
        lambda self, x: x * 0 + x.gather(-1, remember(choose(x))).mean()
    )
    assert kept.choices == () and kept.remembered == 1
    assert entry.plan == "remember"


@pytest.mark.parametrize("use", ["where", "index"])
def test_comparisons_are_choices_where_they_select(use):
    def select(self, x):
        mask = x > 0
        if use == "where":
            return torch.where(mask, x, 2 * x)
        return x + x[mask].sum()

    assert first(select)[0].choices == ("gt",)
    multiplied, _ = first(lambda self, x: x * (x > 0))
    assert multiplied.choices == ()


def test_rounding_is_a_choice():
    assert first(lambda self, x: x.round())[0].choices == ("round",)


def test_unremembered_choices_are_no_matter_in_exact_modes():
    seq = deep(lambda self, x: x * 0 + x.gather(-1, x.topk(2).indices).mean())
    seq = ReversibleSequence(*seq, exact="sidecar")
    assert check_reversible(seq, *data()).plan[0].plan == "reversible"


def test_function_that_differs_from_run_to_run_is_stored():
    count = iter(range(1000))
    block, entry = first(lambda self, x: x + next(count))
    assert not block.repeatable and entry.plan == "store"


def test_function_whose_bits_hang_on_grad_mode():
    def differ(self, x):
        return x + 1e-3 if torch.is_grad_enabled() else x

    assert not first(differ)[0].same_with_grad


def test_undeclared_tensor():
    scale = torch.ones(3, requires_grad=True)
    assert first(lambda self, x: x * scale.sum())[0].undeclared == ((3,),)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda self, x: x[..., :3], r"shape \(4, 8\), but got \(4, 3\)"),
        (lambda self, x: x.long(), "floating tensor"),
        (lambda self, x: None, "NoneType"),
    ],
)
def test_functions_that_cannot_be_reversed(function, message):
    report = check_reversible(deep(function), *data())
    assert not report.ok
    assert [entry.plan for entry in report.plan] == ["error"] * 6
    with pytest.raises((RuntimeError, TypeError, ValueError), match=message):
        raise ValueError(report.blocks[0].error)
    seq = ReversibleSequence(*deep(function), plan="auto")
    with pytest.raises(RuntimeError, match="blocks that can be reversed"):
        seq(*data())


def test_function_that_writes_to_its_input():
    seq = ReversibleSequence(
        *[AdditiveCoupling(nn.ReLU(inplace=True), mlp()) for _ in range(6)]
    )
    report = check_reversible(seq, *data())
    assert "in place" in report.blocks[0].error and not report.ok


def test_16_bit_streams_are_checkpoints():
    seq = couplings(6, allow_drift=True).to(torch.bfloat16)
    report = check_reversible(seq, *data(dtype=torch.bfloat16))
    assert {entry.plan for entry in report.plan} == {"checkpoint"}
    assert "sidecar" in report.plan[0].reason


def test_bad_round_trip_is_a_checkpoint():
    class Lossy(Block):
        n_in = n_out = 1

        def __init__(self):
            super().__init__()
            self.mlp = mlp()

        def forward(self, x):
            return (x + self.mlp(x * 0),)

        def inverse(self, y):
            return (y * 1.01 - self.mlp(y * 0),)

    seq = ReversibleSequence(*[Lossy() for _ in range(6)])
    report = check_reversible(seq, data()[0])
    assert {entry.plan for entry in report.plan} == {"checkpoint"}
    assert report.blocks[0].max_rel > 1e-3
    assert check_reversible(seq, data()[0], max_rel=1.0).ok


def test_short_stack_is_stored():
    seq = ReversibleSequence(HalfResidual(nn.Linear(8, 8)), Swap())
    report = check_reversible(seq, *data())
    assert report.plan[0].plan == "store"
    assert report.plan[1].reason == "no function"


def test_automatic_plan_is_made_once_and_gives_the_gradients():
    torch.manual_seed(1)
    blocks = list(deep(lambda self, x: x * 0 + x.gather(-1, x.topk(2).indices).mean()))
    seq = ReversibleSequence(*blocks, plan="auto")
    assert seq.plan_report == ()
    x = data()
    loss_of(seq(*x)).backward()
    plans = [entry.plan for entry in seq.plan_report]
    assert plans == ["checkpoint", *["reversible"] * 5]
    ours = [p.grad for p in seq.parameters()]
    seq.zero_grad()
    loss_of(ReversibleSequence(*blocks, plan="store")(*x)).backward()
    for mine, p in zip(ours, seq.parameters(), strict=True):
        torch.testing.assert_close(mine, p.grad, rtol=1e-4, atol=1e-5)


def test_nothing_is_changed():
    norm = nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5), mlp())
    seq = ReversibleSequence(
        *[AdditiveCoupling(copy.deepcopy(norm), mlp()) for _ in range(3)]
    )
    for p in seq.parameters():
        p.grad = torch.full_like(p, 3.0)
    state = copy.deepcopy(seq.state_dict())
    x = data()
    before = torch.get_rng_state()
    check_reversible(seq, *x)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(v, state[k]) for k, v in seq.state_dict().items())
    assert all(torch.equal(p.grad, torch.full_like(p, 3.0)) for p in seq.parameters())
    assert not any(t.requires_grad or t.grad_fn for t in x)


def test_side_context_reaches_the_functions():
    class WithScale(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = mlp()

        def forward(self, x, *, scale):
            return self.mlp(x) * scale

    seq = ReversibleSequence(
        *[AdditiveCoupling(WithScale(), WithScale()) for _ in range(6)]
    )
    report = check_reversible(seq, *data(), scale=torch.tensor(0.5, requires_grad=True))
    assert report.ok


def test_argument_that_is_no_block():
    with pytest.raises(TypeError, match=r"but got Linear \(argument 'module'\)"):
        check_reversible(nn.Linear(2, 2), torch.ones(1, 2))


def test_numbers_made_of_a_choice_are_one_until_they_are_remembered():
    def use(x, chosen):
        return x * 0 + x.gather(-1, chosen).mean()

    def shifted(self, x):
        return use(x, (x.topk(2).indices + 1) % 8)

    def kept(self, x):
        chosen = remember((x.topk(2).indices + 1) % 8)
        return use(x, chosen.sort().indices)

    assert first(shifted)[0].choices == ("topk",)
    assert first(kept)[0].choices == ()


@pytest.mark.parametrize("inside", [True, False])
def test_buckets_of_hashing_attention_are_no_choice(inside):
    attention = [LSHSelfAttention(8, 2, 4, 4, chunk_len=4, n_hashes=2, n_buckets=4)]
    attention.append(LSHSelfAttention(8, 2, 4, 4, chunk_len=4, n_hashes=2, n_buckets=4))
    layers = [nn.LayerNorm(8)] if inside else [nn.LayerNorm(8), attention[0]]
    block = HalfResidual(*layers, attention=attention[1] if inside else None)
    seq = ReversibleSequence(*[b for _ in range(6) for b in (block, Swap())])
    x = torch.randn(2, 12, 8)
    report = check_reversible(seq, x, x.flip(1))
    assert report.blocks[0].choices == ()
    assert report.plan[0].plan == ("reversible" if inside else "remember")
