# SPDX-License-Identifier: Apache-2.0
"""Loss scaling, skipped steps and what counts them."""

from __future__ import annotations

import pytest
import torch
from helpers.sm3_models import (
    IMPLEMENTATIONS,
    equal,
    parameters,
    small_model,
    snapshot,
    train,
)

from torch_sm3 import SM3

FLAGS = pytest.mark.parametrize("flags", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)


def test_the_scaler_hands_over_its_scale_to_fused_alone() -> None:
    (param,) = parameters((3,))
    assert SM3([param], fused=True)._step_supports_amp_scaling is True
    for flags in ({}, {"fused": False}, {"foreach": True}):
        assert SM3([param], **flags)._step_supports_amp_scaling is False


@FLAGS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [3.0, 65536.0, 1e-3])
def test_grad_scale_has_the_bits_of_unscale(dtype, scale, flags) -> None:
    (one,) = parameters((5, 6), dtype=dtype)
    other = torch.nn.Parameter(one.detach().clone())
    # What GradScaler.unscale_ multiplies by.
    inverse = torch.tensor(scale).double().reciprocal().float()
    other.grad = one.grad * inverse
    first, second = SM3([one], **flags), SM3([other], **flags)
    first.grad_scale = torch.tensor(scale)
    first.step()
    second.step()
    assert equal(snapshot(first), snapshot(second))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_of_low_precision_are_not_rounded(dtype) -> None:
    (one,) = parameters((5, 6), dtype=dtype)
    other = torch.nn.Parameter(one.detach().clone())
    other.grad_dtype = None
    inverse = torch.tensor(3.0).double().reciprocal().float()
    other.grad = one.grad.float() * inverse
    first, second = SM3([one]), SM3([other])
    first.grad_scale = torch.tensor([3.0])
    first.step()
    second.step()
    assert equal(snapshot(first), snapshot(second))


@FLAGS
@pytest.mark.parametrize("found", [1.0, 2.0, float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_sm3_row_23_any_nonzero_found_inf_leaves_every_bit(
    found, dtype, shape, flags
) -> None:
    params = parameters((3, 4), (5,))
    optimizer = SM3(params, momentum=0.9, **flags)
    optimizer.step()
    before = snapshot(optimizer)
    optimizer.found_inf = torch.full(shape, found, dtype=dtype)
    optimizer.grad_scale = torch.full(shape, 2.0, dtype=dtype)
    optimizer.step()
    optimizer.step()
    assert equal(snapshot(optimizer), before)
    assert optimizer.skipped_steps == 2
    optimizer.found_inf = torch.zeros(shape, dtype=dtype)
    optimizer.step()
    assert optimizer.skipped_steps == 2
    assert optimizer.state[params[0]]["step"] == 2


@FLAGS
def test_sm3_row_23_one_unscale_in_a_training_loop(flags) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    param = torch.nn.Parameter(torch.ones(2, 3))
    optimizer = SM3([param], lr=0.5, eps=1.0, **flags)
    scaler.scale((param * torch.inf).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(param.detach(), torch.ones(2, 3))
    for unscale in (True, False):
        optimizer.zero_grad()
        with torch.no_grad():
            param.fill_(1.0)
        optimizer.state.clear()
        scaler.scale(param.sum()).backward()
        if unscale:
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_([param], 1e9)
            assert norm.item() == pytest.approx(6**0.5)
        scaler.step(optimizer)
        scaler.update()
        # g = 1: u = 1 / sqrt(1 + 1), but another with a second unscaling.
        expected = torch.full((2, 3), 1 - 0.5 / 2**0.5)
        torch.testing.assert_close(param.detach(), expected)
    assert not hasattr(optimizer, "grad_scale") and not hasattr(optimizer, "found_inf")


@FLAGS
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_skip_nonfinite_skips_every_group_and_counts_once(bad, flags) -> None:
    params = parameters((3, 4), (5,), (2, 2))
    groups = [{"params": [p], "lr": 0.1 * i} for i, p in enumerate(params)]
    optimizer = SM3(groups, momentum=0.9, skip_nonfinite=True, **flags)
    optimizer.step()
    before = snapshot(optimizer)
    params[1].grad[3] = bad
    optimizer.step()
    assert equal(snapshot(optimizer), before)
    assert optimizer.skipped_steps == 1
    params[1].grad[3] = 1e20
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert optimizer.state[params[2]]["step"] == 2


@FLAGS
def test_skip_nonfinite_reads_sparse_gradients(flags) -> None:
    embedding = torch.nn.Embedding(5, 3, sparse=True)
    (dense,) = parameters((4,))
    optimizer = SM3([embedding.weight, dense], skip_nonfinite=True, **flags)
    embedding(torch.tensor([1, 2])).sum().backward()
    embedding.weight.grad._values()[1, 2] = torch.nan
    before = [embedding.weight.detach().clone(), dense.detach().clone()]
    optimizer.step()
    assert torch.equal(embedding.weight.detach(), before[0])
    assert torch.equal(dense.detach(), before[1])
    assert optimizer.skipped_steps == 1


@FLAGS
def test_a_skipped_first_step_creates_all_state(flags) -> None:
    model = small_model()
    optimizer = SM3(model.parameters(), momentum=0.9, **flags)
    optimizer.found_inf = torch.ones(())
    train(model, optimizer, 1)
    assert all(state["step"] == 0 for state in optimizer.state.values())
    assert len(optimizer.state) == 4
    assert all("momentum_buffer" in state for state in optimizer.state.values())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_the_default_dtype_is_no_part_of_the_flag(dtype) -> None:
    (param,) = parameters((3,))
    param.grad[1] = torch.inf
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        optimizer = SM3([param], skip_nonfinite=True)
        optimizer.step()
    finally:
        torch.set_default_dtype(before)
    assert optimizer.skipped_steps == 1


def test_both_flags_count_one_step() -> None:
    (param,) = parameters((3,))
    optimizer = SM3([param], skip_nonfinite=True)
    optimizer.found_inf = torch.ones(1)
    param.grad[0] = torch.nan
    optimizer.step()
    assert optimizer.skipped_steps == 1


def test_finite_steps_are_the_same_with_and_without_the_flag() -> None:
    results = []
    for skip in (False, True):
        torch.manual_seed(1)
        params = parameters((3, 4), (5,))
        optimizer = SM3(params, skip_nonfinite=skip)
        optimizer.step()
        results.append(snapshot(optimizer))
    assert equal(*results)
