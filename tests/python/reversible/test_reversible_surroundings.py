# SPDX-License-Identifier: Apache-2.0
"""Compilers, exporters and transforms of functions around a sequence."""

from __future__ import annotations

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
from torch.autograd import forward_ad

from torch_sm3.reversible import AdditiveCoupling, AffineCoupling, ReversibleSequence

REASON = "reversible blocks are rebuilt by nodes that cannot be traced"


class Model(nn.Module):
    """Its forward has no loop: there the compiler cannot resume after a break."""

    def __init__(self, seq, second=None):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.seq = seq
        self.second = second

    def forward(self, x):
        x = torch.relu(self.first(x))
        a, b = self.seq(x, 2 * x)
        x = torch.relu(a + b)
        if self.second is not None:
            a, b = self.second(x, 2 * x)
            x = torch.relu(a + b)
        return x.sin()


@pytest.fixture
def dynamo():
    import torch._dynamo

    torch._dynamo.reset()
    yield torch._dynamo
    torch._dynamo.reset()


def input_of_model():
    return torch.randn(4, 8, requires_grad=True)


def test_compiled_model_equals_eager(engine, dynamo):
    model, x = Model(couplings(2, lambda: mlp(dropout=0.5))), input_of_model()
    compiled = torch.compile(model, backend="aot_eager")
    results = []
    for run in (compiled, model):
        torch.manual_seed(3)
        y = run(x)
        y.square().sum().backward()
        results.append([y.detach(), *gradients(model, x)])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


def test_one_graph_break_for_each_sequence(dynamo):
    found = dynamo.explain(Model(couplings(1), couplings(2)))(input_of_model())
    assert (found.graph_break_count, found.graph_count) == (2, 3), found
    assert all(REASON in str(found.break_reasons[i]) for i in range(2))


def test_the_first_call_breaks_for_no_other_reason(dynamo):
    """Importing the compiler in a traced call would be another break."""
    import torch_sm3.reversible._region as region

    region.load_compiler.cache_clear()
    seq = couplings(1)
    dynamo.utils.counters.clear()
    torch.compile(Model(seq), backend="eager")(input_of_model())
    breaks = dynamo.utils.counters["graph_break"]
    assert breaks and all(REASON in text for text in breaks)


def test_fullgraph_is_the_compilers_error(dynamo):
    compiled = torch.compile(Model(couplings(1)), backend="eager", fullgraph=True)
    with pytest.raises(dynamo.exc.Unsupported, match=REASON):
        compiled(input_of_model())


@pytest.mark.parametrize("exact", ["none", "sidecar"])
def test_a_compiled_function_stays_compiled(engine, exact, dynamo):
    graphs = []

    def backend(module, inputs):
        def run(*args):
            graphs.append(1)
            return module.forward(*args)

        return run

    make = lambda: torch.compile(mlp(), backend=backend)  # noqa: E731
    seq, x = couplings(2, make, exact=exact), input_of_model()
    loss_of(seq(x, x)).backward()  # learns and compiles
    gradients(seq, x)
    graphs.clear()
    loss_of(seq(x, x)).backward()
    assert len(graphs) == 4 * 2
    got = gradients(seq, x)
    loss_of(plain(seq, x, x)).backward()
    assert_close(got, gradients(seq, x), 1e-5)


def test_compiled_function_under_a_compiled_model(engine, dynamo):
    make = lambda: torch.compile(mlp(), backend="aot_eager")  # noqa: E731
    model, x = Model(couplings(2, make)), input_of_model()
    torch.compile(model, backend="aot_eager")(x).sum().backward()
    got = gradients(model, x)
    model(x).sum().backward()
    assert_close(got, gradients(model, x), 1e-5)


def test_compiled_autograd_runs_the_nodes_eagerly(engine, dynamo):
    import torch._dynamo.compiled_autograd as compiled_autograd

    # Small, because the compiler starts anew after each of the handles.
    seq = couplings(1, lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)))
    model, x = Model(seq), input_of_model()
    results = []
    for compiled in (True, False):
        torch.manual_seed(3)
        loss = model(x).square().sum()
        if compiled:
            with compiled_autograd._enable(torch.compile(backend="eager")):
                loss.backward()
        else:
            loss.backward()
        results.append(gradients(model, x))
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("exact", ["none", "grid", "sidecar"])
def test_an_exported_graph_has_plain_operators(exact, strict):
    seq = couplings(2, exact=exact)
    x = torch.randn(4, 8)
    program = torch.export.export(seq, (x, x), strict=strict)
    targets = [n.target for n in program.graph.nodes if n.op == "call_function"]
    assert targets and not any("torch_sm3" in str(target) for target in targets)
    for got, want in zip(program.module()(x, x), seq(x, x), strict=True):
        assert torch.equal(got, want)


def test_export_of_an_affine_coupling():
    halves = nn.Linear(8, 16), nn.Linear(8, 16)
    seq = ReversibleSequence(AffineCoupling(*halves))
    x = torch.randn(4, 8)
    program = torch.export.export(seq, (x, x))
    assert not any("torch_sm3" in str(node.target) for node in program.graph.nodes)
    for got, want in zip(program.module()(x, x), affine(halves, x, 2.0), strict=True):
        torch.testing.assert_close(got, want)


def affine(halves, x, clamp):
    a = b = x
    for half in halves:
        r, t = half(b).chunk(2, -1)
        a, b = b, a * torch.exp(clamp * torch.tanh(r / clamp)) + t
    return a, b


def weighted(y):
    return (torch.linspace(-1, 1, y[0].numel()).reshape(y[0].shape) * y[0] + y[1]).sum()


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(f)(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.ones((), dtype=x.dtype))[0],
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x.cos(),))[1],
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "hessian": lambda f, x: torch.func.hessian(f)(x),
    "vmap": lambda f, x: torch.func.vmap(f)(torch.stack([x, x.sin()])),
    "vmap of grad": lambda f, x: torch.func.vmap(torch.func.grad(f))(x[None]),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_reversible_row_26_transforms_are_refused(engine, name):
    seq, x = couplings(1).double(), torch.randn(4, 8, dtype=torch.double)
    with pytest.raises(RuntimeError, match="plan='store'"):
        TRANSFORMS[name](lambda x: weighted(seq(x, x)), x)


def test_reversible_row_26_transforms_of_parameters_are_refused(engine):
    seq, x = couplings(1), torch.randn(4, 8)
    weights = {k: v.detach() for k, v in seq.named_parameters()}

    def loss(weights):
        return loss_of(torch.func.functional_call(seq, weights, (x, x)))

    with pytest.raises(RuntimeError, match="plan='store'"):
        torch.func.grad(loss)(weights)


@pytest.mark.parametrize("exact", ["none", "grid"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_work_under_the_store_plan(engine, name, exact):
    seq = couplings(2, plan="store", exact=exact).double()
    x = torch.randn(4, 8, dtype=torch.double)
    got = TRANSFORMS[name](lambda x: weighted(seq(x, x)), x)

    def by_hand(x):
        a = b = x if exact == "none" else on_grid(x)
        for block in seq:
            a = a + (block.F(b) if exact == "none" else on_grid(block.F(b)))
            b = b + (block.G(a) if exact == "none" else on_grid(block.G(a)))
        return weighted((a, b))

    torch.testing.assert_close(got, TRANSFORMS[name](by_hand, x))


def on_grid(x):
    return x + (torch.round(x * 2.0**16) / 2.0**16 - x).detach()


@pytest.mark.parametrize("name", ["grad", "jvp", "vmap"])
def test_transforms_of_affine_couplings(name):
    halves = nn.Linear(8, 16), nn.Linear(8, 16)
    seq = ReversibleSequence(AffineCoupling(*halves, clamp=1.5), plan="store").double()
    x = torch.randn(4, 8, dtype=torch.double)

    got = TRANSFORMS[name](lambda x: weighted(seq(x, x)), x)
    by_hand = lambda x: weighted(affine(halves, x, 1.5))  # noqa: E731
    torch.testing.assert_close(got, TRANSFORMS[name](by_hand, x))


class Times(nn.Linear):
    def forward(self, x, factor=1.0):
        return super().forward(x) * factor


@pytest.mark.parametrize("where", ["stream", "side", "weight"])
def test_forward_mode(engine, where):
    x = torch.randn(4, 8)
    for plan in ("reversible", "store"):
        seq = couplings(1, lambda: Times(8, 8), plan=plan)
        weights = dict(seq.named_parameters())
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, x.cos())
            stack, side = (x, x), {}
            if where == "stream":
                stack = (dual, x)
            elif where == "side":
                side = {"factor": dual}
            else:
                weight = weights["blocks.0.F.weight"].detach()
                weights["blocks.0.F.weight"] = forward_ad.make_dual(weight, weight)
            run = lambda: torch.func.functional_call(seq, weights, stack, side)  # noqa: B023, E731
            if plan == "reversible":
                with pytest.raises(RuntimeError, match="plan='store'"):
                    run()
            else:
                tangent = forward_ad.unpack_dual(run()[0]).tangent
                assert tangent is not None and tangent.abs().max() > 0


def test_tangents_without_grad_pass_the_bare_loop():
    """Forward mode goes on under no_grad."""
    seq, x = couplings(1, lambda: nn.Linear(8, 8)), torch.randn(4, 8)
    with torch.no_grad(), forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x.cos())
        tangent = forward_ad.unpack_dual(seq(dual, torch.zeros(4, 8))[0]).tangent
    assert torch.equal(tangent, x.cos())


class Counting(torch.utils._python_dispatch.TorchDispatchMode):
    """Lists the operators that make tensors."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.made.append((result.shape, result.dtype))
        return result


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "frozen"])
def test_without_grad_it_is_a_bare_loop(mode, monkeypatch):
    seq, x = couplings(3), torch.randn(4, 8)
    if mode == "frozen":
        seq.requires_grad_(False)
    context = torch.enable_grad if mode == "frozen" else getattr(torch, mode)

    def refuse(*args):
        raise AssertionError("a generator was asked for its state")

    def by_hand(a, b):
        for block in seq:
            a = a + block.F(b)
            b = b + block.G(a)
        return a, b

    made = []
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_rng_state", refuse)
        patch.setattr(torch.random, "get_rng_state", refuse)
        patch.setattr(torch, "default_generator", None)
        for run in (seq, by_hand):
            with context(), Counting() as counting:
                y = run(x, x)
            made.append(counting.made)
            assert y[0].grad_fn is None
    assert made[0] == made[1]


def test_training_and_eval_take_the_same_path(engine):
    """Grad mode alone chooses it."""
    seq, x = couplings(2).double(), torch.randn(4, 8, dtype=torch.double)
    kinds = []
    for training in (True, False):
        seq.train(training)
        y = seq(x, x)
        kinds.append([type(t.grad_fn).__name__ for t in y])
        loss_of(y).backward()
    assert kinds[0] == kinds[1]
    assert AdditiveCoupling(mlp(), mlp()).eval()(torch.randn(2, 8), torch.randn(2, 8))
