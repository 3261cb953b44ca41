# SPDX-License-Identifier: Apache-2.0
"""The TorchScript face of SM3: scripted loops, files, pickles, state dicts."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import torch_sm3


def _has_torchscript() -> bool:
    """Probe by using it: later versions of torch switch it off."""

    def plus_one(x: int) -> int:
        return x + 1

    try:
        return bool(torch.jit.script(plus_one)(1) == 2)
    except Exception:
        return False


scripted = pytest.mark.skipif(
    not _has_torchscript(), reason="this torch does not compile TorchScript"
)


def make(**options: object) -> torch.ScriptObject:
    return torch.classes.torch_sm3.SM3(**options)


class Trainer(nn.Module):
    """A model that trains itself, with the optimizer as an attribute."""

    def __init__(self, optimizer: torch.ScriptObject) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 3)
        self.optimizer = optimizer

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = (self.down(torch.tanh(self.up(x))) - y).square().mean()
        loss.backward()
        params = [self.up.weight, self.up.bias, self.down.weight, self.down.bias]
        grads: list[Tensor | None] = [p.grad for p in params]
        self.optimizer.step(params, grads)
        for grad in grads:
            if grad is not None:
                grad.zero_()
        return loss.detach()


@pytest.fixture(autouse=True)
def _one_rounding() -> Iterator[None]:
    """Run as written: fused after some calls, the model itself rounds otherwise."""
    with torch.jit.optimized_execution(False):
        yield


def train(model: Callable[[Tensor, Tensor], Tensor], seed: int) -> list[float]:
    torch.manual_seed(seed)
    return [
        float(model(torch.randn(16, 4), torch.randn(16, 3)).item()) for _ in range(4)
    ]


OPTIONS = [
    {},
    {"lr": 0.05, "momentum": 0.9},
    {"variant": "I", "beta2": 0.9, "weight_decay": 0.01, "maximize": True},
    {"compat": "optax", "momentum": 0.5, "momentum_dtype": torch.bfloat16},
]


@scripted
@pytest.mark.parametrize("options", OPTIONS)
def test_a_scripted_loop_continues_from_its_file(options: dict[str, object]) -> None:
    module = torch.jit.script(Trainer(make(**options)))
    before = module.up.weight.detach().clone()
    train(module, 0)
    assert not torch.equal(before, module.up.weight)
    file = io.BytesIO()
    torch.jit.save(module, file)
    file.seek(0)
    loaded = torch.jit.load(file)
    assert train(module, 1) == train(loaded, 1)
    for ours, theirs in zip(module.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@scripted
def test_a_scripted_loop_has_the_bits_of_the_python_optimizer() -> None:
    torch.manual_seed(0)
    module = torch.jit.script(Trainer(make(lr=0.05, momentum=0.9)))
    plain = Trainer(make())
    plain.load_state_dict(module.state_dict())
    optimizer = torch_sm3.SM3(plain.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(1)
    for _ in range(4):
        x, y = torch.randn(16, 4), torch.randn(16, 3)
        module(x, y)
        optimizer.zero_grad()
        (plain.down(torch.tanh(plain.up(x))) - y).square().mean().backward()
        optimizer.step()
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@scripted
def test_a_scripted_function_makes_an_optimizer() -> None:
    @torch.jit.script
    def descend(w: Tensor, steps: int) -> int:
        optimizer = torch.classes.torch_sm3.SM3(0.5, momentum=0.0, beta2=0.5)
        for _ in range(steps):
            grads: list[Tensor | None] = [w.clone()]
            optimizer.step([w], grads)
        optimizer.set_lr(0.25)
        return optimizer.state_bytes()

    w = torch.ones(3, 4)
    assert descend(w, 5) == (3 + 4) * 4 + 8
    assert float(w.abs().max()) < 1


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


@pytest.mark.parametrize("options", OPTIONS)
def test_the_object_can_be_flattened(options: dict[str, object]) -> None:
    params, grads = pairs(0)
    optimizer = make(**options)
    optimizer.step(params, grads)
    flat = dict(optimizer.__obj_flatten__())
    assert set(flat) == {"options", "shapes", "state_dict"}
    assert flat["shapes"] == [[5, 7], [7], [], [2, 3, 4]]
    assert flat["options"][0] == options.get("lr", 0.1)


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
