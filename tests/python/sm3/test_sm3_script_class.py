# SPDX-License-Identifier: Apache-2.0
"""torch.classes.torch_sm3.SM3 called from Python: its bits, its copies, its errors."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import torch_sm3


def make(**options: object) -> torch.ScriptObject:
    return torch.classes.torch_sm3.SM3(**options)


def pairs(seed: int, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], ...]:
    torch.manual_seed(seed)
    shapes = [(5, 7), (7,), (), (2, 3, 4)]
    params = [torch.randn(shape).to(dtype) for shape in shapes]
    grads = [torch.randn(shape).to(dtype) for shape in shapes]
    return params, grads


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))],
    ids=["deepcopy", "pickle"],
)
@pytest.mark.parametrize("kahan", [False, True])
def test_a_copy_is_independent_and_equal(
    duplicate: Callable[[torch.ScriptObject], torch.ScriptObject], kahan: bool
) -> None:
    params, grads = pairs(0, torch.bfloat16)
    optimizer = make(lr=0.01, momentum=0.9, kahan=kahan)
    optimizer.step(params, grads)
    twin, others = duplicate(optimizer), copy.deepcopy(params)
    for optimizer_, params_ in [(optimizer, params), (twin, others)]:
        for _ in range(3):
            optimizer_.step(params_, grads)
    for ours, theirs in zip(params, others, strict=True):
        assert torch.equal(ours, theirs)
    ours, theirs = optimizer.state_dict(), twin.state_dict()
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert torch.equal(value, theirs[key]) and value.dtype == theirs[key].dtype


def test_a_pickle_of_another_version_is_refused() -> None:
    params, grads = pairs(0)
    optimizer = make(momentum=0.9)
    optimizer.step(params, grads)
    other = torch.ScriptObject.__new__(torch.ScriptObject)
    (version, *rest), name = optimizer.__getstate__()
    with pytest.raises(ValueError, match=r"a pickle of version 1, but got 2"):
        other.__setstate__(((version + 1, *rest), name))
    other.__setstate__(((version, *rest), name))
    assert other.state_bytes() == optimizer.state_bytes() > 0


def test_the_state_dict_says_what_changes() -> None:
    params, grads = pairs(0)
    optimizer = make(momentum=0.9)
    optimizer.step(params, [grads[0], None, None, grads[3]])
    optimizer.set_lr(0.25)
    state = optimizer.state_dict()
    assert set(state) == {
        *("parameters", "lr", "skipped_steps"),
        *("0.step", "0.accumulator_0", "0.accumulator_1", "0.momentum_buffer"),
        *(f"3.accumulator_{k}" for k in range(3)),
        *("3.step", "3.momentum_buffer"),
    }
    other, copies = make(momentum=0.9), copy.deepcopy(params)
    other.load_state_dict(state)
    assert other.lr() == 0.25 and other.state_bytes() == optimizer.state_bytes()
    for _ in range(2):
        optimizer.step(params, grads)
        other.step(copies, grads)
    for ours, theirs in zip(params, copies, strict=True):
        assert torch.equal(ours, theirs)


def test_state_comes_for_all_that_require_a_gradient() -> None:
    params, grads = pairs(0)
    params[1].requires_grad_()
    optimizer = make()
    optimizer.step(params, [grads[0], None, None, None])
    steps = {k: int(v) for k, v in optimizer.state_dict().items() if ".step" in k}
    assert steps == {"0.step": 1, "1.step": 0}
    assert optimizer.state_bytes_by_kind() == {
        "accumulator": 4 * (5 + 7 + 7),
        "momentum": 0,
        "scale": 0,
        "compensation": 0,
        "step": 16,
    }


def test_a_sparse_gradient_has_the_bits_of_the_python_optimizer() -> None:
    params, _ = pairs(0)
    weight = nn.Parameter(params[0].clone())
    values = torch.randn(3, 7)
    grad = torch.sparse_coo_tensor([[1, 3, 1]], values, (5, 7), check_invariants=True)
    optimizer = make()
    optimizer.step([params[0]], [grad])
    ours = torch_sm3.SM3([weight])
    weight.grad = grad
    ours.step()
    assert torch.equal(params[0], weight)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_a_changed_list_is_refused() -> None:
    params, grads = pairs(0)
    optimizer = make()
    optimizer.step(params, grads)
    before = copy.deepcopy(params)
    with pytest.raises(ValueError, match=r"4 parameters as before, but got 3"):
        optimizer.step(params[:3], grads[:3])
    with pytest.raises(ValueError, match=r"the shapes .* as before, but got"):
        optimizer.step(params[::-1], grads[::-1])
    with pytest.raises(ValueError, match=r"4 gradients or None, but got 3"):
        optimizer.step(params, grads[:3])
    with pytest.raises(ValueError, match=r"distinct parameters"):
        optimizer.step([params[0]] * 4, grads)
    with pytest.raises(ValueError, match=r"shape \[2, 3, 4\] for parameter 3, but got"):
        optimizer.step(params, [*grads[:3], grads[3].reshape(4, 3, 2)])
    with pytest.raises(ValueError, match=r"a dtype for a Float parameter, but got Do"):
        optimizer.step(params, [*grads[:3], grads[3].double()])
    with pytest.raises(ValueError, match=r"dense or COO gradients, but got SparseCsr"):
        optimizer.step(params, [grads[0].to_sparse_csr(), *grads[1:]])
    for ours, theirs in zip(params, before, strict=True):
        assert torch.equal(ours, theirs)


def test_a_state_dict_that_does_not_fit_is_refused() -> None:
    params, grads = pairs(0)
    optimizer = make()
    optimizer.step(params, grads)
    state = optimizer.state_dict()
    small = make()
    small.step(params[:1], grads[:1])
    with pytest.raises(ValueError, match=r"state of 1 parameters, but got 4"):
        small.load_state_dict(state)
    with pytest.raises(ValueError, match=r'a key "lr", but got none'):
        small.load_state_dict({"parameters": torch.tensor(1)})
    with pytest.raises(ValueError, match=r'but got "7.step"'):
        optimizer.load_state_dict({**state, "7.step": torch.tensor(1)})
    other = make()
    other.load_state_dict(state)
    with pytest.raises(ValueError, match=r"accumulators of shapes"):
        other.step(params[::-1], grads[::-1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, r"a finite number >= 0, but got -1 \(argument 'lr'\)"),
        ({"momentum": 1.0}, r"0 <= momentum < 1, but got 1"),
        ({"beta2": 0.0}, r"beta=0 means the sum"),
        ({"eps": float("nan")}, r"argument 'eps'"),
        ({"weight_decay": -0.5}, r"argument 'weight_decay'"),
        ({"variant": "III"}, r'"II" or "I", but got "III"'),
        ({"compat": "adam"}, r"argument 'compat'"),
        ({"compat": "trax", "beta2": 0.5}, r"argument 'beta2'"),
        ({"cover": "rows"}, r"argument 'cover'"),
        ({"cover": "heads", "cover_numbers": [[0]]}, r"argument 'cover'"),
        ({"momentum_dtype": torch.float16}, r"argument 'momentum_dtype'"),
        ({"kahan": True, "stochastic_rounding": True}, r"argument 'kahan'"),
        ({"seed": -1}, r"0 <= seed < 2\^63, but got -1"),
    ],
)
def test_options_are_checked(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)
    with pytest.raises(ValueError, match="argument 'lr'"):
        make().set_lr(float("inf"))


@pytest.mark.parametrize("options", [{}, {"lr": 0.05, "momentum": 0.9}])
def test_the_object_can_be_flattened(options: dict[str, object]) -> None:
    params, grads = pairs(0)
    optimizer = make(**options)
    optimizer.step(params, grads)
    flat = dict(optimizer.__obj_flatten__())
    assert set(flat) == {"options", "shapes", "state_dict"}
    assert flat["shapes"] == [[5, 7], [7], [], [2, 3, 4]]
    assert flat["options"][0] == options.get("lr", 0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "options",
    [
        {"variant": "I", "momentum": 0.9},
        {"beta2": 0.9, "maximize": True, "eps": 1e-6},
        {"compat": "google", "beta2": 0.9},
        {"compat": "optax", "weight_decay": 0.1},
        {"compat": "trax", "weight_decay": 0.1, "momentum": 0.5},
        {"compat": "enealor", "beta2": 0.5},
        {"cover": "diagonal"},
        {"kahan": True, "weight_decay": 0.1},
        {"stochastic_rounding": True, "seed": 5},
        {"momentum": 0.9, "momentum_dtype": torch.int8, "stochastic_rounding": True},
    ],
    ids=lambda options: "-".join(options),
)
def test_every_option_has_the_bits_of_the_python_optimizer(
    options: dict[str, object], dtype: torch.dtype
) -> None:
    if dtype == torch.float64 and "momentum_dtype" in options:
        with pytest.raises(NotImplementedError, match="argument 'momentum_dtype'"):
            make(**options).step([torch.zeros(2, dtype=dtype)], [None])
        return
    torch.manual_seed(0)
    params = [torch.randn(s).to(dtype) for s in [(17, 300), (7,), (), (2, 2)]]
    twins = [nn.Parameter(p.clone()) for p in params]
    ours, theirs = make(lr=0.05, **options), torch_sm3.SM3(twins, lr=0.05, **options)
    for _ in range(3):
        grads: list[Tensor | None] = [torch.randn(p.shape).to(dtype) for p in params]
        for twin, grad in zip(twins, grads, strict=True):
            twin.grad = grad
        ours.step(params, grads)
        theirs.step()
    state = ours.state_dict()
    for i, (param, twin) in enumerate(zip(params, twins, strict=True)):
        assert torch.equal(param, twin)
        named = {f"{i}.{key}": value for key, value in theirs.state[twin].items()}
        assert named.keys() == {k for k in state if k.startswith(f"{i}.")}
        for key, value in named.items():
            assert torch.equal(state[key], value) and state[key].dtype == value.dtype


def test_custom_covers_have_the_bits_of_the_python_optimizer() -> None:
    for numbers, cover in [
        (("heads", [[0, 2]]), torch_sm3.Cover.heads(0, 2)),
        (("blocks", [[-1, 3]]), torch_sm3.Cover.blocks(-1, 3)),
        (("merge", [[0, 1], [2]]), torch_sm3.Cover.merge((0, 1), (2,))),
        (("axes", [[0, 2], [1]]), torch_sm3.Cover(axes=((0, 2), (1,)))),
        (("view", [[4, -1], [0], [1]]), torch_sm3.Cover((4, -1), ((0,), (1,)))),
    ]:
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(4, 5, 6))
        ours = weight.detach().clone()
        optimizer = make(cover=numbers[0], cover_numbers=numbers[1])
        theirs = torch_sm3.SM3([weight], cover=cover)
        for _ in range(3):
            weight.grad = torch.randn(4, 5, 6)
            optimizer.step([ours], [weight.grad])
            theirs.step()
            assert torch.equal(ours, weight), cover
        state = optimizer.state_dict()
        for k, value in theirs.state[weight].items():
            assert torch.equal(state[f"0.{k}"], value), cover


def test_skipped_steps_change_nothing() -> None:
    params, grads = pairs(0)
    optimizer = make(skip_nonfinite=True)
    grads[2] = torch.tensor(float("nan"))
    before = copy.deepcopy(params)
    optimizer.step(params, grads)
    assert optimizer.skipped_steps() == 1
    for ours, theirs in zip(params, before, strict=True):
        assert torch.equal(ours, theirs)
    twin = copy.deepcopy(optimizer)
    assert twin.skipped_steps() == 1
