# SPDX-License-Identifier: Apache-2.0
"""Structure of values between stages."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_sm3.pipeline._data import cut
from torch_sm3.pipeline._values import map_tensors, pack, unpack

ONE = torch.ones(1)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
)
values = st.recursive(
    scalars | st.just(ONE),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner)
    ),
    max_leaves=20,
)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a is b
    if type(a) is not type(b):
        return False
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, float):
        return a.hex() == b.hex()
    return bool(a == b)


@given(values)
def test_values_arrive_equal(value: Any) -> None:
    structure, tensors = pack(value, "stage 0")
    assert same(value, unpack(structure, tensors))


def test_special_numbers_arrive() -> None:
    structure, _ = pack((math.inf, -0.0, math.nan, 2**80), "stage 0")
    inf, zero, nan, big = unpack(structure, [])
    assert inf == math.inf and math.copysign(1, zero) < 0 and math.isnan(nan)
    assert big == 2**80


@given(st.text("tNTFif()[]{}s0123456789:;.xp-"), st.integers(0, 3))
def test_other_texts_are_refused_or_read(structure: str, count: int) -> None:
    try:
        value = unpack(structure, [ONE] * count)
    except (ValueError, OverflowError):
        return
    again, tensors = pack(value, "stage 0")
    assert len(tensors) == count
    assert same(value, unpack(again, tensors))


class Pair(NamedTuple):
    a: torch.Tensor
    b: int


class Two(torch.Tensor):
    """Holds another tensor, as one that is sharded or awaited does."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Two:
        self = torch.Tensor._make_wrapper_subclass(cls, inner.shape)
        self.inner = inner
        return self

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Any], *rest: Any) -> Two:
        return Two(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, *rest: Any, **more: Any) -> Any:
        raise NotImplementedError(str(func))


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({1: ONE}, "a key of type int at output"),
        ((ONE, Pair(ONE, 1)), r"Pair at output\[1\]"),
        ([{"x": object()}], r"object at output\[0\]\['x'\]"),
        (torch.ones(2).to_sparse(), "a torch.sparse_coo tensor on cpu at output"),
        (torch.ones(2, device="meta"), "a torch.strided tensor on meta at output"),
        (
            (1, torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
            r"a nested tensor on cpu at output\[1\]",
        ),
        (
            {"q": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)},
            r"a quantized tensor on cpu at output\['q'\]",
        ),
        ([ONE, Two(ONE)], r"Two at output\[1\]"),
    ],
)
def test_what_cannot_travel_is_named(value: Any, named: str) -> None:
    with pytest.raises(TypeError, match=f"expected stage 3 to return .*got {named}$"):
        pack(value, "stage 3")


def test_batches_are_cut_as_evenly_as_possible() -> None:
    batch = {"x": torch.arange(16).view(2, 8), "pair": Pair(torch.arange(8)[None], 5)}
    parts = cut(batch, 3, 1, "inputs")
    assert [part["x"].shape[1] for part in parts] == [3, 3, 2]
    assert [part["pair"].b for part in parts] == [5, 5, 5]
    assert torch.equal(torch.cat([part["x"] for part in parts], 1), batch["x"])
    assert parts[2]["pair"].a.tolist() == [[6, 7]]
    assert cut("same", 2, 0, "inputs") == ["same", "same"]
    with pytest.raises(ValueError, match="dimension 0"):
        cut(torch.ones(()), 2, 0, "inputs")


def test_functions_reach_every_tensor() -> None:
    doubled = map_tensors([ONE, (ONE, {"k": ONE}), None], lambda x: x * 2)
    assert doubled[0] == 2 and doubled[1][0] == 2 and doubled[1][1]["k"] == 2
    assert doubled[2] is None
