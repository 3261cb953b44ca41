# SPDX-License-Identifier: Apache-2.0
"""Every implementation of SM3 against the rounded oracle, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.sm3_runs import IMPLEMENTATIONS, Param, assert_same, run
from reference.sm3_oracle import Options, Place

from torch_sm3.optim._root import square_root

SHAPES = [(), (1,), (7,), (1, 1), (2, 2), (5, 1), (3, 4), (1, 6, 5), (64, 33)]
SHAPES += [(4, 3, 5), (8, 1, 3, 3), (2, 3, 4, 2, 3), (0, 3), (3, 0), (2, 2, 2, 2, 2, 2)]
OPTIONS = [
    Options(),
    Options(momentum=0.9),
    Options(momentum=0.5, weight_decay=0.01, maximize=True),
    Options(beta2=0.9, eps=1e-8),
    Options(beta2=0.99, momentum=0.9, weight_decay=0.1),
    Options(eps=0.0),
    Options(grad_scale=3.0, weight_decay=0.3, lr=0.3),
    Options(grad_scale=0.1, maximize=True, momentum=0.7),
    Options(beta2=1.0, momentum=0.9),
    Options(compat="optax", momentum=0.9),
    Options(compat="optax", eps=0.0, beta2=0.999),
    Options(compat="trax", momentum=0.9, lr=0.01),
    Options(compat="trax", weight_decay=0.1, momentum=0.3),
    Options(compat="trax", weight_decay=0.1, eps=1e-4),
    Options(compat="google", momentum=0.9, beta2=0.9),
    Options(compat="enealor", beta2=0.9, momentum=0.9),
    Options(compat="enealor", weight_decay=0.2),
    Options(compat="enealor", beta2=0.5, variant="I"),
    Options(variant="I"),
    Options(variant="I", beta2=0.9, momentum=0.9),
    Options(variant="given", momentum=0.9, weight_decay=0.1),
]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def gradients(shape: tuple[int, ...], steps: int = 4) -> list[torch.Tensor]:
    """Return gradients of many magnitudes, with zeros and what is not finite."""
    result = []
    for step in range(steps):
        grad = torch.randn(shape) * 10.0 ** torch.randint(-25, 25, shape)
        if step % 2:
            grad = torch.randn(shape) * 10.0 ** (step - 2)
        flat = grad.view(-1)
        for i, value in enumerate(
            [0.0, -0.0, torch.nan, torch.inf, -torch.inf, -1e-24]
        ):
            flat[(7 + 5 * i + step) % 61 :: 61] = value
        result.append(grad)
    return result


def start_of(param: Param, options: Options) -> list[torch.Tensor]:
    """Return accumulators for the variant that takes them as they are."""
    if options.variant != "given":
        return []
    zero = run("oracle", [param], options)[0][0]
    names = [key for key in zero if key.startswith("accumulator")]
    return [torch.rand_like(zero[key]) for key in names]


def check(implementation: str, params: list[Param], options: Options) -> None:
    ours = run(implementation, params, options)
    expected = run("oracle", params, options)
    for step, (one, other) in enumerate(zip(ours, expected, strict=True)):
        assert_same(one, other, f"{implementation}, step {step}")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_bits_of_all_shapes_in_one_call(options, implementation) -> None:
    params = []
    for shape in SHAPES:
        param = Param(torch.randn(shape), gradients(shape))
        param.start = start_of(param, options)
        params.append(param)
    check(implementation, params, options)


GRAD_DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def dtype_pairs() -> list[tuple[torch.dtype, torch.dtype]]:
    pairs = [(dtype, grad) for dtype in DTYPES for grad in GRAD_DTYPES]
    return [*pairs, (torch.float64, torch.float64)]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("dtype", "grad_dtype"), dtype_pairs(), ids=str)
def test_bits_of_every_dtype_pair(dtype, grad_dtype, implementation) -> None:
    for options in (
        Options(momentum=0.9, weight_decay=0.01, grad_scale=7.0),
        Options(variant="I", compat="trax", weight_decay=0.1),
        Options(beta2=0.9, momentum=0.9),
    ):
        params = [
            Param(
                torch.randn(shape).to(dtype),
                [grad.to(grad_dtype) for grad in gradients(shape)],
            )
            for shape in [(40, 33), (17,), (), (3, 5, 4)]
        ]
        check(implementation, params, options)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bits_of_mixed_dtypes_in_one_call(implementation) -> None:
    params = [
        Param(torch.randn(6, 5).to(dtype), [g.to(grad) for g in gradients((6, 5))])
        for dtype, grad in dtype_pairs()
    ]
    check(implementation, params, Options(momentum=0.9, weight_decay=0.01))


COVERS = {
    "diagonal": ((6, 4, 10), ((0, 1, 2),)),
    "rows": ((6, 4, 10), ((0,),)),
    "merge": ((6, 40), ((0,), (1,))),
    "heads": ((2, 3, 40), ((0, 1), (0, 2))),
    "blocks of the last": ((6, 4, 2, 5), ((0, 2), (1, 2), (2, 3))),
    "across": ((24, 10), ((0,), (1,))),
    "flat": ((240,), ((0,),)),
    "uneven": ((5, 48), ((0,), (1,))),
    "one number": ((6, 4, 10), ((),)),
    "one number and rows": ((6, 4, 10), ((), (0,))),
    "with a size of 1": ((6, 1, 40), ((0, 1), (1, 2))),
    "pairs": ((6, 4, 10), ((0, 1), (1, 2), (0, 2))),
    "many axes": ((2, 3, 2, 2, 2, 5, 1), ((0, 1), (2, 3), (4, 5), (6,))),
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", COVERS)
def test_bits_of_covers(name, implementation) -> None:
    for options in (
        Options(momentum=0.9),
        Options(variant="I", beta2=0.9),
        Options(compat="enealor", beta2=0.9),
    ):
        shape = (6, 4, 10)
        param = Param(torch.randn(shape), gradients(shape), COVERS[name])
        check(implementation, [param, param], options)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("start", "stop"), [(0, 240), (13, 14), (7, 229), (0, 40)])
@pytest.mark.parametrize("name", ["diagonal", "merge", "pairs", "one number and rows"])
def test_bits_of_flat_ranges(name, start, stop, implementation) -> None:
    shape = (stop - start,)
    place = Place(ordinal=3, start=start, strides=(1,))
    for options in (Options(), Options(variant="I"), Options(beta2=0.9, momentum=0.5)):
        param = Param(torch.randn(shape), gradients(shape), COVERS[name], place)
        check(implementation, [param], options)


def strided(x: torch.Tensor) -> list[torch.Tensor]:
    """Return tensors of equal values with other strides and offsets."""
    base = torch.zeros([2 * n + 1 for n in x.shape], dtype=x.dtype)
    every_second = base[tuple(slice(1, None, 2) for _ in x.shape)]
    every_second.copy_(x)
    reverse = tuple(range(x.dim() - 1, -1, -1))
    return [x, every_second, x.permute(reverse).contiguous().permute(reverse)]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(9,), (7, 9), (3, 4, 5), (2, 2)], ids=str)
def test_sm3_row_13_strides_change_no_bit(shape, dtype, implementation) -> None:
    weight, grads = torch.randn(shape).to(dtype), gradients(shape)
    for options in (Options(momentum=0.9), Options(variant="I", kahan=True)):
        params = [
            Param(w, [strided(g)[k] for g in grads])
            for w in strided(weight)
            for k in range(3)
        ]
        check(implementation, params, options)
        # A gradient from bmm of a batch of one has strides that nothing else has.
    weight = torch.randn(2, 1, 100)
    grads = [torch.bmm(torch.randn(2, 100, 3), torch.randn(2, 3, 1)).mT] * 2
    check(implementation, [Param(weight, grads)], Options(momentum=0.9))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sm3_row_09_empty_tensors_beside_others(implementation) -> None:
    params = [Param(torch.ones(n), [torch.ones(n)] * 2) for n in (1, 0, 1, 1, 0)]
    check(implementation, params, Options(momentum=0.9))
    state = run(implementation, params, Options())[-1]
    assert all((one["param"] < 1).all() for one in state)
    assert all(one["step"] == 2 for one in state)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_sm3_row_29_tensor_lr_has_the_bits_of_a_number(
    dtype, shape, implementation
) -> None:
    lr = torch.full(shape, 0.3, dtype=dtype)
    options = Options(lr=lr.double().item(), weight_decay=0.1, momentum=0.9)
    for kind in DTYPES:
        params = [
            Param(torch.randn(s).to(kind), gradients(s)) for s in [(5, 4), (), (3,)]
        ]
        ours = run(implementation, params, options, lr=lr)
        for one, other in zip(ours, run("oracle", params, options), strict=True):
            assert_same(one, other, implementation)
    assert torch.equal(lr, torch.full(shape, 0.3, dtype=dtype))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("found", [0.0, 1.0, 2.0, torch.nan])
@pytest.mark.parametrize("capturable", [False, True])
def test_sm3_row_23_found_inf_leaves_every_bit(
    found, capturable, implementation
) -> None:
    if implementation == "fused" and capturable:
        pytest.skip("capturable is no option of the operator")
    sparse = torch.sparse_coo_tensor([[1, 1]], torch.ones(2, 4), (6, 4))
    params = [
        Param(torch.randn(6, 4).bfloat16(), gradients((6, 4), 1)),
        Param(torch.randn(6, 4), gradients((6, 4), 1)),
        Param(torch.randn(6, 4), [sparse]),
    ]
    for options in (
        Options(momentum=0.9, kahan=True),
        Options(variant="I"),
        Options(momentum=0.9, momentum_dtype="int8", stochastic_rounding=True),
    ):
        flag = torch.full((1,), found)
        ours = run(
            implementation, params, options, found_inf=flag, capturable=capturable
        )
        if found == 0:
            assert_same(ours[0], run("oracle", params, options)[0], implementation)
            continue
        before = run("oracle", [Param(p.weight, [None]) for p in params], options)
        assert_same(ours[0], before[0], implementation)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_square_root_is_rounded_once(dtype) -> None:
    word = np.uint32 if dtype is np.float32 else np.uint64
    random = np.random.default_rng(0)
    bits = random.integers(0, np.iinfo(word).max // 2, 1_000_003, dtype=word)
    roots = (1 + random.random(200_000)).astype(dtype)
    squares = roots * roots
    limits = np.finfo(dtype)
    cases = [
        bits.view(dtype)[np.isfinite(bits.view(dtype))],
        squares,
        np.nextafter(squares, dtype(0)),
        np.nextafter(squares, dtype(9)),
        np.exp2(np.arange(-60, 60)).astype(dtype),
        np.nextafter(np.exp2(np.arange(-60, 60)).astype(dtype), dtype(0)),
        np.array([0.0, -0.0, np.inf, limits.max, limits.tiny], dtype),
        np.array([limits.smallest_subnormal, np.nan], dtype),
    ]
    for case in cases:
        ours = square_root(torch.from_numpy(case)).numpy()
        np.testing.assert_array_equal(ours, np.sqrt(case))
    # Vector bodies and scalar tails, and single elements.
    for size in [1, 2, 3, 5, 7, 8, 9, 15, 17, 31, 33]:
        part = cases[1][:size]
        np.testing.assert_array_equal(
            square_root(torch.from_numpy(part)), np.sqrt(part)
        )
    x = torch.from_numpy(cases[1][:64].copy()).requires_grad_()
    (slope,) = torch.autograd.grad(square_root(x).sum(), x)
    torch.testing.assert_close(slope, 0.5 / x.detach().sqrt())
