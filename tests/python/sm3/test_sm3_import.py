# SPDX-License-Identifier: Apache-2.0
"""State dicts of other torch ports: where their numbers go, and that a run goes on."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from torch_sm3 import SM3, Cover, import_state_dict

SHAPES = [(3, 4), (2, 2), (5,), (), (1, 6, 5), (7, 1)]


def broadcastable(shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Return accumulators in the shapes that the ports keep."""
    if not shape:
        return [torch.rand(())]
    return [
        torch.rand([n if d == i else 1 for d in range(len(shape))])
        for i, n in enumerate(shape)
    ]


def theirs(
    shapes: list[tuple[int, ...]], source: str, momentum: float = 0.0, beta: float = 0.0
) -> dict[str, Any]:
    """Return a state dict as a port of SM3 writes it."""
    states: dict[int, Any] = {}
    for i, shape in enumerate(shapes):
        states[i] = {f"accumulator_{k}": a for k, a in enumerate(broadcastable(shape))}
        if source == "pytorch_optimizer":
            states[i]["momentum_buffer"] = torch.randn(shape)
        else:
            states[i]["step"] = 7
            states[i]["momentum_buffer"] = torch.randn(shape) if momentum else 0.0
    group = {"lr": 0.3, "momentum": momentum, "beta": beta, "eps": 1e-30}
    group["params"] = list(range(len(shapes)))
    if source == "pytorch_optimizer":
        group.update(step=7, foreach=None)
    return {"state": states, "param_groups": [group]}


SOURCES = pytest.mark.parametrize(
    "source", ["enealor", "pytorch_optimizer", "gpt_neox"]
)


@SOURCES
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_every_number_finds_its_place(source, momentum, beta) -> None:
    saved = theirs(SHAPES, source, momentum, beta)
    before = copy.deepcopy(saved)
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    optimizer = SM3(params, lr=9.0, maximize=True, weight_decay=0.5)
    optimizer.load_state_dict(import_state_dict(saved, params, source))
    assert str(saved) == str(before), "the argument is not modified"
    group = optimizer.param_groups[0]
    assert group["lr"] == 0.3 and group["momentum"] == momentum
    assert group["maximize"] is False and group["weight_decay"] == 0.0
    assert (group["beta2"], group["compat"]) == (
        (beta, "enealor") if beta else (None, None)
    )
    assert "beta" not in group and "step" not in group
    for i, (param, shape) in enumerate(zip(params, SHAPES, strict=True)):
        state, old = optimizer.state[param], saved["state"][i]
        assert state["step"].dtype == torch.int64 and state["step"] == 7
        vectors = [old[f"accumulator_{k}"] for k in range(max(1, len(shape)))]
        if shape == (2, 2) and not beta:
            expected = [torch.minimum(*vectors)]
        else:
            expected = [v.flatten() for v in vectors if v.numel() > 1] or [
                vectors[0].reshape(1)
            ]
        ours = [value for key, value in state.items() if key.startswith("accum")]
        assert len(ours) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
        if momentum:
            assert torch.equal(state["momentum_buffer"], old["momentum_buffer"])
        else:
            assert "momentum_buffer" not in state


@SOURCES
def test_foreign_state_is_refused_without_the_import(source) -> None:
    saved = theirs([(3, 4)], source)
    param = torch.nn.Parameter(torch.zeros(3, 4))
    for damage in ("as it is", "without beta"):
        if damage == "without beta":
            del saved["param_groups"][0]["beta"]
        with pytest.raises(ValueError, match=r"torch_sm3\.import_state_dict"):
            SM3([param]).load_state_dict(saved)


def test_our_own_covers_are_not_taken_for_foreign() -> None:
    param = torch.nn.Parameter(torch.zeros(12))
    cover = Cover((1, 3, 4), ((0, 1), (0, 2)))
    optimizer = SM3([param], cover=cover)
    optimizer.init_state()
    SM3([param]).load_state_dict(optimizer.state_dict())


def test_rows_alone_stay_the_minimum() -> None:
    param = torch.nn.Parameter(torch.zeros(4, 2))
    rows = torch.tensor([0.0, 4.0, 16.0, 1.0])
    saved = theirs([(4, 2)], "enealor")
    saved["state"][0] = {"step": 2, "momentum_buffer": 0.0, "accumulator_0": rows}
    imported = import_state_dict(saved, [param])
    assert torch.equal(imported["state"][0]["accumulator_0"], rows)
    assert torch.equal(imported["state"][0]["accumulator_1"], torch.full((2,), 16.0))


def test_unused_sparse_momentum_is_dropped() -> None:
    param = torch.nn.Parameter(torch.zeros(4, 2))
    for momentum in (0.0, 0.9):
        saved = theirs([(4, 2)], "pytorch_optimizer", momentum)
        saved["state"][0]["momentum_buffer"] = torch.zeros(4, 2).to_sparse()
        imported = import_state_dict(saved, [param], "pytorch_optimizer")
        assert "momentum_buffer" not in imported["state"][0]


@pytest.mark.parametrize(
    ("dtype", "option", "expected"),
    [
        (torch.bfloat16, None, torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float64, None, torch.float64),
        (torch.float32, torch.int8, torch.int8),
    ],
    ids=str,
)
def test_dtypes_become_ours(dtype, option, expected) -> None:
    param = torch.nn.Parameter(torch.zeros(64, 80, dtype=dtype))
    saved = theirs([(64, 80)], "enealor", momentum=0.9)
    for key, value in saved["state"][0].items():
        if isinstance(value, torch.Tensor):
            saved["state"][0][key] = value.to(dtype)
    groups = [{"params": [param], "momentum_dtype": option}]
    imported = import_state_dict(saved, groups)
    optimizer = SM3(groups)
    optimizer.load_state_dict(imported)
    state = optimizer.state[param]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert state["accumulator_0"].dtype == state["accumulator_1"].dtype == wide
    assert state["momentum_buffer"].dtype == expected
    momentum = state["momentum_buffer"].to(torch.float64)
    if expected == torch.int8:
        momentum = momentum * state["momentum_scale"]
    atol = 0.02 if expected == torch.int8 else 1e-6
    old = saved["state"][0]["momentum_buffer"].double()
    torch.testing.assert_close(momentum, old, atol=atol, rtol=0)
    param.grad = torch.randn(64, 80).to(dtype)
    optimizer.step()


def test_a_custom_cover_gets_bounds_that_hold() -> None:
    param = torch.nn.Parameter(torch.zeros(6, 4))
    saved = theirs([(6, 4)], "enealor")
    cover = Cover.heads(0, 3)
    groups = [{"params": [("weight", param)], "cover": cover}]
    imported = import_state_dict(saved, groups)
    optimizer = SM3([param], cover=cover)
    optimizer.load_state_dict(imported)
    rows, columns = (saved["state"][0][f"accumulator_{i}"] for i in range(2))
    nu = torch.minimum(rows, columns)
    heads = nu.reshape(3, 2, 4)
    assert torch.equal(optimizer.state[param]["accumulator_0"], heads.amax(2))
    assert torch.equal(optimizer.state[param]["accumulator_1"], heads.amax(1))


def test_parameters_without_state_stay_without() -> None:
    params = [torch.nn.Parameter(torch.zeros(3, 4)) for _ in range(2)]
    saved = theirs([(3, 4), (3, 4)], "enealor")
    del saved["state"][0]
    optimizer = SM3(params)
    optimizer.load_state_dict(import_state_dict(saved, params))
    assert list(optimizer.state) == [params[1]]


def test_what_does_not_fit_is_refused() -> None:
    saved = theirs([(3, 4)], "enealor")
    param = torch.nn.Parameter(torch.zeros(3, 4))
    with pytest.raises(ValueError, match="'source'"):
        import_state_dict(saved, [param], "adam")
    with pytest.raises(ValueError, match=r"groups of \[1\].*\[2\]"):
        import_state_dict(saved, [param, torch.nn.Parameter(torch.zeros(1))])
    with pytest.raises(ValueError, match=r"\[4, 3\].*\[\(3, 1\), \(1, 4\)\]"):
        import_state_dict(saved, [torch.nn.Parameter(torch.zeros(4, 3))])


@pytest.mark.parametrize(
    ("momentum", "beta"), [(0.0, 0.0), (0.9, 0.0), (0.0, 0.9), (0.9, 0.9)]
)
def test_a_run_of_pytorch_optimizer_goes_on(momentum, beta) -> None:
    rival = pytest.importorskip("pytorch_optimizer")
    # Its scalars forget under beta, unlike its tensors; the preset treats all alike.
    shapes = [(3, 4), (5,), (2, 3, 4), (1,) if beta else ()]
    old = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    other = rival.SM3(old, lr=0.1, momentum=momentum, beta=beta)
    grads = [[torch.randn(shape) for shape in shapes] for _ in range(6)]
    for step in grads[:3]:
        for param, grad in zip(old, step, strict=True):
            param.grad = grad.clone()
        other.step()
    new = [torch.nn.Parameter(param.detach().clone()) for param in old]
    imported = import_state_dict(other.state_dict(), new, "pytorch_optimizer")
    optimizer = SM3(new)
    optimizer.load_state_dict(imported)
    for step in grads[3:]:
        for one, two, grad in zip(old, new, step, strict=True):
            one.grad, two.grad = grad.clone(), grad.clone()
        other.step()
        optimizer.step()
    for one, two in zip(old, new, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)
        assert optimizer.state[two]["step"] == 6
