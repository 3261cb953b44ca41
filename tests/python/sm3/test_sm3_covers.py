# SPDX-License-Identifier: Apache-2.0
"""Covers: what they mean for a shape, and that they keep SM3's bounds."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from helpers.sm3_models import IMPLEMENTATIONS, equal, parameters, snapshot
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_sm3 import SM3, Cover
from torch_sm3.optim._cover import plain_cover
from torch_sm3.optim._resolve import resolve

FLAGS = pytest.mark.parametrize("flags", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)


def found(cover: object, shape: tuple[int, ...], compat: str | None = None) -> tuple:
    resolved = resolve(plain_cover(cover), shape, compat)
    return resolved.view, resolved.axes


@pytest.mark.parametrize(
    ("cover", "shape", "view", "axes"),
    [
        ("auto", (), (), ((),)),
        ("auto", (1,), (), ((),)),
        ("auto", (7,), (7,), ((0,),)),
        ("auto", (1, 1), (), ((),)),
        ("auto", (2, 2), (2, 2), ((0, 1),)),
        ("auto", (2, 1, 2), (2, 2), ((0, 1),)),
        ("auto", (2, 3), (2, 3), ((0,), (1,))),
        ("auto", (2, 2, 2), (2, 2, 2), ((0,), (1,), (2,))),
        ("auto", (5, 1), (5,), ((0,),)),
        ("auto", (1, 6, 5), (6, 5), ((0,), (1,))),
        ("auto", (0, 3), (0, 3), ((0, 1),)),
        ("auto", (3, 1, 0), (3, 0), ((0, 1),)),
        ("standard", (2, 2), (2, 2), ((0,), (1,))),
        ("standard", (), (), ((),)),
        ("standard", (1, 4), (4,), ((0,),)),
        ("standard", (0, 2), (0, 2), ((0, 1),)),
        ("diagonal", (3, 1, 4), (3, 4), ((0, 1),)),
        ("diagonal", (), (), ((),)),
        (Cover.standard(), (2, 2), (2, 2), ((0,), (1,))),
        (Cover.diagonal(), (3, 4), (3, 4), ((0, 1),)),
        (Cover.merge((0,), (1, 2, 3)), (8, 4, 3, 3), (8, 36), ((0,), (1,))),
        (Cover.merge((0, 1), (2,)), (2, 3, 1), (6,), ((0,),)),
        (Cover.merge((0,), (1,)), (2, 2), (2, 2), ((0,), (1,))),
        (Cover.heads(0, 4), (12, 5), (4, 3, 5), ((0, 1), (0, 2))),
        (Cover.heads(-1, 4), (5, 12), (5, 4, 3), ((0, 1), (1, 2))),
        (Cover.heads(0, 1), (12, 5), (12, 5), ((0,), (1,))),
        (Cover.heads(0, 12), (12, 5), (12, 5), ((0, 1),)),
        (Cover.heads(1, 2), (3, 4, 1), (3, 2, 2), ((0, 1), (1, 2))),
        (Cover.heads(0, 2), (6,), (2, 3), ((0, 1),)),
        (Cover.blocks(0, 3), (12, 5), (4, 3, 5), ((0, 1), (0, 2))),
        (Cover.blocks(1, 12), (5, 12), (5, 12), ((0,), (1,))),
        (Cover.heads(0, 7), (0, 3), (0, 3), ((0, 1),)),
        (Cover((4, -1)), (2, 6), (4, 3), ((0,), (1,))),
        (Cover(axes=((0,), (1, 2))), (2, 3, 4), (2, 3, 4), ((0,), (1, 2))),
        (Cover((1, 12), ((1, 0),)), (3, 4), (1, 12), ((0, 1),)),
        (Cover((), ((),)), (), (), ((),)),
        (Cover(None, ((),)), (3, 4), (3, 4), ((),)),
        (Cover(), (2, 2), (2, 2), ((0,), (1,))),
    ],
    ids=str,
)
def test_view_and_axes(cover, shape, view, axes) -> None:
    assert found(cover, shape) == (view, axes)


@pytest.mark.parametrize("compat", ["google", "optax", "trax", "enealor"])
def test_auto_means_standard_under_a_preset(compat) -> None:
    assert found("auto", (2, 2), compat) == found("standard", (2, 2))
    param = torch.nn.Parameter(torch.zeros(2, 2))
    optimizer = SM3([param], compat=compat)
    optimizer.init_state()
    assert list(optimizer.state[param]) == ["step", "accumulator_0", "accumulator_1"]


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: Cover((3, 4), ()), ValueError, "at least one axis group"),
        (lambda: Cover((3, 4), ((0, 0),)), ValueError, "no axis twice"),
        (lambda: Cover((-1, -1)), ValueError, "at most one -1"),
        (lambda: Cover((-2, 3)), ValueError, "'view'"),
        (lambda: Cover("ab"), TypeError, "'view'"),
        (lambda: Cover((3.0, 4)), TypeError, "'view'"),
        (lambda: Cover((3, 4), (0, 1)), TypeError, "'axes'"),
        (lambda: Cover.merge(), ValueError, "'groups'"),
        (lambda: Cover.merge((1,), (0,)), ValueError, "in order"),
        (lambda: Cover.merge((0,), (0, 1)), ValueError, "once"),
        (lambda: Cover.merge((0,), ()), ValueError, "not empty"),
        (lambda: Cover.heads(0, 0), ValueError, "'n'"),
        (lambda: Cover.blocks(0, -1), ValueError, "'size'"),
        (lambda: Cover.heads(0, 2.0), TypeError, "'n'"),
    ],
)
def test_covers_that_cannot_be(make, error, text) -> None:
    with pytest.raises(error, match=text):
        make()


@pytest.mark.parametrize(
    ("cover", "text"),
    [
        (Cover((5, 4)), "product"),
        (Cover((5, -1)), "divides 12"),
        (Cover((0, -1)), "'view'"),
        (Cover((3, 4), ((0,), (2,))), "axes of the view"),
        (Cover((3, 4), ((-1,),)), "axes of the view"),
        (Cover(axes=((0,), (1, 2))), "axes of the view"),
        (Cover.merge((0,), (1, 2)), r"shape \(3, 4\)"),
        (Cover.merge((0,)), r"shape \(3, 4\)"),
        (Cover.heads(0, 2), "divisor of 3"),
        (Cover.heads(2, 1), "dimension of shape"),
        (Cover.heads(-3, 1), "dimension of shape"),
        (Cover.blocks(1, 3), "divisor of 4"),
        (Cover([1] * 63 + [12]), "at most 62"),
    ],
    ids=str,
)
def test_covers_that_do_not_fit_a_parameter(cover, text) -> None:
    param = torch.nn.Parameter(torch.zeros(3, 4))
    with pytest.raises(ValueError, match=text):
        SM3([param], cover=cover)
    optimizer = SM3([torch.nn.Parameter(torch.zeros(2))])
    with pytest.raises(ValueError, match=text):
        optimizer.add_param_group({"params": [param], "cover": cover})
    assert len(optimizer.param_groups) == 1


COVERS = [
    Cover((4, -1), [[0], [1]]),
    Cover(axes=((1,), (0,))),
    Cover.merge((0,), (1, 2)),
    Cover.heads(1, 2),
    Cover.blocks(-1, 3),
]


@pytest.mark.parametrize("cover", COVERS, ids=repr)
def test_a_cover_is_a_value(cover) -> None:
    twin = pickle.loads(pickle.dumps(copy.deepcopy(cover)))
    assert twin == cover and hash(twin) == hash(cover)
    assert eval(repr(cover)) == cover
    assert plain_cover(cover) == cover.plain == plain_cover(cover.plain)
    as_lists = [list(x) if isinstance(x, tuple) else x for x in cover.plain]
    assert plain_cover(as_lists) == cover.plain
    assert cover != Cover((12,)) and cover != "auto"


@pytest.mark.parametrize("damaged", [(), ("rows",), ("custom", (2,), ())], ids=str)
def test_damaged_plain_forms_are_refused(damaged) -> None:
    with pytest.raises(ValueError, match="Cover"):
        SM3([torch.nn.Parameter(torch.zeros(2))], cover=damaged)


@FLAGS
@pytest.mark.parametrize(
    ("cover", "shape", "sizes"),
    [
        (Cover.merge((0,), (1, 2, 3)), (8, 4, 3, 3), [(8,), (36,)]),
        (Cover.heads(0, 4), (12, 5), [(4, 3), (4, 5)]),
        (Cover.blocks(1, 2), (3, 6), [(3, 3), (3, 2)]),
        (Cover((12,), ((),)), (3, 4), [(1,)]),
        (Cover((2, 1, 6), ((0, 1), (1, 2))), (3, 4), [(2, 1), (1, 6)]),
        (Cover((2,) * 7), (16, 8), [(2,)] * 7),
    ],
    ids=str,
)
def test_accumulators_are_maxima_over_their_sets(cover, shape, sizes, flags) -> None:
    (param,) = parameters(shape)
    optimizer = SM3([param], cover=cover, lr=1.0, **flags)
    optimizer.step()
    resolved = resolve(plain_cover(cover), shape, None)
    squares = param.grad.square().view(resolved.view)
    for i, (group, size) in enumerate(zip(resolved.axes, sizes, strict=True)):
        others = [a for a in range(squares.dim()) if a not in group]
        largest = squares.amax(others).reshape(size)
        assert torch.equal(optimizer.state[param][f"accumulator_{i}"], largest)


def test_the_loop_and_the_operator_agree_on_covers() -> None:
    for cover in [*COVERS[2:], Cover((6, 24), ((0,), (0, 1))), Cover((2, -1))]:
        results = []
        for flags in ({}, {"fused": False}, {"foreach": True}):
            torch.manual_seed(2)
            params = parameters((4, 6, 6), (4, 1, 30), (4, 10, 3))
            covers = [cover, "auto", "standard"]
            groups = zip(params, covers, strict=True)
            optimizer = SM3(
                [{"params": [p], "cover": c} for p, c in groups],
                momentum=0.5,
                **flags,
            )
            for _ in range(3):
                optimizer.step()
            results.append(snapshot(optimizer))
        assert equal(results[0], results[1]) and equal(results[0], results[2])


def bounds(param: torch.Tensor, optimizer: SM3, cover: object) -> torch.Tensor:
    """Return nu of every element: the least of its accumulators, after a step."""
    resolved = resolve(plain_cover(cover), tuple(param.shape), None)
    least = torch.full(resolved.view, torch.inf)
    for i, group in enumerate(resolved.axes):
        sizes = [n if a in group else 1 for a, n in enumerate(resolved.view)]
        accumulator = optimizer.state[param][f"accumulator_{i}"]
        least = torch.minimum(least, accumulator.reshape(sizes))
    return least.reshape(param.shape)


REFINEMENTS = [
    ("standard", Cover.heads(0, 3)),
    ("standard", Cover.blocks(1, 2)),
    ("standard", "diagonal"),
    ("standard", Cover.merge((0,), (1, 2))),
    (Cover(axes=((),)), "standard"),
    (Cover.heads(0, 3), "diagonal"),
]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), which=st.integers(0, len(REFINEMENTS) - 1))
def test_a_finer_cover_never_has_larger_bounds(seed, which) -> None:
    coarse, fine = REFINEMENTS[which]
    generator = torch.Generator().manual_seed(seed)
    pairs = []
    for cover in (coarse, fine):
        param = torch.nn.Parameter(torch.zeros(6, 4, 3))
        pairs.append((param, SM3([param], cover=cover), cover))
    sums = torch.zeros(6, 4, 3)
    for _ in range(5):
        scale = 10.0 ** torch.randint(-6, 7, (6, 4, 3), generator=generator)
        grad = torch.randn(6, 4, 3, generator=generator) * scale
        sums = sums + grad * grad
        for param, optimizer, _ in pairs:
            param.grad = grad.clone()
            optimizer.step()
        larger, smaller = (bounds(*pair) for pair in pairs)
        assert (sums <= smaller).all() and (smaller <= larger).all()


# --- shape hints --------------------------------------------------------------


@FLAGS
@pytest.mark.parametrize("cover", ["auto", "diagonal", Cover.heads(0, 2)], ids=repr)
@pytest.mark.parametrize("variant", ["II", "I"])
def test_a_whole_flattened_tensor_has_the_bits_of_its_shape(
    cover, variant, flags
) -> None:
    (param,) = parameters((6, 4, 5))
    flat = torch.nn.Parameter(param.detach().flatten().clone())
    flat.grad = param.grad.flatten()
    options = {"cover": cover, "variant": variant, "momentum": 0.9, **flags}
    expected, optimizer = SM3([param], **options), SM3([flat], **options)
    optimizer.set_shape_hint(flat, (6, 4, 5))
    for _ in range(3):
        expected.step()
        optimizer.step()
    assert torch.equal(flat.detach(), param.detach().flatten())
    for key, value in expected.state[param].items():
        assert torch.equal(optimizer.state[flat][key].flatten(), value.flatten()), key


@FLAGS
def test_a_hinted_range_keeps_the_whole_accumulators(flags) -> None:
    whole = torch.nn.Parameter(torch.zeros(4, 6))
    whole.grad = torch.zeros(4, 6)
    part = torch.randn(7)
    whole.grad.view(-1)[5:12] = part
    expected = SM3([whole], lr=1.0, **flags)
    shard = torch.nn.Parameter(torch.zeros(7))
    optimizer = SM3([shard], lr=1.0, **flags)
    optimizer.set_shape_hint(shard, (4, 6), offset=5)
    assert optimizer.state_bytes(detail=True)["accumulator"] == 4 * (4 + 6)
    shard.grad = part
    for _ in range(2):
        expected.step()
        optimizer.step()
    assert torch.equal(shard.detach(), whole.detach().view(-1)[5:12])
    for i in range(2):
        key = f"accumulator_{i}"
        assert torch.equal(optimizer.state[shard][key], expected.state[whole][key])


def test_hinted_ranges_keep_float32_momentum() -> None:
    param = torch.nn.Parameter(torch.zeros(4096))
    optimizer = SM3([param], momentum=0.9, momentum_dtype=torch.int8)
    optimizer.set_shape_hint(param, (64, 64))
    optimizer.init_state()
    assert optimizer.state[param]["momentum_buffer"].dtype == torch.float32
    assert "momentum_scale" not in optimizer.state[param]


@pytest.mark.parametrize(
    ("shape", "offset", "text"),
    [((3, 4), 6, "range within the 12"), ((3,), 0, "'offset'"), ((3, 4), -1, "within")],
)
def test_hints_that_do_not_hold_the_parameter(shape, offset, text) -> None:
    param = torch.nn.Parameter(torch.zeros(7))
    optimizer = SM3([param])
    with pytest.raises(ValueError, match=text):
        optimizer.set_shape_hint(param, shape, offset)
    optimizer.init_state()
    assert optimizer.state[param]["accumulator_0"].shape == (7,)


def test_hints_come_before_state_and_for_vectors_only() -> None:
    vector, matrix = torch.nn.Parameter(torch.zeros(6)), torch.zeros(2, 3)
    optimizer = SM3([vector, matrix])
    with pytest.raises(ValueError, match="1-D parameter, but got 2-D"):
        optimizer.set_shape_hint(matrix, (2, 3))
    with pytest.raises(ValueError, match="parameter of this optimizer"):
        optimizer.set_shape_hint(torch.zeros(6), (2, 3))
    optimizer.init_state()
    with pytest.raises(RuntimeError, match="without state"):
        optimizer.set_shape_hint(vector, (2, 3))


def test_hints_are_no_part_of_a_state_dict() -> None:
    param = torch.nn.Parameter(torch.zeros(6))
    optimizer = SM3([param])
    optimizer.set_shape_hint(param, (2, 3))
    optimizer.init_state()
    saved = optimizer.state_dict()
    with pytest.raises(ValueError, match=r"\[\(6,\)\].*\[\(2,\), \(3,\)\]"):
        SM3([param]).load_state_dict(saved)
    hinted = SM3([param])
    hinted.set_shape_hint(param, (2, 3))
    hinted.load_state_dict(saved)
    assert equal(snapshot(hinted), snapshot(optimizer))
