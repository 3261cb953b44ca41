# SPDX-License-Identifier: Apache-2.0
"""Inputs that broke other implementations, through every implementation of ours."""

from __future__ import annotations

import pytest
import torch
from helpers.sm3_models import IMPLEMENTATIONS, equal, parameters, snapshot
from reference.sm3_oracle import NumpySM3, Options, RoundedSM3

from torch_sm3 import SM3

FLAGS = pytest.mark.parametrize("flags", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)


def accumulators(optimizer: SM3, param: torch.Tensor) -> list[torch.Tensor]:
    state = optimizer.state[param]
    return [value for key, value in state.items() if key.startswith("accumulator")]


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
