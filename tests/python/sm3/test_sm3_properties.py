# SPDX-License-Identifier: Apache-2.0
"""What holds of SM3 in rounded arithmetic, without any tolerance."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from helpers.sm3_runs import IMPLEMENTATIONS, Param, assert_same, run, same_bits
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from reference.sm3_oracle import Cover, Options, default_cover

shapes = st.lists(st.integers(0, 5), max_size=6).map(tuple)
seeds = st.integers(0, 2**31)
implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
PRESETS = [None, "google", "optax", "trax", "enealor"]


def wild(shape: tuple[int, ...], seed: int, steps: int = 4) -> list[torch.Tensor]:
    """Return gradients over all magnitudes of float32, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for _ in range(steps):
        power = torch.randint(-30, 31, shape, generator=generator).double()
        grad = torch.randn(shape, generator=generator).double() * 10.0**power
        kept = torch.rand(shape, generator=generator) < 0.8
        result.append((grad * kept).float().clamp(-3e38, 3e38))
    return result


def spread(state: dict[str, torch.Tensor], cover: Cover, shape: tuple[int, ...]):
    """Return the least accumulator of every element."""
    view, groups = cover
    least = None
    for k, group in enumerate(groups):
        sizes = [n if a in group else 1 for a, n in enumerate(view)]
        one = state[f"accumulator_{k}"].reshape(sizes).expand(view)
        least = one if least is None else torch.minimum(least, one)
    return least.reshape(shape)


def accumulators(state: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [value for key, value in state.items() if key.startswith("accumulator")]


def squares(grad: torch.Tensor) -> torch.Tensor:
    root = torch.tensor(2.0**64 - 2.0**40)
    return grad.clamp(-root, root) ** 2


def bounds(
    implementation: str, shape: tuple[int, ...], grads: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return, for each step, nu of variants II and I.

    nu is computed from the accumulators before (II) and after (I) the step.
    """
    cover = default_cover(shape)
    param = Param(torch.zeros(shape), grads)
    second = run(implementation, [param], Options())
    first = run(implementation, [param], Options(variant="I"))
    old = torch.zeros(shape)
    ours = []
    largest = torch.finfo(torch.float32).max
    for grad, state in zip(grads, second, strict=True):
        ours.append((old + squares(grad)).clamp(max=largest))
        old = spread(state[0], cover, shape)
    return ours, [spread(state[0], cover, shape) for state in first]


@implementations
@settings(max_examples=40, deadline=None)
@given(shape=shapes, seed=seeds)
def test_sums_are_below_nu_of_two_below_nu_of_one(implementation, shape, seed) -> None:
    grads = wild(shape, seed)
    total = torch.zeros(shape)
    largest = torch.finfo(torch.float32).max
    for grad, two, one in zip(
        grads, *bounds(implementation, shape, grads), strict=True
    ):
        total = (total + squares(grad)).clamp(max=largest)
        assert (total <= two).all()
        assert (two <= one).all()


@implementations
@pytest.mark.parametrize("variant", ["II", "I"])
@settings(max_examples=30, deadline=None)
@given(shape=shapes, seed=seeds)
def test_accumulators_never_decrease(implementation, variant, shape, seed) -> None:
    param = Param(torch.zeros(shape), wild(shape, seed))
    states = run(implementation, [param], Options(variant=variant))
    for before, after in itertools.pairwise(states):
        for old, new in zip(
            accumulators(before[0]), accumulators(after[0]), strict=True
        ):
            assert (new >= old).all()


@implementations
@pytest.mark.parametrize("compat", PRESETS)
@settings(max_examples=15, deadline=None)
@given(shape=shapes, seed=seeds, variant=st.sampled_from(["II", "I"]))
def test_a_zero_gradient_changes_no_bit(
    implementation, compat, shape, seed, variant
) -> None:
    grads = [*wild(shape, seed, 2), torch.zeros(shape)]
    param = Param(torch.randn(shape), grads)
    options = Options(variant=variant, compat=compat)
    *_, before, after = run(implementation, [param], options)
    assert after[0].pop("step") == before[0].pop("step") + 1
    assert_same(after, before, compat or "None")


@implementations
@pytest.mark.parametrize("variant", ["II", "I"])
@settings(max_examples=25, deadline=None)
@given(shape=shapes, seed=seeds, beta2=st.sampled_from([None, 0.5, 0.9, 0.99]))
def test_directions_are_bounded(implementation, variant, shape, seed, beta2) -> None:
    """With lr 1 and w 0 each step is u: at most 1, or 1 / sqrt(1 - beta2)."""
    starting = []
    for grad in wild(shape, seed):
        param = Param(torch.zeros(shape), [grad], None, None, starting)
        options = Options(lr=1.0, beta2=beta2, variant=variant)
        state = run(implementation, [param], options)[-1][0]
        starting = accumulators(state)
        u = state["param"].abs()
        if beta2 is None:
            assert (u <= 1).all()
        else:
            # Roundings: of 1 - beta2, the product, the root and the quotient.
            assert (u.double() <= (1 + 2.0**-22) / math.sqrt(1 - beta2)).all()


@implementations
@settings(max_examples=25, deadline=None)
@given(shape=shapes.filter(lambda s: sum(n != 1 for n in s) <= 1), seed=seeds)
def test_rank_one_is_adagrad(implementation, shape, seed) -> None:
    """Up to Adagrad's own roundings: it fuses products and takes roots by MKL."""
    weight = torch.randn(shape)
    # Adagrad's eps is outside the root: sums stay where neither eps is seen.
    grads = [grad.clamp(-1e15, 1e15) for grad in wild(shape, seed)]
    grads = [torch.where(grad.abs() < 1e-12, 0.0, grad) for grad in grads]
    states = run(implementation, [Param(weight, grads)], Options())
    theirs = torch.nn.Parameter(weight.clone())
    adagrad = torch.optim.Adagrad([theirs], lr=0.1, eps=1e-30, foreach=False)
    for grad, state in zip(grads, states, strict=True):
        theirs.grad = grad.clone()
        adagrad.step()
        total = adagrad.state[theirs]["sum"]
        torch.testing.assert_close(
            state[0]["accumulator_0"], total.reshape(-1), rtol=1e-6, atol=0
        )
        torch.testing.assert_close(
            state[0]["param"], theirs.detach(), rtol=1e-6, atol=1e-6
        )


@implementations
@settings(max_examples=20, deadline=None)
@given(rows=st.integers(2, 6), columns=st.integers(3, 6), seed=seeds)
def test_products_of_powers_of_two_are_tight(
    implementation, rows, columns, seed
) -> None:
    """For |g| = a b^T, the same at each step, nu is the sum where a and b are 1.

    All squares are powers of four, so that nothing is rounded.
    """
    generator = torch.Generator().manual_seed(seed)
    a = 2.0 ** -torch.randint(0, 9, (rows,), generator=generator)
    b = 2.0 ** -torch.randint(0, 9, (columns,), generator=generator)
    a[0], b[0] = 1.0, 1.0
    signs = torch.randint(0, 2, (rows, columns), generator=generator) * 2 - 1
    grad = a[:, None] * b * signs
    state = run(
        implementation, [Param(torch.zeros(rows, columns), [grad] * 4)], Options()
    )
    for step, after in enumerate(state, 1):
        # The largest of a row is in the column of b's largest, and the reverse.
        assert after[0]["accumulator_0"][0] == step
        assert after[0]["accumulator_1"][0] == step
        assert (after[0]["accumulator_0"] >= step * a**2).all()
        assert (after[0]["accumulator_1"] >= step * b**2).all()
    assert torch.equal(state[0][0]["accumulator_0"], a**2)
    assert torch.equal(state[0][0]["accumulator_1"], b**2)


REFINEMENTS: list[tuple[tuple[int, ...], Cover, Cover]] = [
    # parameter's shape, coarse cover, refined cover
    ((6, 4), ((6, 4), ((0,), (1,))), ((6, 4), ((0, 1),))),
    ((6, 4), ((6, 4), ((0,), (1,))), ((2, 3, 4), ((0, 1), (0, 2)))),
    ((6, 4), ((6, 4), ((0,), (1,))), ((6, 2, 2), ((0, 1), (1, 2)))),
    ((4, 3, 5), ((4, 3, 5), ((0,), (1,), (2,))), ((4, 15), ((0,), (1,)))),
    ((4, 3, 5), ((4, 15), ((0,),)), ((4, 15), ((0,), (1,)))),
    ((4, 3, 5), ((4, 15), ((0,), (1,))), ((60,), ((0,),))),
    ((4, 3, 5), ((60,), ((),)), ((4, 3, 5), ((0,), (1,), (2,)))),
]


@implementations
@pytest.mark.parametrize("variant", ["II", "I"])
@pytest.mark.parametrize("case", REFINEMENTS, ids=str)
def test_refining_a_cover_never_increases_nu(case, variant, implementation) -> None:
    shape, coarse, fine = case
    for seed in range(8):
        grads = wild(shape, seed)
        options = Options(variant=variant)
        runs = [
            run(implementation, [Param(torch.zeros(shape), grads, cover)], options)
            for cover in (coarse, fine)
        ]
        for one, other in zip(*runs, strict=True):
            most, least = spread(one[0], coarse, shape), spread(other[0], fine, shape)
            assert (least <= most).all()


@implementations
@settings(max_examples=30, deadline=None)
@given(shape=shapes, seed=seeds, variant=st.sampled_from(["II", "I"]))
def test_dimensions_of_size_one_change_no_bit(
    implementation, shape, seed, variant
) -> None:
    """Dropped, and kept in the view with a number of their own."""
    assume(math.prod(shape) > 0)
    view, groups = default_cover(shape)
    assume(groups == tuple((a,) for a in range(len(view))) and len(view) > 1)
    grads = wild(shape, seed)
    options = Options(variant=variant, momentum=0.5)
    small = tuple(n for n in shape if n != 1)
    wide = (shape, tuple((a,) for a in range(len(shape))))
    runs = [
        run(implementation, [Param(torch.ones(shape), grads)], options),
        run(implementation, [Param(torch.ones(shape), grads, wide)], options),
        run(
            implementation,
            [Param(torch.ones(small), [g.reshape(small) for g in grads])],
            options,
        ),
    ]
    kept = [k for k, n in enumerate(shape) if n != 1]
    for dropped, with_ones, without in zip(*runs, strict=True):
        assert same_bits(dropped[0]["param"], with_ones[0]["param"])
        assert same_bits(dropped[0]["param"].reshape(small), without[0]["param"])
        for k, d in enumerate(kept):
            mine = dropped[0][f"accumulator_{k}"]
            assert same_bits(mine, with_ones[0][f"accumulator_{d}"])
            assert same_bits(mine, without[0][f"accumulator_{k}"])


@implementations
@settings(max_examples=30, deadline=None)
@given(shape=shapes, seed=seeds, order=st.randoms(use_true_random=False))
def test_permuting_dimensions_permutes_the_state(
    implementation, shape, seed, order
) -> None:
    dims = list(range(len(shape)))
    order.shuffle(dims)
    weight, grads = torch.randn(shape), wild(shape, seed)
    options = Options(momentum=0.9)
    first = run(implementation, [Param(weight, grads)], options)[-1][0]
    moved = [g.permute(dims).contiguous() for g in grads]
    other = Param(weight.permute(dims).contiguous(), moved)
    second = run(implementation, [other], options)[-1][0]
    for key in ("param", "momentum_buffer"):
        assert same_bits(first[key].permute(dims), second[key])
    mine, theirs = accumulators(first), accumulators(second)
    kept = [d for d, n in enumerate(shape) if n != 1]
    if len(mine) == 1:
        back = [kept.index(d) for d in dims if d in kept]
        assert same_bits(
            mine[0].reshape([shape[d] for d in kept] or [1]).permute(back or [0]),
            theirs[0],
        )
        return
    for k, d in enumerate(d for d in dims if d in kept):
        assert same_bits(theirs[k], mine[kept.index(d)])


@implementations
@settings(max_examples=30, deadline=None)
@given(
    shape=st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple),
    seed=seeds,
    data=st.data(),
    variant=st.sampled_from(["II", "I"]),
)
def test_sparse_gradients_equal_their_densified(
    implementation, shape, seed, data, variant
) -> None:
    sparse_dim = data.draw(st.integers(1, len(shape)))
    grads = []
    for dense in wild(shape, seed):
        kept = dense.reshape(*shape[:sparse_dim], math.prod(shape[sparse_dim:])).any(-1)
        indices = kept.nonzero().T
        grads.append(
            torch.sparse_coo_tensor(
                indices, dense[tuple(indices)], shape, check_invariants=True
            )
        )
    options = Options(variant=variant)
    weight = torch.randn(shape)
    sparse = run(implementation, [Param(weight, grads)], options)
    dense = run(implementation, [Param(weight, [g.to_dense() for g in grads])], options)
    mixed = [g if k % 2 else g.to_dense() for k, g in enumerate(grads)]
    both = run(implementation, [Param(weight, mixed)], options)
    for one, other, third in zip(sparse, dense, both, strict=True):
        assert_same(one, other, "sparse")
        assert_same(third, other, "mixed")


@implementations
@settings(max_examples=30, deadline=None)
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple),
    seed=seeds,
    data=st.data(),
    variant=st.sampled_from(["II", "I"]),
    beta2=st.sampled_from([None, 0.9]),
)
def test_sm3_row_30_what_is_not_finite_does_not_spread(
    implementation, shape, seed, data, variant, beta2
) -> None:
    """Other elements, all accumulators and later steps are as if g were zero there."""
    place = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    broken = data.draw(st.sampled_from([math.nan, math.inf, -math.inf]))
    grads = [grad.clamp(-1e10, 1e10) for grad in wild(shape, seed)]
    clean = [grads[0].clone(), *grads[1:]]
    faulty = [grads[0].clone(), *grads[1:]]
    clean[0][place], faulty[0][place] = 0.0, broken
    options = Options(variant=variant, beta2=beta2, momentum=0.9)
    weight = torch.randn(shape)
    ours = run(implementation, [Param(weight, faulty)], options)
    expected = run(implementation, [Param(weight, clean)], options)
    for one, other in zip(ours, expected, strict=True):
        for key, value in one[0].items():
            if key in ("param", "momentum_buffer"):
                assert torch.isnan(value[place])
                value[place] = other[0][key][place]
            assert same_bits(value, other[0][key])


@implementations
@settings(max_examples=20, deadline=None)
@given(shape=shapes, seed=seeds)
def test_momentum_is_an_average_of_directions(implementation, shape, seed) -> None:
    """With weights of zero and lr 1, two runs of one step each give the average."""
    grads = wild(shape, seed, 2)
    plain = run(implementation, [Param(torch.zeros(shape), grads)], Options(lr=1.0))
    u1 = -plain[0][0]["param"]
    start = accumulators(plain[0][0])
    again = Param(torch.zeros(shape), grads[1:], None, None, start)
    u2 = -run(implementation, [again], Options(lr=1.0))[0][0]["param"]
    options = Options(momentum=0.75, lr=1.0)
    state = run(implementation, [Param(torch.zeros(shape), grads)], options)
    expected = 0.75 * (0.25 * u1) + 0.25 * u2
    assert torch.equal(state[1][0]["momentum_buffer"], expected)
    assert state[1][0]["step"] == 2
