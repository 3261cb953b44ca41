# SPDX-License-Identifier: Apache-2.0
"""Steps of the class: implementations, the functional form, refusals, warnings."""

from __future__ import annotations

import pytest
import torch
from helpers.sm3_models import IMPLEMENTATIONS, equal, parameters, snapshot

import torch_sm3
from torch_sm3 import SM3
from torch_sm3.optim import _gather as gather

FLAGS = pytest.mark.parametrize("flags", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)


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


def test_groups_differ_in_what_autograd_records() -> None:
    recorded = torch.randn(3, 4, requires_grad=True)
    outputs = recorded.clone()
    leaf = torch.nn.Parameter(torch.randn(3, 4))
    optimizer = SM3([leaf], differentiable=True)
    optimizer.param_groups[0]["differentiable"] = False
    optimizer.add_param_group({"params": [outputs], "differentiable": True})
    outputs.grad, leaf.grad = torch.randn(3, 4), torch.randn(3, 4)
    optimizer.step()
    assert outputs.grad_fn is not None and leaf.grad_fn is None
    (through,) = torch.autograd.grad(outputs.sum(), recorded)
    assert torch.equal(through, torch.ones(3, 4))


# --- what a CUDA graph needs, without a GPU ------------------------------------


def capturing(monkeypatch) -> None:
    monkeypatch.setattr(gather, "is_capturing", lambda: True)


def test_sm3_row_24_state_must_be_there_before_capture(monkeypatch) -> None:
    param = torch.nn.Parameter(torch.zeros(2, device="meta"))
    param.grad = torch.zeros(2, device="meta")
    optimizer = SM3([param], capturable=True)
    capturing(monkeypatch)
    with pytest.raises(RuntimeError, match="all state before CUDA graph capture"):
        optimizer.step()
    assert not optimizer.state[param]
    monkeypatch.undo()
    optimizer.init_state()
    optimizer.step()
    capturing(monkeypatch)
    optimizer.step()


def test_sm3_row_24_a_learning_rate_on_the_cpu_would_be_frozen(monkeypatch) -> None:
    param = torch.nn.Parameter(torch.zeros(2, device="meta"))
    param.grad = torch.zeros(2, device="meta")
    optimizer = SM3([param], capturable=True, lr=torch.tensor(0.1))
    optimizer.step()
    capturing(monkeypatch)
    with pytest.raises(RuntimeError, match="'lr'"):
        optimizer.step()


def test_sm3_row_24_graphs_are_for_capturable_groups(monkeypatch) -> None:
    capturing(monkeypatch)
    lane = gather.Lane(
        {**SM3([torch.zeros(1)]).defaults}, torch.device("cuda"), "fused"
    )
    with pytest.raises(RuntimeError, match="param_groups' capturable is False"):
        gather._check_lane(lane)
