# SPDX-License-Identifier: Apache-2.0
"""Steps of the class on inputs that broke other implementations, and the warnings."""

from __future__ import annotations

import pytest
import torch
from helpers.sm3_models import IMPLEMENTATIONS, equal, parameters, snapshot
from reference.sm3_oracle import NumpySM3, Options, RoundedSM3

import torch_sm3
from torch_sm3 import SM3

FLAGS = pytest.mark.parametrize("flags", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)


def accumulators(optimizer: SM3, param: torch.Tensor) -> list[torch.Tensor]:
    state = optimizer.state[param]
    return [value for key, value in state.items() if key.startswith("accumulator")]


def test_every_implementation_has_the_same_bits() -> None:
    shapes = [(), (0,), (7,), (2, 2), (5, 1), (3, 4), (40, 33), (4, 3, 5), (3, 0, 2)]
    for options in (
        {},
        {"momentum": 0.9, "weight_decay": 0.1},
        {"variant": "I", "beta2": 0.9},
        {"compat": "trax", "momentum": 0.5, "weight_decay": 0.1},
        {"compat": "enealor", "beta2": 0.9, "maximize": True},
    ):
        results = []
        for flags in IMPLEMENTATIONS.values():
            torch.manual_seed(5)
            params = parameters(*shapes)
            optimizer = SM3(params, **options, **flags)
            for _ in range(3):
                optimizer.step()
            results.append(snapshot(optimizer))
        assert all(equal(results[0], other) for other in results[1:]), options


@pytest.mark.parametrize("count", [1, 3])
def test_the_functional_form_has_the_bits_of_the_class(count) -> None:
    params = parameters((3, 4), (5,))
    twins = [param.detach().clone() for param in params]
    grads = [param.grad.clone() for param in params]
    options = {"momentum": 0.9, "variant": "I", "cover": "diagonal"}
    optimizer = SM3(params, **options)
    sums = [[torch.zeros(param.shape)] for param in params]
    buffers = [torch.zeros_like(twin) for twin in twins]
    steps = [torch.zeros((), dtype=torch.int64) for _ in params]
    for _ in range(count):
        optimizer.step()
        torch_sm3.sm3(twins, grads, sums, buffers, steps, lr=0.1, **options)
    assert equal(twins, [param.detach() for param in params])
    assert equal(buffers, [optimizer.state[p]["momentum_buffer"] for p in params])
    assert [int(step) for step in steps] == [count, count]


def test_the_functional_form_checks_its_lists() -> None:
    weight, step = torch.zeros(3), torch.zeros((), dtype=torch.int64)
    with pytest.raises(ValueError, match="lists of one length"):
        torch_sm3.sm3([weight], [weight], [[weight]], [], [step], lr=0.1, momentum=0.9)
    with pytest.raises(RuntimeError, match="dense gradients"):
        sparse = weight.to_sparse()
        torch_sm3.sm3([weight], [sparse], [[weight]], [], [step], lr=0.1)
    with pytest.raises(ValueError, match="'beta2'"):
        torch_sm3.sm3([weight], [weight], [[weight]], [], [step], lr=0.1, beta2=0.0)


def test_missing_gradients_change_no_random_number() -> None:
    results = []
    for order in (0, 1):
        torch.manual_seed(3)
        params = parameters((300,), (40, 40), dtype=torch.bfloat16)
        optimizer = SM3(params, stochastic_rounding=True, seed=5, lr=1e-3)
        if order:
            grad, params[0].grad = params[0].grad, None
            optimizer.step()
            params[0].grad, params[1].grad = grad, None
        optimizer.step()
        results.append(snapshot(optimizer))
    assert equal(*results)


@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta")
@pytest.mark.parametrize("layout", ["to_sparse_csr", "to_sparse_csc"])
def test_compressed_gradients_are_refused_before_anything_is_written(layout) -> None:
    # torch lets no parameter of its own have such a gradient.
    class Compressed(torch.nn.Parameter):
        grad = getattr(torch.ones(3, 4), layout)()

    (dense,) = parameters((3, 4))
    optimizer = SM3([dense, Compressed(torch.zeros(3, 4))])
    before = dense.detach().clone()
    with pytest.raises(ValueError, match=r"COO gradients, but got torch\.sparse_cs"):
        optimizer.step()
    assert torch.equal(dense.detach(), before)


@FLAGS
def test_decay_and_sparse_gradients_exclude_each_other(flags) -> None:
    (dense,) = parameters((3,))
    embedding = torch.nn.Embedding(5, 3, sparse=True)
    optimizer = SM3([dense, embedding.weight], weight_decay=0.1, **flags)
    embedding(torch.tensor([1])).sum().backward()
    optimizer.init_state()
    before = snapshot(optimizer)
    with pytest.raises(RuntimeError, match="weight_decay=0 with sparse gradients"):
        optimizer.step()
    assert equal(snapshot(optimizer), before)


def test_differentiable_takes_dense_gradients_alone() -> None:
    param = torch.nn.Parameter(torch.zeros(3, 2))
    param.grad = torch.ones(3, 2).to_sparse()
    with pytest.raises(RuntimeError, match="dense gradients with differentiable"):
        SM3([param], differentiable=True).step()


def test_autograd_records_a_differentiable_step() -> None:
    start = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)

    def stepped(start, grad):
        param = start.clone()
        param.grad = grad
        optimizer = SM3([param], differentiable=True, momentum=0.9, weight_decay=0.1)
        optimizer.step()
        optimizer.step()
        return param

    assert torch.autograd.gradcheck(stepped, (start, grad))


@pytest.mark.parametrize("compat", ["google", "enealor"])
def test_stale_columns_are_warned_of_once(compat) -> None:
    weight = torch.nn.Parameter(torch.zeros(5, 3))
    optimizer = SM3([weight], compat=compat)
    weight.grad = torch.ones(5, 3).to_sparse(1)
    optimizer.step()
    assert optimizer.state[weight]["accumulator_1"].count_nonzero() == 0
    weight.grad = torch.ones(5, 3)
    with pytest.warns(UserWarning, match="left behind") as caught:
        optimizer.step()
        optimizer.step()
    assert len(caught) == 1


def test_no_column_is_stale_without_a_preset(recwarn) -> None:
    weight = torch.nn.Parameter(torch.zeros(5, 3))
    optimizer = SM3([weight])
    weight.grad = torch.ones(5, 3).to_sparse(1)
    optimizer.step()
    weight.grad = torch.ones(5, 3)
    optimizer.step()
    assert not [w for w in recwarn.list if "left behind" in str(w.message)]


# --- rows of the spec's section 8 ---------------------------------------------


@FLAGS
def test_sm3_row_06_float16_zero_gradients_change_nothing(flags) -> None:
    param = torch.nn.Parameter(torch.randn(4, 5).half())
    before = param.detach().clone()
    optimizer = SM3([param], **flags)
    for _ in range(3):
        param.grad = torch.zeros(4, 5).half()
        optimizer.step()
    assert torch.equal(param.detach(), before)


@FLAGS
def test_sm3_row_07_float16_tracks_the_float32_run(flags) -> None:
    weight = torch.randn(8, 6)
    half = torch.nn.Parameter(weight.half())
    full = torch.nn.Parameter(weight.half().float())
    optimizers = SM3([half], **flags), SM3([full], **flags)
    for _ in range(20):
        grad = torch.randn(8, 6).half() * 1e-3
        half.grad, full.grad = grad, grad.float()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(half.float(), full, rtol=0, atol=2e-2)
    assert (half - weight.half()).abs().min() > 1e-3, "it moved"


@FLAGS
def test_sm3_row_10_a_batch_of_padding_is_no_step(flags) -> None:
    embedding = torch.nn.Embedding(5, 1, padding_idx=0, sparse=True)
    optimizer = SM3(embedding.parameters(), momentum=0.9, **flags)
    before = embedding.weight.detach().clone()
    embedding.weight.grad = torch.sparse_coo_tensor(
        torch.zeros(1, 0, dtype=torch.int64),
        torch.zeros(0, 1),
        (5, 1),
        check_invariants=True,
    )
    optimizer.step()
    state = optimizer.state[embedding.weight]
    assert torch.equal(embedding.weight.detach(), before)
    assert state["step"] == 1 and state["accumulator_0"].count_nonzero() == 0


@FLAGS
def test_sm3_row_11_duplicates_are_added_then_squared(flags) -> None:
    param = torch.nn.Parameter(torch.zeros(3))
    indices, values = torch.tensor([[1, 1]]), torch.ones(2)
    param.grad = torch.sparse_coo_tensor(indices, values, (3,), check_invariants=True)
    grad = param.grad
    optimizer = SM3([param], lr=0.1, **flags)
    optimizer.step()
    (accumulator,) = accumulators(optimizer, param)
    assert torch.equal(accumulator, torch.tensor([0.0, 4.0, 0.0]))
    assert torch.equal(param.detach(), torch.tensor([0.0, -0.1, 0.0]))
    assert param.grad is grad and not grad.is_coalesced() and grad._nnz() == 2


def _losses(module: torch.nn.Module) -> torch.Tensor:
    words = torch.tensor([[1, 3, 3], [0, 5, 1]])
    return (module(words) ** 2).sum()


@FLAGS
@pytest.mark.parametrize(
    "make",
    [
        lambda sparse: torch.nn.Embedding(9, 4, sparse=sparse),
        lambda sparse: torch.nn.EmbeddingBag(9, 4, sparse=sparse, mode="sum"),
    ],
    ids=["Embedding", "EmbeddingBag"],
)
def test_sm3_row_12_sparse_modules_equal_dense_ones(make, flags) -> None:
    results = []
    for sparse in (True, False):
        torch.manual_seed(4)
        module = make(sparse)
        optimizer = SM3(module.parameters(), lr=0.3, **flags)
        for step in range(6):
            optimizer.zero_grad()
            # Dense and sparse steps mix freely.
            loss = _losses(module)
            loss.backward()
            assert module.weight.grad.is_sparse is sparse
            if sparse and step % 2:
                module.weight.grad = module.weight.grad.to_dense()
            optimizer.step()
        results.append(snapshot(optimizer))
    # Coalescing and the dense backward add duplicates in an order of their own.
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@FLAGS
def test_sm3_row_12_a_hybrid_gradient_equals_its_dense_form(flags) -> None:
    dense = torch.zeros(6, 3, 4)
    dense[[1, 4]] = torch.randn(2, 3, 4)
    results = []
    for grad in (dense.to_sparse(1), dense):
        param = torch.nn.Parameter(torch.ones(6, 3, 4))
        optimizer = SM3([param], **flags)
        for _ in range(3):
            param.grad = grad
            optimizer.step()
        results.append(snapshot(optimizer))
    assert equal(*results)


@FLAGS
def test_sm3_row_13_strides_of_a_bmm_gradient(flags) -> None:
    grad = torch.empty_strided((1, 100, 2), (2, 1, 100)).copy_(torch.randn(1, 100, 2))
    results = []
    for g in (grad, grad.contiguous()):
        param = torch.nn.Parameter(torch.zeros(1, 100, 2))
        optimizer = SM3([param], **flags)
        param.grad = g
        optimizer.step()
        results.append(snapshot(optimizer))
    assert equal(*results)


@FLAGS
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e20])
@pytest.mark.parametrize("shape", [(6,), (5, 7), (3, 4, 5)], ids=str)
def test_sm3_row_30_one_bad_element_spreads_to_no_other(bad, shape, flags) -> None:
    clean, dirty = (torch.nn.Parameter(torch.zeros(shape)) for _ in range(2))
    first, second = (SM3([p], momentum=0.9, **flags) for p in (clean, dirty))
    grad = torch.randn(shape)
    where = tuple(n // 2 for n in shape)
    other = torch.ones(shape, dtype=torch.bool)
    other[where] = False
    clean.grad = grad.clone()
    clean.grad[where] = 0.0
    dirty.grad = grad.clone()
    dirty.grad[where] = bad
    first.step()
    second.step()
    assert torch.equal(clean[other], dirty[other])
    huge = abs(bad) == 1e20
    for key, value in second.state[dirty].items():
        if key.startswith("accumulator"):
            assert torch.isfinite(value).all()
            assert huge or torch.equal(value, first.state[clean][key])
    assert torch.isfinite(dirty[where]).item() is huge
    for _ in range(3):
        dirty.grad = torch.randn(shape)
        second.step()
    assert torch.isfinite(dirty[other]).all()


@FLAGS
@pytest.mark.parametrize(
    "options",
    [
        Options(momentum=0.9),
        Options(momentum=0.5, beta2=0.9, weight_decay=0.1),
        Options(momentum=0.9, compat="optax"),
        Options(momentum=0.9, variant="I", maximize=True),
    ],
    ids=str,
)
def test_sm3_row_31_momentum_averages_what_is_preconditioned(options, flags) -> None:
    weight = torch.randn(5, 6)
    exact, rounded = NumpySM3(weight.numpy(), options), RoundedSM3(weight, options)
    param = torch.nn.Parameter(weight.clone())
    optimizer = SM3(
        [param],
        momentum=options.momentum,
        beta2=options.beta2,
        weight_decay=options.weight_decay,
        compat=options.compat,
        variant=options.variant,
        maximize=options.maximize,
        **flags,
    )
    for _ in range(20):
        grad = torch.randn(5, 6)
        param.grad = grad.clone()
        optimizer.step()
        exact.step(grad.numpy())
        rounded.step(grad)
        buffer = optimizer.state[param]["momentum_buffer"]
        assert torch.equal(buffer, rounded.m) and torch.equal(param, rounded.w)
        torch.testing.assert_close(
            buffer.double(), torch.from_numpy(exact.m), rtol=0, atol=2e-6
        )


@FLAGS
def test_sm3_row_unnumbered_defects_of_the_ports(flags) -> None:
    # A sparse step on one row keeps the accumulators of the others.
    weight = torch.nn.Parameter(torch.zeros(4, 3))
    optimizer = SM3([weight], **flags)
    weight.grad = torch.ones(4, 3)
    optimizer.step()
    row = torch.zeros(4, 3)
    row[2] = 2.0
    weight.grad = row.to_sparse(1)
    optimizer.step()
    rows = optimizer.state[weight]["accumulator_0"]
    assert torch.equal(rows, torch.tensor([1.0, 1.0, 5.0, 1.0]))
    # maximize ascends and leaves the gradient as it is.
    param = torch.nn.Parameter(torch.zeros(3, 4))
    param.grad = torch.ones(3, 4)
    SM3([param], lr=0.5, maximize=True, **flags).step()
    assert torch.equal(param.detach(), torch.full((3, 4), 0.5))
    assert torch.equal(param.grad, torch.ones(3, 4))
    # A scalar, and shapes without elements.
    params = parameters((), (0, 3), (3, 0))
    before = params[0].detach().clone()
    optimizer = SM3(params, momentum=0.9, **flags)
    optimizer.step()
    assert params[0].detach() != before
    assert all(optimizer.state[param]["step"] == 1 for param in params)
