# SPDX-License-Identifier: Apache-2.0
"""What went wrong in the trainers that these descend from, letter by letter."""

import ast
import gc
from pathlib import Path

import pytest
import torch
from helpers.trainer_models import WIDTH, assert_equal, batch, build, make, mlp, state
from torch import nn

import torch_sm3
from torch_sm3.reversible import AdditiveCoupling, HalfResidual, inverse
from torch_sm3.trainer import ReversibleTrainer, Trainer

KINDS = ["reversible", "store"]


class Streams(nn.Linear):
    """One item to two streams."""

    def __init__(self, n_in=4, n_out=WIDTH):
        super().__init__(n_in, n_out)

    def forward(self, x):
        h = super().forward(x)
        return h, h


class Sum(nn.Module):
    """A loss of two streams; with more items, they are left alone."""

    n_in = 2

    def forward(self, a, b):
        return (a * b).sum()


def trainer(kind, blocks, loss, lr=0.1, optimizer=None, **options):
    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=lr)

    cls = ReversibleTrainer if kind == "reversible" else Trainer.from_blocks
    return cls(blocks, loss, optimizer or sgd, **options)


def coupling(rate=0.0):
    return AdditiveCoupling(mlp(rate), mlp(rate))


@pytest.mark.parametrize("strategy", ["two_pass", "host_grads"])
@pytest.mark.parametrize("n", [1, 2])
def test_trainer_defect_a_running_statistics_advance_once(n, strategy):
    torch.manual_seed(0)
    norms = [nn.BatchNorm1d(4), nn.BatchNorm1d(WIDTH)]
    block = AdditiveCoupling(nn.Sequential(norms[1], nn.Linear(WIDTH, WIDTH)), mlp(0))
    made = trainer(
        "reversible",
        [([norms[0], Streams()], [block])],
        Sum(),
        n_microbatches=n,
        clip_grad_norm=0.1,
        clip_strategy=strategy,
    )
    x = torch.randn(6, 4)
    mean = torch.zeros(4)
    for step in range(2):
        made.one_step(x, rng=0)
        for part in x.split(6 // n):
            mean = 0.9 * mean + 0.1 * part.mean(0)
        torch.testing.assert_close(norms[0].running_mean, mean)
        assert all(int(m.num_batches_tracked) == n * (step + 1) for m in norms)


@pytest.mark.parametrize("kind", KINDS)
def test_trainer_defect_b_clipping_is_global(kind):
    torch.manual_seed(0)
    made = trainer(
        kind,
        [([Streams()], [coupling(), coupling()])],
        Sum(),
        lr=1.0,
        clip_grad_norm=0.01,
    )
    layers = made._layers
    before = [p.detach().clone() for layer in layers for p in layer.owned]
    made.one_step(torch.randn(3, 4), rng=0)
    after = [p.detach() for layer in layers for p in layer.owned]
    moved = torch.cat([(b - a).flatten() for a, b in zip(before, after, strict=True)])
    torch.testing.assert_close(moved.norm(), torch.tensor(0.01), rtol=1e-3, atol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", ["empty first", "empty last", "no blocks"])
def test_trainer_defect_c_blocks_may_lack_reversible_or_standard_layers(kind, order):
    torch.manual_seed(0)
    standard = ([Streams()], [])
    reversible = ([], [coupling()])
    blocks = {
        "empty first": [standard, reversible],
        "empty last": [([Streams()], [coupling()]), ([nn.Tanh()], [])],
        "no blocks": [],
    }[order]
    loss = nn.Linear(4, 1) if order == "no blocks" else Sum()
    if order == "no blocks":
        loss = nn.Sequential(loss, nn.Flatten(0), MeanOf())
    made = trainer(kind, blocks, loss)
    first, _ = made.one_step(torch.randn(3, 4), rng=0)
    assert first.isfinite()


class MeanOf(nn.Module):
    def forward(self, x):
        return x.mean()


def test_trainer_defect_d_layers_that_differ_in_dropout_rate_do_not_collide():
    """Their names and shapes are equal, and their masks must not be."""
    torch.manual_seed(0)
    seen = []

    class Spy(nn.Dropout):
        def forward(self, x):
            y = super().forward(x)
            seen.append((self.p, float((y == 0).float().mean())))
            return y

        def __repr__(self):
            return "Spy()"

    first = AdditiveCoupling(nn.Sequential(Spy(0.1)), nn.Identity())
    second = AdditiveCoupling(nn.Sequential(Spy(0.8)), nn.Identity())
    made = trainer("reversible", [([Streams(4, 200)], [first, second])], Sum())
    made.one_step(torch.randn(30, 4), rng=0)
    assert len(seen) >= 4
    assert all(abs(rate - share) < 0.03 for rate, share in seen)


@pytest.mark.parametrize("kind", KINDS)
def test_trainer_defect_e_shared_weights_get_one_summed_update(kind):
    torch.manual_seed(0)
    shared = nn.Linear(WIDTH, WIDTH)
    blocks = [
        (
            [Streams()],
            [
                AdditiveCoupling(nn.Sequential(shared, nn.Tanh()), mlp(0)),
                AdditiveCoupling(mlp(0), shared),
            ],
        ),
        ([Pair(shared)], [coupling()]),
    ]
    made = trainer(kind, blocks, Sum(), lr=1.0)
    x = torch.randn(3, 4)
    before = shared.weight.detach().clone()
    stack = blocks[0][0][0](x)
    for layer in [*blocks[0][1], *blocks[1][0], *blocks[1][1]]:
        stack = layer(*stack)
    (expected,) = torch.autograd.grad(Sum()(*stack), shared.weight)
    steps = []
    for layer in made._layers:
        if layer.optimizer is not None:
            layer.optimizer.register_step_pre_hook(lambda o, *_: steps.append(o))
    made.one_step(x, rng=0)
    torch.testing.assert_close(before - shared.weight, expected, rtol=1e-4, atol=1e-4)
    assert len(steps) == len(set(map(id, steps)))
    assert sum(any(p is shared.weight for p in la.owned) for la in made._layers) == 1


class Pair(nn.Module):
    n_in = 2

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, a, b):
        return self.layer(a), b


@pytest.mark.parametrize("kind", KINDS)
def test_trainer_defect_f_evaluation_runs_in_eval_mode(kind):
    made = make(kind, built=build())
    before = state(made)
    generator = torch.get_rng_state()
    losses = {float(made.eval_step(batch(0), rng=seed)[0]) for seed in (1, 2, 3)}
    assert len(losses) == 1
    assert_equal(state(made), before)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(m.training for la in made._layers for m in la.module.modules())
    trained = {float(made.one_step(batch(0), rng=seed)[0]) for seed in (1, 2)}
    assert len(trained) == 2
    made._layers[0].module.eval()
    made.eval_step(batch(0))
    assert not made._layers[0].module.training and made._layers[1].module.training


@pytest.mark.parametrize("kind", KINDS)
def test_trainer_defect_g_a_learning_rate_is_for_one_call(kind):
    made = make(kind, built=build())
    rates = []
    for given in (0.5, None, 0.0, None):
        _, stats = made.one_step(batch(0), rng=0, learning_rate=given)
        rates.append(float(stats["layer0/learning_rate"]))
    assert rates == [0.5, 0.1, 0.0, 0.1]
    with pytest.raises(RuntimeError, match="stop"):
        failing = made._layers[-1].module.register_forward_pre_hook(fail)
        made.one_step(batch(0), learning_rate=7.0)
    failing.remove()
    assert made.optimizers[0].param_groups[0]["lr"] == 0.1


def fail(*_):
    raise RuntimeError("stop")


@pytest.mark.parametrize("offload", ["none", "host"])
def test_trainer_defect_h_tensors_of_the_caller_are_never_touched(offload):
    made = make(
        "reversible", built=build(), offload=offload, free_accelerator_on_step=True
    )
    mine = batch(0)
    alias = mine[3][1:]
    other = torch.ones(5)
    pointers = [t.data_ptr() for t in (*mine, alias, other)]
    copies = [t.clone() for t in (*mine, alias, other)]
    made.one_step(mine, rng=0)
    assert [t.data_ptr() for t in (*mine, alias, other)] == pointers
    assert_equal([*mine, alias, other], copies)


def test_trainer_defect_i_stats_are_a_dict_everywhere():
    found = [make(kind, built=build()).one_step(batch(0), rng=0) for kind in KINDS]
    assert all(isinstance(stats, dict) for _, stats in found)
    assert found[0][1].keys() == found[1][1].keys()
    _, stats = make("store", built=build()).eval_step(batch(0))
    assert set(stats) == {"loss"}


def test_trainer_defect_j_examples_and_microbatches_have_masks_of_their_own():
    masks = []

    class Spy(nn.Dropout):
        def forward(self, x):
            y = super().forward(x)
            masks.append(y == 0)
            return y

    made = trainer(
        "reversible",
        [([Streams(), Two(Spy(0.5))], [])],
        Sum(),
        n_microbatches=2,
    )
    made.one_step(torch.ones(4, 4), rng=0)  # the first call runs a layer twice
    masks.clear()
    made.one_step(torch.ones(4, 4), rng=0)
    first, second = masks[0], masks[1]
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first, second)


class Two(nn.Module):
    n_in = 2

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, a, b):
        return self.layer(a), b


@pytest.mark.parametrize("kind", KINDS)
def test_trainer_defect_k_none_and_integers_have_no_cotangents(kind):
    class Odd(nn.Module):
        def forward(self, x):
            return x, x * 2, None, torch.arange(3), "text"

    class Reads(nn.Module):
        def forward(self, x, nothing, numbers):
            assert nothing is None and numbers.dtype == torch.int64
            return torch.tanh(x)

    torch.manual_seed(0)
    block = HalfResidual(Reads(), n_context=3)
    made = trainer(kind, [([nn.Linear(4, WIDTH), Odd()], [block, coupling()])], Sum())
    loss, _ = made.one_step(torch.randn(3, 4), rng=0)
    assert loss.isfinite()
    assert all(p.grad is None for layer in made._layers for p in layer.parameters)


def test_trainer_defect_l_no_assert_guards_against_users():
    """Under python -O an assert is not there: what it says must be ours to keep."""
    folder = Path(torch_sm3.__file__).parent / "trainer"
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assert):
                # Those for the type checker compare with None or name a type.
                text = ast.unparse(node.test)
                assert "is not None" in text or "isinstance" in text, (path, text)
                assert node.msg is None


@pytest.mark.parametrize("kind", KINDS)
def test_trainer_defect_m_the_loss_scale_reaches_every_gradient(kind):
    torch.manual_seed(0)
    seen = []
    blocks = [([Streams()], [coupling()])]
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    made = trainer(kind, blocks, Sum(), grad_scaler=scaler)
    x = torch.randn(3, 4)
    weight = blocks[0][0][0].weight
    (plain,) = torch.autograd.grad(Sum()(*blocks[0][1][0](*blocks[0][0][0](x))), weight)
    weight.register_hook(lambda grad: seen.append(grad.clone()))
    made.one_step(x, rng=0)
    torch.testing.assert_close(seen[0], 256 * plain, rtol=1e-4, atol=1e-3)
    # One hook call a backward pass; the second pass is another.
    assert len(seen) == (2 if kind == "reversible" else 1)


def test_trainer_defect_n_a_half_residual_has_an_inverse():
    torch.manual_seed(0)
    block = HalfResidual(mlp(0))
    x = (torch.randn(3, WIDTH), torch.randn(3, WIDTH))
    for a, b in zip(inverse(block, *block(*x)), x, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("strategy", ["two_pass", "host_grads"])
def test_trainer_defect_o_aux_outputs_get_gradients(n, strategy):
    """They follow the stack into the loss."""

    class WithAux(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(WIDTH, WIDTH)
            self.only_aux = nn.Linear(WIDTH, 1)

        def forward(self, x):
            aux = self.only_aux(x).square().mean()
            return torch.tanh(self.gate(x)), aux, torch.arange(2)

    class AuxLoss(nn.Module):
        def forward(self, a, b, aux, numbers, more, _):
            assert numbers.dtype == torch.int64
            return (a * b).mean() + 3 * aux + more

    def parts():
        torch.manual_seed(0)
        blocks = [HalfResidual(WithAux(), has_aux=True) for _ in range(2)]
        return [([Streams()], [blocks[0], coupling(), blocks[1]])], AuxLoss()

    found = []
    for kind in KINDS:
        made = trainer(
            kind,
            *parts(),
            exact="sidecar",
            n_microbatches=n,
            clip_grad_norm=0.5,
            clip_strategy=strategy,
        )
        aux_weight = made._layers[1].module.layers[0].only_aux.weight
        before = aux_weight.detach().clone()
        made.one_step(torch.ones(4, 4), rng=0)
        assert not torch.equal(before, aux_weight)
        found.append([*state(made), made.eval_step(torch.ones(4, 4))[0]])
    assert_equal(*found)


@pytest.fixture(autouse=True)
def collect():
    yield
    gc.collect()
