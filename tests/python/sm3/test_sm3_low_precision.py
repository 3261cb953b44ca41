# SPDX-License-Identifier: Apache-2.0
"""Storage in few bits: momentum, Kahan summation, stochastic rounding."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.sm3_runs import (
    IMPLEMENTATIONS,
    Param,
    assert_same,
    run,
    same_bits,
)
from reference.sm3_oracle import NumpySM3, Options, Place
from reference.sm3_storage import mix_bits

from torch_sm3.optim import _random, _storage
from torch_sm3.optim._batch import Place as ProductPlace

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(3, 300), (5, 256), (2, 3, 513), (40,), (), (600,)]
OPTIONS = [
    Options(momentum=0.9),
    Options(momentum=0.9, weight_decay=0.1, maximize=True, grad_scale=5.0),
    Options(momentum=0.5, variant="I", beta2=0.9),
    Options(momentum=0.9, compat="trax", weight_decay=0.1),
    Options(momentum=0.9, compat="optax"),
    Options(weight_decay=0.1),
]


def gradients(shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """Return a plain, a wild, a broken and a zero gradient."""
    wild = torch.randn(shape) * 10.0 ** torch.randint(-12, 4, shape)
    broken = torch.randn(shape)
    flat = broken.view(-1)
    for i, value in enumerate([torch.nan, torch.inf, -torch.inf, 0.0, -0.0]):
        flat[3 + 2 * i :: 41] = value
    plain = [torch.randn(shape), wild, broken, torch.zeros(shape)]
    return [grad.to(dtype) for grad in plain]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("momentum_dtype", [None, "float32", "bfloat16", "int8"])
@pytest.mark.parametrize("mode", ["nearest", "kahan", "stochastic"])
def test_bits_of_every_storage(mode, momentum_dtype, dtype, implementation) -> None:
    if mode == "stochastic" and dtype == torch.float16:
        pytest.skip("float16 parameters are not rounded stochastically")
    for options in OPTIONS:
        changed = replace(
            options,
            momentum_dtype=momentum_dtype,
            kahan=mode == "kahan",
            stochastic_rounding=mode == "stochastic",
            seed=2**62 + 12345,
        )
        params = [
            Param(torch.randn(shape).to(dtype), gradients(shape, dtype))
            for shape in SHAPES
        ]
        ours = run(implementation, params, changed)
        expected = run("oracle", params, changed)
        for step, (one, other) in enumerate(zip(ours, expected, strict=True)):
            assert_same(one, other, f"{changed}, step {step}")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_float32_momentum_of_float64_parameters(implementation) -> None:
    grads = [torch.randn(7, 5, dtype=torch.float64) for _ in range(3)]
    param = Param(torch.randn(7, 5, dtype=torch.float64), grads)
    options = Options(momentum=0.9, momentum_dtype="float32", weight_decay=0.1)
    ours = run(implementation, [param], options)
    for one, other in zip(ours, run("oracle", [param], options), strict=True):
        assert_same(one, other, implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_kahan_keeps_small_steps(implementation) -> None:
    """The example of the specification: 100 steps of 1e-3 / sqrt(step) from 1."""
    grads = [torch.ones(1, dtype=torch.bfloat16)] * 100
    param = Param(torch.ones(1, dtype=torch.bfloat16), grads)
    exact = Param(torch.ones(1), [torch.ones(1)] * 100)
    plain = run(implementation, [param], Options(lr=1e-3))[-1][0]["param"]
    state = run(implementation, [param], Options(lr=1e-3, kahan=True))[-1][0]
    reference = run(implementation, [exact], Options(lr=1e-3))[-1][0]["param"]
    total = state["param"].double() + state["compensation"].double()
    assert plain.item() == 1.0
    assert total.item() == pytest.approx(0.98141, abs=5e-6)
    assert reference.item() == pytest.approx(0.98141, abs=5e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_kahan_follows_the_exact_run(implementation) -> None:
    """The sum w + c errs by the roundings of c alone: 2^-9 of a unit in each step."""
    steps, shape = 50, (20, 30)
    weight = torch.randn(shape).bfloat16()
    grads = [torch.randn(shape).bfloat16() for _ in range(steps)]
    options = Options(lr=1e-3, kahan=True)
    state = run(implementation, [Param(weight, grads)], options)[-1][0]
    exact = NumpySM3(weight.double().numpy(), Options(lr=1e-3))
    for grad in grads:
        exact.step(grad.double().numpy())
    total = state["param"].double() + state["compensation"].double()
    unit = 2.0 ** (np.floor(np.log2(np.abs(exact.w) + 1e-3)) - 7)
    bound = steps * (unit * 2.0**-9 + 1e-3 * 2.0**-20)
    assert (np.abs(total.numpy() - exact.w) <= bound).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("stochastic", [False, True])
def test_int8_momentum_errs_by_a_step_of_its_block(stochastic, implementation) -> None:
    shape = (4, 600)
    param = Param(torch.zeros(shape), [torch.randn(shape)])
    options = Options(momentum=0.9, momentum_dtype="int8")
    options = replace(options, stochastic_rounding=stochastic, lr=1.0)
    state = run(implementation, [param], options)[-1][0]
    exact = -state["param"].double()
    scale = state["momentum_scale"].double().repeat_interleave(256, dim=-1)[:, :600]
    error = (state["momentum_buffer"].double() * scale - exact).abs()
    limit = 1.0 if stochastic else 0.5
    assert (error <= scale * limit * (1 + 1e-5)).all()
    blocks = exact.abs().split(256, dim=-1)
    largest = torch.stack([block.amax(-1) for block in blocks], -1)
    torch.testing.assert_close(
        state["momentum_scale"].double(), largest / 127, rtol=1e-6, atol=0
    )
    assert (state["momentum_buffer"].abs().amax() == 127).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_stochastic_rounding_is_right_on_average(implementation) -> None:
    """The mean error of N roundings is within 4 sigma / sqrt(N) of zero."""
    count = 60_000
    # One step from 1 by lr: 1 - 0.0013 lies between two bfloat16, 2^-8 apart.
    param = Param(torch.ones(count).bfloat16(), [torch.ones(count)])
    options = Options(lr=0.0013, stochastic_rounding=True, seed=7)
    got = run(implementation, [param], options)[-1][0]["param"].double()
    down = 1 - 2.0**-8
    assert set(got.tolist()) == {1.0, down}
    exact = 1 - float(np.float32(0.0013))
    share = (1 - exact) * 2.0**8
    sigma = 2.0**-8 * math.sqrt(share * (1 - share))
    assert abs(got.mean().item() - exact) <= 4 * sigma / math.sqrt(count) + 2.0**-24
    # Neighbours are independent: so is the product of their errors zero on average.
    error = (got - exact) / sigma
    assert abs((error[1:] * error[:-1]).mean().item()) <= 4 / math.sqrt(count)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_stochastic_momentum_is_right_on_average(implementation) -> None:
    count = 256 * 200
    grads = torch.full((200, 256), 0.3).index_fill_(1, torch.tensor([0]), 1.0)
    # A diagonal cover that holds 1 already makes u = g / sqrt(1 + g^2).
    cover = ((200, 256), ((0, 1),))
    param = Param(torch.zeros(200, 256), [grads], cover, None, [torch.ones(200, 256)])
    options = Options(momentum=0.5, momentum_dtype="int8", stochastic_rounding=True)
    state = run(implementation, [param], options)[-1][0]
    ratio = (0.3 / math.sqrt(1.09)) / (1 / math.sqrt(2)) * 127
    codes = state["momentum_buffer"][:, 1:].double()
    part = ratio - math.floor(ratio)
    sigma = math.sqrt(part * (1 - part) / count)
    assert abs(codes.mean().item() - ratio) <= 4 * sigma + 2.0**-15


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_representable_results_never_change(implementation) -> None:
    weight = torch.randn(50, 40).bfloat16()
    param = Param(weight, [torch.zeros(50, 40)] * 5)
    options = Options(stochastic_rounding=True)
    for states in run(implementation, [param], options):
        assert same_bits(states[0]["param"], weight)


def shards(weight: torch.Tensor, dim: int, parts: int) -> list[tuple[int, slice]]:
    """Return number and range of each part of a dim, in uneven parts."""
    size = weight.shape[dim]
    cuts = [size * k // parts for k in range(parts + 1)]
    return list(enumerate(map(slice, cuts, cuts[1:])))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_random_numbers_do_not_depend_on_the_shard(dim, implementation) -> None:
    """Each shard keeps the whole accumulators, so that only random numbers differ."""
    shape = (7, 5, 600)
    weight = torch.randn(shape).bfloat16()
    grad = torch.randn(shape)
    options = Options(stochastic_rounding=True, seed=11, lr=0.01, weight_decay=0.1)
    options = replace(options, variant="given")

    def part(where: tuple[slice, ...], place: Place | None) -> Param:
        sizes = tuple(weight[where].shape)
        cover = (sizes, (tuple(range(len(sizes))),))
        start = [torch.ones(sizes)]
        return Param(weight[where], [grad[where]] * 2, cover, place, start)

    everything = (slice(None),) * 3
    whole = run(implementation, [part(everything, Place.whole(shape, 4))], options)
    strides = (3000, 600, 1)
    for _, piece in shards(weight, dim, 3):
        where = tuple(piece if d == dim else slice(None) for d in range(3))
        place = Place(4, piece.start * strides[dim], strides)
        ours = run(implementation, [part(where, place)], options)
        for one, other in zip(ours, whole, strict=True):
            assert same_bits(one[0]["param"], other[0]["param"][where])


def test_random_numbers_differ_by_all_their_keys() -> None:
    place = ProductPlace(0, 0, (1,))
    numbers = _random.element_numbers(torch.Size([64]), place, torch.device("cpu"))

    def bits(seed: int, step: int, ordinal: int) -> tuple[int, ...]:
        draws = _random.random_bits(seed, torch.tensor(step), ordinal, numbers)
        expected = mix_bits(seed, step, Place(ordinal, 0, (1,)), (64,))
        assert draws.numpy().view(np.uint64).tolist() == expected.tolist()
        return tuple(draws.tolist())

    keys = [(0, 1, 0), (1, 1, 0), (0, 2, 0), (0, 1, 1), (2**63 - 1, 1, 0)]
    draws = [bits(*key) for key in keys]
    assert len(set(draws)) == len(keys)
    assert len({number for draw in draws for number in draw}) == 64 * len(keys)


def test_torch_generators_are_left_alone() -> None:
    before = torch.get_rng_state()
    param = Param(torch.ones(4, 4).bfloat16(), [torch.ones(4, 4)])
    for implementation in ("single", "multi"):
        run(implementation, [param], Options(stochastic_rounding=True))
    assert torch.equal(torch.get_rng_state(), before)


def test_special_values_round_to_themselves() -> None:
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1.0, 3.4e38])
    bits = torch.full(x.shape, 0xFFFF)
    rounded = _storage.round_stochastically(x, bits)
    expected = x.bfloat16()
    assert same_bits(rounded[:-1], expected[:-1])
    assert rounded[2].view(torch.int16) == 0x7FC0
    assert rounded[-1] == torch.inf, "beyond the largest bfloat16 lies infinity"
