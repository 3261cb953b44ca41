# SPDX-License-Identifier: Apache-2.0
"""What the backward of a stage refuses, and how it says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.pipeline_backward import backward
from torch import nn


def left(split: str = "auto") -> Any:
    one = backward(split)
    (x,) = one.enter([torch.rand(2, 3)], [True])
    one.leave([nn.Linear(3, 3)(x)])
    return one


def test_unknown_split() -> None:
    wording = r"PipelineBackward: expected 'auto', 'always' or 'never', but got 'no'"
    with pytest.raises(ValueError, match=wording):
        backward("no")


def test_numbers_of_flags_and_gradients() -> None:
    with pytest.raises(ValueError, match=r"1 flags.* but got 2 \(argument 'requires"):
        backward().enter([torch.rand(1)], [True, False])
    with pytest.raises(ValueError, match=r"1 gradients.* got 2 \(argument 'gradients"):
        left().full([None, None])


@pytest.mark.parametrize("shape", [(2, 4), (3,), (1, 3), (2, 3, 1)])
@pytest.mark.parametrize("part", ["full", "input"])
def test_gradient_of_another_shape(part: str, shape: tuple[int, ...]) -> None:
    wording = r"a gradient of shape \[2, 3\] for output 0, but got"
    with pytest.raises(ValueError, match=wording):
        getattr(left(), part)([torch.ones(shape)])


def test_methods_in_another_order() -> None:
    gradient = torch.ones(2, 3)
    one = backward()
    for part in ("full", "input"):
        with pytest.raises(RuntimeError, match=f"expected {part} after leave, once"):
            getattr(one, part)([])
    with pytest.raises(RuntimeError, match="expected weight after input, once"):
        one.weight()
    one = left()
    one.input([gradient])
    for part in ("full", "input"):
        with pytest.raises(RuntimeError, match=f"expected {part} after leave, once"):
            getattr(one, part)([gradient])
    with pytest.raises(RuntimeError, match="free between leave and the backward"):
        one.free([gradient])
    one.weight()
    with pytest.raises(RuntimeError, match="expected weight after input, once"):
        one.weight()
    with pytest.raises(RuntimeError, match="one call of leave"):
        one.leave([])
    with pytest.raises(RuntimeError, match="one call of enter, before leave"):
        one.enter([], [])
