# SPDX-License-Identifier: Apache-2.0
"""SM3's values against the float64 oracle, step by step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.sm3_runs import IMPLEMENTATIONS, Param, run
from reference.sm3_oracle import NumpySM3, Options

SHAPES = [(), (7,), (1, 1), (2, 2), (5, 1), (12, 9), (4, 3, 5), (2, 3, 2, 2)]
PRESETS = [None, "google", "optax", "trax", "enealor"]


def options_of(compat: str | None) -> list[Options]:
    """Return options that meet each other; trax knows no average of squares."""
    many = [
        Options(compat=compat),
        Options(compat=compat, momentum=0.9, weight_decay=0.1, variant="I"),
        Options(compat=compat, momentum=0.9, maximize=True, grad_scale=64.0, lr=0.01),
        Options(compat=compat, eps=1e-3, weight_decay=0.3),
    ]
    if compat != "trax":
        many += [
            Options(compat=compat, beta2=0.9, momentum=0.5),
            Options(compat=compat, beta2=0.99, variant="I", weight_decay=0.01),
        ]
    return many


def close(ours: torch.Tensor, exact: np.ndarray, scale: np.ndarray | float) -> None:
    """Compare within 2e-6 of the numbers that were added to make the result."""
    error = np.abs(ours.double().numpy().reshape(exact.shape) - exact)
    assert (error <= 2e-6 * scale + 1e-37).all(), error.max()


@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, "oracle"])
@pytest.mark.parametrize("compat", PRESETS)
def test_twenty_steps_of_the_float64_oracle(compat, implementation) -> None:
    """Each step of the oracle starts from the state of the run under test."""
    for options in options_of(compat):
        params = []
        for shape in SHAPES:
            grads = [torch.randn(shape) * 10.0 ** (k % 7 - 3) for k in range(20)]
            params.append(Param(torch.randn(shape), grads))
        states = run(implementation, params, options)
        for i, param in enumerate(params):
            exact = NumpySM3(param.weight.double().numpy(), options)
            for step, grad in enumerate(param.grads):
                old = exact.w
                exact.step(grad.double().numpy())
                ours = states[step][i]
                for k, mu in enumerate(exact.mu):
                    mine = ours[f"accumulator_{k}"]
                    close(mine, mu, mu)
                    exact.mu[k] = mine.double().numpy().reshape(mu.shape)
                moved = np.abs(old) + np.abs(exact.w - old)
                close(ours["param"], exact.w, moved)
                exact.w = ours["param"].double().numpy()
                if options.momentum:
                    close(ours["momentum_buffer"], exact.m, 1 + np.abs(exact.m))
                    exact.m = ours["momentum_buffer"].double().numpy()


@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, "oracle"])
@pytest.mark.parametrize(
    "options",
    [
        Options(momentum=0.9, momentum_dtype="int8"),
        Options(momentum=0.9, momentum_dtype="bfloat16"),
        Options(kahan=True, lr=0.01),
        Options(stochastic_rounding=True, seed=5, momentum=0.9, momentum_dtype="int8"),
    ],
    ids=str,
)
def test_storage_in_few_bits_by_the_float64_oracle(options, implementation) -> None:
    """A rounding may fall to the other side of a tie: one unit is allowed."""
    shape = (3, 300)
    grads = [torch.randn(shape).bfloat16() for _ in range(5)]
    weight = torch.randn(shape).bfloat16()
    exact = NumpySM3(weight.double().numpy(), options, param_dtype="bfloat16")
    states = run(implementation, [Param(weight, grads)], options)
    for grad, state in zip(grads, states, strict=True):
        exact.step(grad.double().numpy())
        ours = state[0]["param"].double().numpy()
        unit = 2.0 ** (np.floor(np.log2(np.abs(exact.w) + 1e-9)) - 7)
        error = np.abs(ours - exact.w) / unit
        assert error.max() <= 1.0
        assert (error > 0).mean() <= 0.01
        exact.w = ours
        exact.mu = [
            state[0][f"accumulator_{k}"].double().numpy() for k in range(len(exact.mu))
        ]


@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, "oracle"])
def test_broken_and_huge_gradients_by_the_float64_oracle(implementation) -> None:
    grad = torch.randn(6, 5)
    grad[1, 2], grad[3, 3], grad[0, 0], grad[5, 4] = torch.nan, -torch.inf, 1e20, -3e38
    for options in (Options(), Options(variant="I"), Options(beta2=0.9)):
        grads = [grad, torch.randn(6, 5)]
        exact = NumpySM3(np.zeros((6, 5)), options)
        states = run(implementation, [Param(torch.zeros(6, 5), grads)], options)
        for one, state in zip(grads, states, strict=True):
            exact.step(one.double().numpy())
            np.testing.assert_allclose(state[0]["param"], exact.w, rtol=1e-5)
            for k, mu in enumerate(exact.mu):
                np.testing.assert_allclose(state[0][f"accumulator_{k}"], mu, rtol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("compat", PRESETS)
def test_sm3_row_06_zero_gradients_of_float16(compat, implementation) -> None:
    weight = torch.randn(6, 5).half()
    param = Param(weight, [torch.zeros(6, 5).half()] * 4)
    for states in run(implementation, [param], Options(compat=compat, momentum=0.9)):
        assert torch.equal(states[0]["param"], weight)
        assert not states[0]["accumulator_0"].any()
        assert not states[0]["momentum_buffer"].any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sm3_row_07_float16_tracks_float32(implementation) -> None:
    """Gradients down to float16's subnormal numbers, whose squares it cannot hold."""
    steps, shape = 20, (12, 9)
    grads = [(torch.randn(shape) * 10.0 ** -(k % 7)).half() for k in range(steps)]
    weight = torch.randn(shape).half()
    half = run(implementation, [Param(weight, grads)], Options(lr=0.01))
    full = run(
        implementation,
        [Param(weight.float(), [g.float() for g in grads])],
        Options(lr=0.01),
    )
    for step, (one, other) in enumerate(zip(half, full, strict=True), 1):
        for key in ("accumulator_0", "accumulator_1"):
            assert torch.equal(one[0][key], other[0][key])
        error = (one[0]["param"].float() - other[0]["param"]).abs()
        # Each step rounds the weight once, by half a unit.
        assert (error <= step * 2.0**-11 * (other[0]["param"].abs() + 0.2)).all()
        assert (one[0]["param"] != weight).float().mean() > 0.5


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sm3_row_31_precondition_first_then_average(implementation) -> None:
    """The first step moves by (1 - momentum) lr u, whatever the gradient's size."""
    for size in (1e-6, 1.0, 1e6):
        param = Param(torch.zeros(4, 5), [torch.full((4, 5), size)] * 3)
        states = run(implementation, [param], Options(momentum=0.9))
        u = [1.0, 1 / 2**0.5, 1 / 3**0.5]
        m = w = 0.0
        for step, state in enumerate(states):
            m = 0.9 * m + 0.1 * u[step]
            w -= 0.1 * m
            for key, value in (("momentum_buffer", m), ("param", w)):
                expected = torch.full((4, 5), value)
                torch.testing.assert_close(state[0][key], expected, rtol=1e-6, atol=0)
