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
        for i, value in enumerate([0.0, -0.0, torch.nan, torch.inf, -torch.inf, -1e-24]):
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
