# SPDX-License-Identifier: Apache-2.0
"""All options, covers, dtypes and strides against each other, at random."""

from __future__ import annotations

import pytest
import torch
from helpers.sm3_problems import problem
from helpers.sm3_runs import IMPLEMENTATIONS, Param, Run, assert_same, run
from reference.sm3_oracle import Options, Place


def check(
    implementation: str, params: list[Param], options: Options, name: str
) -> None:
    ours = run(implementation, params, options)
    expected = run("oracle", params, options)
    for step, (one, other) in enumerate(zip(ours, expected, strict=True)):
        assert_same(one, other, f"{name}, step {step}, {options}")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("first", range(0, 150, 30))
def test_bits_of_random_problems(first, implementation) -> None:
    for seed in range(first, first + 30):
        check(implementation, *problem(seed), f"seed {seed}")


@pytest.mark.slow
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("first", range(1000, 4000, 100))
def test_bits_of_many_random_problems(first, implementation) -> None:
    for seed in range(first, first + 100):
        check(implementation, *problem(seed), f"seed {seed}")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", [(0, 8, 8), (4, 0, 5), (0, 4, 5, 3)], ids=str)
@pytest.mark.parametrize("variant", ["II", "I", "given"])
def test_empty_shards_of_every_rank(shape, variant, implementation) -> None:
    """A shard without elements keeps the cover of the whole parameter."""
    groups = tuple((a,) for a in range(len(shape)))
    param = Param(torch.zeros(shape), [torch.zeros(shape)] * 2, (shape, groups))
    param.start = [torch.ones(n) for n in shape]
    options = Options(variant=variant, beta2=0.9, momentum=0.9)
    check(implementation, [param], options, "empty")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("variant", ["II", "I"])
@pytest.mark.parametrize(
    "cover",
    [((4, 6), ((0,), (1,))), ((4, 6), ((0, 1),)), ((24,), ((0,),)), ((4, 6), ((),))],
    ids=str,
)
@pytest.mark.parametrize("beta2", [None, 0.5])
def test_maxima_of_flat_parts_are_those_of_the_whole(
    beta2, cover, variant, implementation
) -> None:
    """Two parts, with a maximum of their numbers after each step, are the whole."""
    if variant == "I" and cover != ((24,), ((0,),)):
        pytest.skip("the parts' squares have to be reduced first")
    options = Options(beta2=beta2, variant=variant)
    weight = torch.randn(24)
    grads = [torch.randn(24) * 10.0**-k for k in range(4)]
    whole = run(implementation, [Param(weight, grads, cover)], options)
    ranges = [(0, 7), (7, 24)]
    parts = []
    for a, b in ranges:
        mine = [grad[a:b] for grad in grads]
        param = Param(weight[a:b], mine, cover, Place(0, a, (1,)))
        parts.append(Run(implementation, [param], options))
    for step, expected in enumerate(whole):
        for made in parts:
            made.step([made.given[0].grads[step]])
        numbers = [made.batch.accumulators[0] for made in parts]
        for k, several in enumerate(zip(*numbers, strict=True)):
            largest = torch.stack(several).amax(0)
            assert torch.equal(largest, expected[0][f"accumulator_{k}"])
            for one in several:
                one.copy_(largest)
        for made, (a, b) in zip(parts, ranges, strict=True):
            ours = made.states()[0]["param"]
            assert torch.equal(ours, expected[0]["param"][a:b])
