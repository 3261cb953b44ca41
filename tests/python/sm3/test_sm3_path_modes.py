# SPDX-License-Identifier: Apache-2.0
"""Modes of the plain paths: autograd, subclasses, meta, capture, memory."""

from __future__ import annotations

import pytest
import torch
from helpers.sm3_runs import IMPLEMENTATIONS, Param, Run, run, same_bits
from reference.sm3_oracle import Options
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from torch_sm3.optim import _batch
from torch_sm3.optim._multi import multi_tensor_sm3
from torch_sm3.optim._single import single_tensor_sm3

PATHS = {"single": single_tensor_sm3, "multi": multi_tensor_sm3}


@pytest.mark.parametrize(
    "options",
    [
        Options(),
        Options(momentum=0.9, weight_decay=0.1),
        Options(beta2=0.9, momentum=0.5),
        Options(variant="I", compat="optax"),
        Options(compat="trax", weight_decay=0.1, momentum=0.5),
        Options(eps=0.0, maximize=True),
    ],
    ids=str,
)
def test_derivatives_through_a_step(options) -> None:
    shape = (3, 4)
    start = Run("single", [Param(torch.zeros(shape).double(), [None])], options).batch

    def step(weight, grad, rows, columns, buffer, lr):
        batch = _batch.Batch(
            [weight.clone()],
            [grad],
            [[rows.clone(), columns.clone()]],
            [buffer.clone() if options.momentum else None],
            [None],
            [None],
            [torch.zeros((), dtype=torch.int64)],
            start.covers,
            start.places,
        )
        given = {**vars(options), "lr": lr, "differentiable": True}
        names = _batch.Options.__dataclass_fields__
        single_tensor_sm3(
            batch, _batch.Options(**{k: v for k, v in given.items() if k in names})
        )
        buffers = [b for b in batch.momentum_buffers if b is not None]
        return (batch.params[0], *batch.accumulators[0], *buffers)

    inputs = [torch.randn(shape), torch.randn(shape), torch.rand(3), torch.rand(4)]
    inputs += [torch.randn(shape), torch.tensor(0.1)]
    doubles = [x.double().requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(step, doubles)


def test_no_derivative_is_nan_where_nothing_is_added() -> None:
    grad = torch.zeros(3, 4, requires_grad=True)
    made = Run("single", [Param(torch.ones(3, 4), [grad])], Options(eps=0.0))
    options = _batch.Options(lr=0.1, eps=0.0, differentiable=True)
    made.batch.grads.append(grad)
    single_tensor_sm3(made.batch, options)
    (slope,) = torch.autograd.grad(made.batch.params[0].sum(), grad)
    assert torch.isfinite(slope).all()


class Wrapped(torch.Tensor):
    """A subclass that behaves as a tensor."""


@pytest.mark.parametrize("path", PATHS)
def test_subclasses_have_the_bits_of_tensors(path) -> None:
    weight, grad = torch.randn(5, 4), torch.randn(5, 4)
    options = Options(momentum=0.9, weight_decay=0.1)
    params = [Param(weight, [grad]), Param(weight, [grad])]
    made = Run(path, params, options)
    made.batch.params[0] = made.batch.params[0].as_subclass(Wrapped)
    made.step([grad.clone().as_subclass(Wrapped), grad])
    assert type(made.batch.params[0]) is Wrapped
    plain = made.batch.params[0].as_subclass(torch.Tensor)
    assert same_bits(plain, made.batch.params[1])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "options",
    [
        Options(momentum=0.9, momentum_dtype="int8", stochastic_rounding=True),
        Options(variant="I", kahan=True, grad_scale=2.0),
    ],
    ids=str,
)
def test_meta_tensors_are_stepped(options, path) -> None:
    params = [Param(torch.zeros(s).bfloat16(), [None]) for s in [(4, 300), (), (0, 3)]]
    batch = Run(path, params, options).batch

    def to_meta(x):
        if isinstance(x, list):
            return [to_meta(one) for one in x]
        return x.to("meta") if isinstance(x, torch.Tensor) else x

    lists = {name: to_meta(getattr(batch, name)) for name in vars(batch)}
    lists["grads"] = [torch.empty_like(param) for param in lists["params"]]
    scale = torch.empty((), device="meta")
    PATHS[path](
        _batch.Batch(**lists),
        _batch.Options(
            lr=0.1,
            momentum=options.momentum,
            variant=options.variant,
            stochastic_rounding=options.stochastic_rounding,
            grad_scale=scale,
            found_inf=scale,
            capturable=True,
        ),
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_version_counters_rise(implementation) -> None:
    options = Options(momentum=0.9, momentum_dtype="bfloat16")
    made = Run(implementation, [Param(torch.ones(4, 3), [torch.ones(4, 3)])], options)
    batch = made.batch
    watched = [batch.params[0], batch.steps[0], batch.momentum_buffers[0]]
    watched += batch.accumulators[0]
    before = [tensor._version for tensor in watched]
    made.all()
    assert all(t._version > v for t, v in zip(watched, before, strict=True))


class NoHostSync(TorchDispatchMode):
    """Refuses what would wait for a device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        waits = (
            "_local_scalar_dense",
            "nonzero",
            "is_nonzero",
            "equal",
            "masked_select",
        )
        assert func.overloadpacket.__name__ not in waits
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "options",
    [
        Options(momentum=0.9, grad_scale=2.0, weight_decay=0.1),
        Options(momentum=0.9, momentum_dtype="int8", stochastic_rounding=True),
        Options(variant="I", kahan=True),
    ],
    ids=str,
)
def test_capturable_steps_read_nothing(options, path) -> None:
    weight = torch.randn(4, 300).bfloat16()
    made = Run(
        path,
        [Param(weight, [torch.randn(4, 300)])] * 2,
        options,
        lr=torch.tensor(0.1),
        found_inf=torch.zeros(1),
        capturable=True,
    )
    with NoHostSync():
        made.all()
    expected = run("oracle", made.given, options)[-1]
    for ours, other in zip(made.states(), expected, strict=True):
        assert same_bits(ours["param"], other["param"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        Options(momentum=0.9, weight_decay=0.1),
        Options(compat="trax", weight_decay=0.1, variant="I"),
    ],
    ids=str,
)
def test_foreach_keeps_two_temporaries_of_the_model(options, dtype) -> None:
    count, shape = 24, (100, 64)
    params = [Param(torch.randn(shape).to(dtype), [None]) for _ in range(count)]
    made = Run("multi", params, options)
    grads = [torch.randn(shape).to(dtype) for _ in range(count)]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        made.step(grads)
    peak = now = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    copy = 4 * count * 100 * 64
    # Roots, masks and broadcasts are made tensor by tensor.
    assert copy < peak <= copy * (2 + 6 / count)
