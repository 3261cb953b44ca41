# SPDX-License-Identifier: Apache-2.0
"""Sparse gradients of every implementation against the rounded oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.sm3_runs import Param, Run, assert_same, run, same_bits
from reference.sm3_oracle import Cover, NumpySM3, Options
from torch.utils._python_dispatch import TorchDispatchMode

# The for-loop and foreach paths share one function for sparse gradients.
IMPLEMENTATIONS = ["single", "fused"]

OPTIONS = [
    Options(),
    Options(maximize=True, grad_scale=3.0, momentum=0.9),
    Options(beta2=0.9),
    Options(variant="I"),
    Options(variant="I", beta2=0.9),
    Options(compat="google"),
    Options(compat="google", beta2=0.9),
    Options(compat="optax", beta2=0.9),
    Options(compat="trax"),
    Options(compat="enealor"),
    Options(compat="enealor", beta2=0.9),
]


def sparse(
    shape: tuple[int, ...], sparse_dim: int, nnz: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return a gradient with duplicates, many magnitudes and what is not finite."""
    sizes = shape[:sparse_dim]
    indices = torch.stack([torch.randint(0, n, (nnz,)) for n in sizes])
    dense = (nnz, *shape[sparse_dim:])
    values = torch.randn(dense) * 10.0 ** torch.randint(-20, 3, dense)
    flat = values.view(-1)
    for i, value in enumerate([0.0, torch.nan, torch.inf]):
        flat[5 + 2 * i :: 29] = value
    return torch.sparse_coo_tensor(
        indices, values.to(dtype), shape, check_invariants=True
    )


CASES: list[tuple[tuple[int, ...], int, Cover | None]] = [
    ((9,), 1, None),
    ((12, 5), 1, None),
    ((12, 5), 2, None),
    ((1, 6, 5), 1, None),
    ((1, 6, 5), 2, None),
    ((7, 1, 4), 1, None),
    ((6, 4, 5), 1, None),
    ((6, 4, 5), 2, None),
    ((6, 4, 5), 3, None),
    ((6, 4), 1, ((6, 4), ((0, 1),))),
    ((6, 4, 5), 1, ((6, 20), ((0,), (1,)))),
    ((6, 4, 5), 1, ((24, 5), ((0,), (1,)))),
    ((6, 4, 5), 1, ((2, 3, 20), ((0, 1), (0, 2)))),
    ((6, 4, 5), 1, ((6, 4, 5), ((1, 2), (0, 2), (0, 1)))),
    ((6, 4, 5), 2, ((120,), ((0,),))),
]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_of_sparse_gradients(case, options, implementation) -> None:
    shape, sparse_dim, cover = case
    grads = [sparse(shape, sparse_dim, n, torch.float32) for n in (4, 0, 9)]
    mixed = [grads[0], torch.randn(shape), *grads[1:]]
    for chosen in (grads, mixed):
        param = Param(torch.randn(shape), chosen, cover)
        ours = run(implementation, [param], options)
        expected = run("oracle", [param], options)
        for step, (one, other) in enumerate(zip(ours, expected, strict=True)):
            assert_same(one, other, f"step {step}")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_bits_of_sparse_gradients_by_dtype(dtype, grad_dtype, implementation) -> None:
    grads = [sparse((9, 6), 1, 5, grad_dtype) for _ in range(3)]
    weight = torch.randn(6, 9).to(dtype).T
    for options in (
        Options(momentum=0.9),
        Options(kahan=True),
        Options(stochastic_rounding=True, seed=3),
    ):
        if options.stochastic_rounding and dtype == torch.float16:
            continue
        param = Param(weight, grads)
        ours = run(implementation, [param], options)
        for one, other in zip(ours, run("oracle", [param], options), strict=True):
            assert_same(one, other, str(options))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("options", [Options(), Options(variant="I")], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sm3_row_12_sparse_is_densified_in_sum_mode(
    case, options, implementation
) -> None:
    shape, sparse_dim, cover = case
    grads = [sparse(shape, sparse_dim, n, torch.float32) for n in (4, 0, 9, 3)]
    dense = [grad.to_dense() for grad in grads]
    weight = torch.randn(shape)
    ours = run(implementation, [Param(weight, grads, cover)], options)
    expected = run(implementation, [Param(weight, dense, cover)], options)
    for one, other in zip(ours, expected, strict=True):
        assert_same(one, other, "sparse")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sm3_row_10_padding_only_is_no_step(implementation) -> None:
    indices = torch.zeros(1, 0, dtype=torch.int64)
    empty = torch.sparse_coo_tensor(indices, torch.zeros(0, 1), (4, 1))
    param = Param(torch.randn(4, 1), [empty])
    state = run(implementation, [param], Options())[0][0]
    assert same_bits(state["param"], param.weight)
    assert state["step"] == 1
    assert not state["accumulator_0"].any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sm3_row_11_duplicates_are_added_then_squared(implementation) -> None:
    grad = torch.sparse_coo_tensor([[1, 1]], torch.ones(2), (3,))
    before = grad.clone()
    state = run(implementation, [Param(torch.zeros(3), [grad])], Options())[0][0]
    assert state["accumulator_0"].tolist() == [0, 4, 0]
    torch.testing.assert_close(state["param"], torch.tensor([0, -0.1, 0]))
    assert not grad.is_coalesced()
    assert torch.equal(grad._values(), before._values())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_step_on_one_row_leaves_the_others(implementation) -> None:
    weight = torch.randn(5, 3)
    first, second = torch.randn(5, 3), torch.randn(5, 3)
    only = torch.sparse_coo_tensor([[3]], second[3:4], (5, 3))
    for options in (Options(), Options(beta2=0.9), Options(variant="I")):
        before, after = run(implementation, [Param(weight, [first, only])], options)
        others = [0, 1, 2, 4]
        for key in ("param", "accumulator_0"):
            assert same_bits(after[0][key][others], before[0][key][others])
            assert not torch.equal(after[0][key][3], before[0][key][3])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_averaged_rows_are_assigned_and_columns_kept(implementation) -> None:
    """With beta2 < 1 a small gradient lowers its row, but no column."""
    weight, large = torch.zeros(4, 3), torch.full((4, 3), 100.0)
    small = torch.sparse_coo_tensor([[2]], torch.full((1, 3), 0.1), (4, 3))
    param = Param(weight, [large, small])
    before, after = (s[0] for s in run(implementation, [param], Options(beta2=0.5)))
    assert after["accumulator_0"][2] < before["accumulator_0"][2]
    assert same_bits(after["accumulator_1"], before["accumulator_1"])
    kept = Options(beta2=0.5, compat="enealor")
    before, after = (s[0] for s in run(implementation, [param], kept))
    assert same_bits(after["accumulator_0"], before["accumulator_0"])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "view", [(3, 4, 2), (2, 3, 4), (8, 3), (3, 8), (2, 12), (12, 2), (6, 4), (2, 6, 2)]
)
def test_sets_across_rows_are_kept(view, implementation) -> None:
    """A set with elements of two rows is not assigned when one of them is touched."""
    shape = (4, 6)
    groups = tuple((a,) for a in range(len(view)))
    groups += tuple((a, a + 1) for a in range(len(view) - 1))
    only = torch.sparse_coo_tensor([[1]], 0.01 * torch.randn(1, 6), shape)
    for group in groups:
        param = Param(torch.zeros(shape), [torch.randn(shape), only], (view, (group,)))
        ours = run(implementation, [param], Options(beta2=0.5))
        expected = run("oracle", [param], Options(beta2=0.5))
        for one, other in zip(ours, expected, strict=True):
            assert_same(one, other, f"{view}, {group}")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_decay_and_sparse_gradients_exclude_each_other(implementation) -> None:
    grad = torch.sparse_coo_tensor([[1]], torch.ones(1), (3,))
    made = Run(
        implementation, [Param(torch.ones(3), [grad])], Options(weight_decay=0.1)
    )
    before = made.states()
    with pytest.raises(RuntimeError, match="weight_decay"):
        made.all()
    assert_same(made.states(), before, "after the error")


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("case", CASES[:9], ids=str)
def test_values_of_the_float64_oracle(case, options) -> None:
    shape, sparse_dim, cover = case
    exact = NumpySM3(torch.zeros(shape).numpy(), replace(options, lr=1.0), cover)
    grads = []
    for nnz in (4, 9, 2):
        indices = torch.stack([torch.randint(0, n, (nnz,)) for n in shape[:sparse_dim]])
        values = torch.randn(nnz, *shape[sparse_dim:])
        grad = torch.sparse_coo_tensor(indices, values, shape).coalesce()
        grads.append(grad)
    param = Param(torch.zeros(shape), grads, cover)
    states = run("single", [param], replace(options, lr=1.0))
    for grad, state in zip(grads, states, strict=True):
        touched = torch.sparse_coo_tensor(
            grad.indices(), torch.ones_like(grad.values()), shape
        )
        exact.step(
            grad.to_dense().double().numpy(),
            touched.to_dense().bool().numpy(),
            sparse_dim,
        )
        for k, mu in enumerate(exact.mu):
            torch.testing.assert_close(
                state[0][f"accumulator_{k}"].double(),
                torch.from_numpy(mu),
                rtol=2e-6,
                atol=0,
            )
        torch.testing.assert_close(
            state[0]["param"].double(), torch.from_numpy(exact.w), rtol=2e-6, atol=2e-6
        )


class Largest(TorchDispatchMode):
    """Keeps the size of the largest tensor that an operation makes."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self.known = {t.untyped_storage().data_ptr() for t in known}
        self.size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for out in result if isinstance(result, (tuple, list)) else [result]:
            if not isinstance(out, torch.Tensor) or out.is_sparse:
                continue
            if out.untyped_storage().data_ptr() not in self.known:
                self.size = max(self.size, out.numel())
        return result


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_cost_follows_the_touched_rows_alone(options) -> None:
    """No operation makes a tensor that grows with the table."""
    sizes = []
    for rows in (100, 100_000):
        grad = torch.sparse_coo_tensor([[5, rows - 1]], torch.ones(2, 4), (rows, 4))
        grad = grad.coalesce()
        made = Run("single", [Param(torch.zeros(rows, 4), [grad])], options)
        known = [made.batch.params[0], *made.batch.accumulators[0]]
        with Largest(known) as largest:
            made.step([grad])
        sizes.append(largest.size)
        assert made.batch.params[0][5].any()
    assert sizes[0] == sizes[1]
    assert 0 < sizes[0] <= 16
