# SPDX-License-Identifier: Apache-2.0
"""Options of SM3: what is refused, by which words, and what may differ by group."""

from __future__ import annotations

import inspect

import pytest
import torch
from helpers.sm3_models import IMPLEMENTATIONS, equal, parameters, snapshot

import torch_sm3
from torch_sm3 import SM3, Cover

NAN = float("nan")
BAD = [
    ({"lr": -1.0}, ValueError, "'lr'"),
    ({"lr": NAN}, ValueError, "nan"),
    ({"lr": float("inf")}, ValueError, "'lr'"),
    ({"lr": "0.1"}, ValueError, "'lr'"),
    ({"lr": torch.ones(2)}, ValueError, "^Tensor lr must be 1-element$"),
    ({"lr": torch.ones(1, 1)}, ValueError, "'lr'"),
    ({"lr": torch.ones((), dtype=torch.complex64)}, ValueError, "'lr'"),
    ({"lr": lambda step: 0.1}, TypeError, "LambdaLR"),
    ({"momentum": 1.0}, ValueError, r"0 <= momentum < 1, but got 1.0"),
    ({"momentum": -0.1}, ValueError, "'momentum'"),
    ({"beta2": 0.0}, ValueError, "beta=0 means the sum: pass None"),
    ({"beta2": 1.5}, ValueError, "'beta2'"),
    ({"beta2": NAN}, ValueError, "'beta2'"),
    ({"eps": -1e-8}, ValueError, "'eps'"),
    ({"weight_decay": -1}, ValueError, "'weight_decay'"),
    ({"weight_decay": float("inf")}, ValueError, "'weight_decay'"),
    ({"variant": "III"}, ValueError, "'variant'"),
    ({"variant": 2}, TypeError, "'variant'"),
    ({"compat": "adam"}, ValueError, "'compat'"),
    ({"compat": 1}, TypeError, "'compat'"),
    ({"compat": "trax", "beta2": 0.9}, ValueError, "grafts"),
    ({"cover": "rows"}, ValueError, "'cover'"),
    ({"cover": 3}, TypeError, "'cover'"),
    ({"cover": Cover((7,))}, ValueError, "product"),
    ({"momentum_dtype": torch.float16}, ValueError, "'momentum_dtype'"),
    ({"momentum_dtype": "int4"}, ValueError, "'momentum_dtype'"),
    ({"stochastic_rounding": 1}, ValueError, "'stochastic_rounding'"),
    ({"kahan": None}, ValueError, "'kahan'"),
    ({"kahan": True, "stochastic_rounding": True}, ValueError, "not both"),
    ({"maximize": 1}, ValueError, "'maximize'"),
    ({"seed": -1}, ValueError, "'seed'"),
    ({"seed": 2**63}, ValueError, "'seed'"),
    ({"seed": 1.0}, ValueError, "'seed'"),
    (
        {"fused": True, "foreach": True},
        RuntimeError,
        "^`fused` and `foreach` cannot be `True` together.$",
    ),
    (
        {"fused": True, "differentiable": True},
        RuntimeError,
        "`fused` does not support `differentiable`",
    ),
    ({"foreach": True, "differentiable": True}, RuntimeError, "`foreach` does not"),
    ({"kahan": True, "differentiable": True}, RuntimeError, "'kahan'"),
    (
        {"momentum_dtype": torch.int8, "differentiable": True},
        RuntimeError,
        "'momentum_dtype'",
    ),
]


@pytest.mark.parametrize(("options", "error", "text"), BAD, ids=str)
def test_bad_options_name_the_argument(options, error, text) -> None:
    param = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(error, match=text):
        SM3([param], **options)
    optimizer = SM3([param])
    with pytest.raises(error, match=text):
        optimizer.add_param_group(
            {"params": [torch.nn.Parameter(torch.ones(2))], **options}
        )
    assert len(optimizer.param_groups) == 1, "a rejected group is not kept"


@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta")
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: torch.ones(2, dtype=torch.complex64), "separate real and imaginary"),
        (lambda: torch.ones(2, dtype=torch.int64), "int64"),
        (lambda: torch.ones(2).to(torch.float8_e4m3fn), "float8"),
        (lambda: torch.eye(2).to_sparse(), "sparse_coo"),
        (lambda: torch.eye(2).to_sparse_csr(), "sparse_csr"),
        (lambda: torch.zeros(1, 3).expand(4, 3), "share memory"),
    ],
    ids=["complex", "int", "float8", "coo", "csr", "expanded"],
)
def test_bad_parameters_are_refused(make, text) -> None:
    param = make()
    with pytest.raises(ValueError, match=f"{text}(.|\n)*'params'|'params'.*{text}"):
        SM3([param])
    optimizer = SM3([torch.nn.Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match="'params'"):
        optimizer.add_param_group({"params": [torch.ones(3), param]})
    assert len(optimizer.param_groups) == 1


def test_low_precision_that_has_no_meaning_is_refused() -> None:
    half = torch.nn.Parameter(torch.ones(2).half())
    with pytest.raises(ValueError, match="no float16 parameter"):
        SM3([half], stochastic_rounding=True)
    for dtype in (torch.int8, torch.bfloat16):
        with pytest.raises(NotImplementedError, match="'momentum_dtype'"):
            SM3([torch.nn.Parameter(torch.ones(2).double())], momentum_dtype=dtype)
    with pytest.raises(RuntimeError, match="float16"):
        SM3([half], differentiable=True)
    with pytest.raises(RuntimeError, match="skip_nonfinite"):
        SM3(
            [torch.nn.Parameter(torch.ones(2))],
            skip_nonfinite=True,
            differentiable=True,
        )


def test_the_base_class_speaks_of_parameters_as_always() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="optimizer got an empty parameter list"):
        SM3([])
    with pytest.raises(TypeError, match="should be an iterable of Tensors or dicts"):
        SM3(param)
    with pytest.raises(ValueError, match="more than one parameter group"):
        SM3([{"params": param}, {"params": param}])
    with pytest.raises(ValueError, match="can't optimize a non-leaf Tensor"):
        SM3([param * 2])
    with pytest.raises(ValueError, match="Some param names are missing"):
        SM3([("weight", param), torch.nn.Parameter(torch.ones(1))])


@pytest.mark.parametrize(
    "name", ["nesterov", "grafting", "clip", "grad_scaler", "betas"]
)
def test_what_is_out_of_scope_is_no_argument(name) -> None:
    with pytest.raises(TypeError, match=name):
        SM3([torch.nn.Parameter(torch.ones(2))], **{name: True})
    assert "grad_scaler" not in inspect.signature(SM3.step).parameters


def test_signature_of_the_constructor() -> None:
    signature = inspect.signature(SM3)
    positional = [
        name
        for name, parameter in signature.parameters.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    assert positional == ["params", "lr", "momentum", "beta2", "eps", "weight_decay"]
    defaults = {n: p.default for n, p in signature.parameters.items() if n != "params"}
    assert defaults == {
        "lr": 0.1,
        "momentum": 0.0,
        "beta2": None,
        "eps": None,
        "weight_decay": 0.0,
        "variant": "II",
        "compat": None,
        "cover": "auto",
        "maximize": False,
        "momentum_dtype": None,
        "stochastic_rounding": False,
        "kahan": False,
        "seed": 0,
        "skip_nonfinite": False,
        "foreach": None,
        "fused": None,
        "capturable": False,
        "differentiable": False,
    }


def test_skipping_is_not_for_one_group() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="skip_nonfinite for the whole optimizer"):
        SM3([{"params": [param], "skip_nonfinite": True}])


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group")
@pytest.mark.parametrize("flags", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
def test_a_parameter_listed_twice_is_updated_once(flags) -> None:
    param = torch.nn.Parameter(torch.zeros(2))
    optimizer = SM3([param, param], lr=1.0, **flags)
    param.grad = torch.ones(2)
    optimizer.step()
    assert torch.equal(param.detach(), -torch.ones(2))
    assert optimizer.state[param]["step"] == 1


def test_groups_step_by_their_own_options() -> None:
    shapes = [(3, 4), (5, 6), (40, 120)]
    per_group = [
        {"lr": 0.5, "variant": "I", "cover": "diagonal"},
        {"momentum": 0.9, "compat": "optax", "maximize": True, "fused": False},
        {"momentum": 0.5, "momentum_dtype": torch.int8, "weight_decay": 0.1},
    ]
    torch.manual_seed(3)
    together = parameters(*shapes)
    torch.manual_seed(3)
    alone = parameters(*shapes)
    groups = zip(together, per_group, strict=True)
    optimizer = SM3([{"params": [p], **options} for p, options in groups])
    others = [SM3([p], **o) for p, o in zip(alone, per_group, strict=True)]
    for _ in range(3):
        optimizer.step()
        for other in others:
            other.step()
    separate = [snapshot(other) for other in others]
    expected = [one[0] for one in separate] + [t for one in separate for t in one[1:]]
    assert equal(snapshot(optimizer), expected)


def test_every_group_has_every_option() -> None:
    optimizer = SM3([{"params": []}, {"params": [torch.nn.Parameter(torch.ones(2))]}])
    assert optimizer.param_groups[0].keys() == optimizer.param_groups[1].keys()
    optimizer.step()


def test_options_of_a_group_may_change_between_steps() -> None:
    (param,) = parameters((3, 4))
    optimizer = SM3([param], lr=1.0)
    optimizer.step()
    group = optimizer.param_groups[0]
    group["momentum"] = 0.9
    group["momentum_dtype"] = torch.float32
    group["lr"] = 0.0
    before = param.detach().clone()
    optimizer.step()
    assert torch.equal(param.detach(), before)
    assert "momentum_buffer" in optimizer.state[param]
    assert optimizer.state_dict()["param_groups"][0]["momentum_dtype"] == "float32"


def test_mixed_parameters_each_take_their_own_implementation() -> None:
    class Wrapped(torch.Tensor):
        pass

    odd = torch.zeros(3, 4).as_subclass(Wrapped).requires_grad_()
    plain = torch.nn.Parameter(torch.zeros(3, 4))
    elsewhere = torch.nn.Parameter(torch.zeros(3, 4, device="meta"))
    optimizer = SM3([odd, plain, elsewhere])
    grad = torch.randn(3, 4)
    odd.grad, plain.grad = grad.clone().as_subclass(Wrapped), grad.clone()
    elsewhere.grad = torch.zeros(3, 4, device="meta")
    optimizer.step()
    assert torch.equal(odd.detach().as_subclass(torch.Tensor), plain.detach())
    assert plain.abs().sum() > 0


def test_fused_is_checked_when_a_gradient_is_there() -> None:
    used = torch.nn.Parameter(torch.zeros(2))
    unused = torch.nn.Parameter(torch.zeros(2, device="meta"))
    optimizer = SM3([used, unused], fused=True)
    used.grad = torch.ones(2)
    optimizer.step()
    unused.grad = torch.ones(2, device="meta")
    before = used.detach().clone()
    with pytest.raises(RuntimeError, match=r"^`fused=True` requires all the params"):
        optimizer.step()
    assert torch.equal(used.detach(), before), "nothing is written before the check"


def test_capturable_refuses_parameters_on_the_cpu() -> None:
    (param,) = parameters((2,))
    with pytest.raises(RuntimeError, match="If capturable=True, params and state"):
        SM3([param], capturable=True).step()


@pytest.mark.parametrize("flags", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
def test_lazy_parameters_are_taken_before_their_shape_is_known(flags) -> None:
    model = torch.nn.LazyLinear(3)
    optimizer = SM3(model.parameters(), **flags)
    optimizer.step()
    assert not optimizer.state
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert optimizer.state[model.weight]["accumulator_1"].shape == (4,)


def test_sm3_row_14_expanded_parameter_is_refused() -> None:
    base = torch.zeros(1, 3)
    with pytest.raises(ValueError, match="share memory"):
        SM3([base.expand(4, 3).requires_grad_()])
    state = torch.ops.torch_sm3.sm3_accumulators(torch.zeros(4, 3))
    step = torch.zeros((), dtype=torch.int64)
    with pytest.raises(RuntimeError, match="share memory"):
        torch_sm3.sm3(
            [base.expand(4, 3)], [torch.ones(4, 3)], [state], [], [step], lr=0.1
        )
    assert torch.equal(base, torch.zeros(1, 3)) and step == 0


@pytest.mark.parametrize("flags", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
def test_sm3_row_29_learning_rate_kinds(flags) -> None:
    with pytest.raises(TypeError, match="LambdaLR"):
        SM3([torch.nn.Parameter(torch.zeros(2))], lr=lambda step: 0.1)
    for lr in (torch.tensor(0.5), torch.tensor([0.5]), torch.tensor(0.5).double(), 0.5):
        param = torch.nn.Parameter(torch.zeros(2))
        optimizer = SM3([param], lr=lr, **flags)
        param.grad = torch.ones(2)
        optimizer.step()
        assert torch.equal(param.detach(), torch.full((2,), -0.5))
        assert optimizer.param_groups[0]["lr"] is lr, "neither replaced nor copied"
        assert not isinstance(lr, torch.Tensor) or lr._version == 0, "nor written"
