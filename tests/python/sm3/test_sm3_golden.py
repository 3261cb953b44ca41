# SPDX-License-Identifier: Apache-2.0
"""Numbers worked out beforehand: the specification's and the oracle's."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from helpers.sm3_runs import IMPLEMENTATIONS, Param, run
from reference import make_sm3_golden
from reference.sm3_oracle import Options

EVERY = [*IMPLEMENTATIONS, "oracle"]

G1 = [[1.0, -2.0, 3.0], [0.0, 4.0, -1.0]]
G2 = [[2.0, 0.0, -1.0], [1e-5, 1.0, 0.0]]
SUM = ([10, 17], [5, 17, 10])
W_SUM = [-0.0279442719, 0.019, -0.0158377223, -1e-7, -0.0214253563, 0.019]
W_EMA = [-0.0886547041, 0.0600832755, -0.0496004272]
W_EMA += [-3.33333333e-7, -0.0681415052, 0.0600832755]
W_OPTAX = [-0.0279442718, 0.019, -0.0158377223]
W_OPTAX += [-9.99999995e-8, -0.0214253562, 0.0189999999]
W_FIRST = [-0.0279442719, 0.0126666667, -0.0158377223]
W_FIRST += [-4.47213595e-8, -0.0214253563, 0.00633333333]

TABLE = {
    "None": (Options(), SUM, W_SUM),
    "google": (Options(compat="google"), SUM, W_SUM),
    "trax": (Options(compat="trax"), SUM, W_SUM),
    "optax": (Options(compat="optax"), SUM, W_OPTAX),
    "variant I": (Options(variant="I"), ([13, 17], [5, 17, 10]), W_FIRST),
    "google, beta2 .9": (
        Options(compat="google", beta2=0.9),
        ([0.91, 1.54], [0.49, 1.54, 0.91]),
        W_EMA,
    ),
    "enealor, beta2 .9": (
        Options(compat="enealor", beta2=0.9),
        ([0.91, 1.60], [0.49, 1.60, 0.91]),
        W_EMA,
    ),
}


def assert_close(ours: torch.Tensor, expected: object) -> None:
    wanted = torch.tensor(expected, dtype=torch.float64).reshape(ours.shape)
    torch.testing.assert_close(ours.double(), wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("implementation", EVERY)
@pytest.mark.parametrize("row", TABLE)
def test_two_steps_of_the_specification(row, implementation) -> None:
    options, (rows, columns), weights = TABLE[row]
    options = Options(**{**vars(options), "momentum": 0.9})
    param = Param(torch.zeros(2, 3), [torch.tensor(G1), torch.tensor(G2)])
    state = run(implementation, [param], options)[-1][0]
    assert_close(state["accumulator_0"], rows)
    assert_close(state["accumulator_1"], columns)
    assert_close(state["param"], weights)


FIRST_STEPS = [
    ("google", 1e-5, 1.0),
    ("optax", 1e-5, 0.0995037),
    ("trax", 1e-5, 1.0),
    ("google", 1e-16, 0.0995037),
    ("optax", 1e-16, 1e-12),
    ("trax", 1e-16, 0.5),
    ("google", 1e-20, 1e-5),
    ("optax", 1e-20, 1e-16),
    ("trax", 1e-20, 9.999e-5),
    ("google", 1e20, 1.0),
    ("optax", 1e20, 1.0),
    ("trax", 1e20, 1.0),
]


@pytest.mark.parametrize("implementation", EVERY)
@pytest.mark.parametrize(("compat", "g", "u"), FIRST_STEPS)
def test_first_direction_of_the_specification(compat, g, u, implementation) -> None:
    for sign in (1.0, -1.0):
        param = Param(torch.zeros(1), [torch.tensor([g * sign])])
        state = run(implementation, [param], Options(lr=1.0, compat=compat))[-1][0]
        # The table gives six digits, of numbers that float32 rounds twice.
        assert -state["param"].item() * sign == pytest.approx(u, rel=5e-6)
    if g == 1e20:
        assert state["accumulator_0"].item() == pytest.approx(3.4028233e38, rel=1e-7)


@pytest.mark.parametrize("implementation", EVERY)
@pytest.mark.parametrize(("compat", "mu"), [(None, 4.8828125e-4), ("enealor", 0.5)])
@pytest.mark.parametrize("shape", [(1,), (3, 4)], ids=str)
def test_average_after_ten_zero_steps(shape, compat, mu, implementation) -> None:
    grads = [torch.ones(shape), *[torch.zeros(shape)] * 10]
    options = Options(beta2=0.5, compat=compat)
    state = run(implementation, [Param(torch.zeros(shape), grads)], options)[-1][0]
    assert (state["accumulator_0"] == mu).all()


@pytest.mark.parametrize("implementation", EVERY)
@pytest.mark.parametrize(("compat", "columns"), [(None, [9, 16]), ("google", [0, 0])])
def test_sparse_steps_of_the_specification(compat, columns, implementation) -> None:
    ones = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    first = torch.sparse_coo_tensor([[1, 1]], ones, (4, 2))
    second = torch.sparse_coo_tensor([[2]], torch.tensor([[3.0, 4.0]]), (4, 2))
    param = Param(torch.zeros(4, 2), [first, second])
    state = run(implementation, [param], Options(compat=compat))[-1][0]
    assert_close(state["accumulator_0"], [0, 4, 16, 0])
    assert_close(state["accumulator_1"], columns)
    assert_close(state["param"], [[0, 0], [-0.1, 0], [-0.1, -0.1], [0, 0]])


def test_golden_file_is_the_oracles() -> None:
    kept = json.loads(make_sm3_golden.PATH.read_text())
    made = make_sm3_golden.golden()
    assert [run["options"] for run in kept] == [run["options"] for run in made]
    for one, other in zip(kept, made, strict=True):
        np.testing.assert_allclose(one["param"], other["param"], rtol=1e-12)


@pytest.mark.parametrize("implementation", EVERY)
def test_golden_runs_of_every_preset(implementation) -> None:
    for case in json.loads(make_sm3_golden.PATH.read_text()):
        shape = tuple(case["shape"])
        weight, grads = make_sm3_golden.inputs(shape)
        param = Param(
            torch.from_numpy(weight).float(),
            [torch.from_numpy(g).float() for g in grads],
        )
        state = run(implementation, [param], Options(**case["options"]))[-1][0]
        for k, mu in enumerate(case["accumulators"]):
            ours = state[f"accumulator_{k}"].double().flatten()
            np.testing.assert_allclose(ours, mu, rtol=5e-6)
        for name, expected in (
            ("param", case["param"]),
            ("momentum_buffer", case["momentum"]),
        ):
            ours = state[name].double().flatten()
            np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)
