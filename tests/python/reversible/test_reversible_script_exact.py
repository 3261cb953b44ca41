# SPDX-License-Identifier: Apache-2.0
"""Exact modes and remembered choices in TorchScript."""

from __future__ import annotations

import io

import pytest
import torch
from helpers.reversible_models import assert_close, gradients
from helpers.reversible_scripted import MLP, can_script, loss_of
from torch import Tensor, nn

OPS = torch.ops.torch_sm3

pytestmark = pytest.mark.skipif(
    not can_script(), reason="this torch has no TorchScript"
)


class Chain(nn.Module):
    """Blocks of two halves; the option text is an attribute."""

    def __init__(self, depth: int, options: str, width: int = 8) -> None:
        super().__init__()
        self.fs = nn.ModuleList([MLP(width) for _ in range(depth)])
        self.gs = nn.ModuleList([MLP(width) for _ in range(depth)])
        self.options: str = options

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        call = torch.ops.torch_sm3.reversible_begin([x, y], self.options)
        a, b = x, y
        for f, g in zip(self.fs, self.gs):  # noqa: B905
            a = torch.ops.torch_sm3.reversible_half_residual(call, f, a, [b], [])
            b = torch.ops.torch_sm3.reversible_half_residual(call, g, b, [a], [])
        z = torch.ops.torch_sm3.reversible_end(call, [a, b])
        return z[0], z[1]


def store(module: nn.Module, x: Tensor, y: Tensor, bits: int | None):
    """Run the same model with ordinary autograd, one identity before each F."""

    def half(f: nn.Module, acc: Tensor, context: Tensor) -> Tensor:
        value = f(OPS.reversible_identity([context])[0])
        if bits is None:
            return OPS.reversible_add(acc, value)
        return OPS.reversible_add(
            acc, OPS.reversible_quantize(value.to(acc.dtype), bits)
        )

    a, b = x, y
    if bits is not None:
        a, b = OPS.reversible_quantize(a, bits), OPS.reversible_quantize(b, bits)
    for f, g in zip(module.fs, module.gs, strict=True):
        a = half(f, a, b)
        b = half(g, b, a)
    return a, b


def assert_same_bits(got, want) -> None:
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def compare(module: nn.Module, x: Tensor, y: Tensor, bits: int | None) -> None:
    scripted = torch.jit.script(module)
    got = scripted(x, y)
    loss_of(got).backward()
    grads = gradients(scripted, x, y)
    want = store(module, x, y, bits)
    assert_same_bits(got, want)
    loss_of(want).backward()
    assert_same_bits(grads, gradients(module, x, y))


def inputs(dtype: torch.dtype, *shape: int) -> tuple[Tensor, Tensor]:
    return tuple(torch.randn(*shape, dtype=dtype, requires_grad=True) for _ in "xy")


@pytest.mark.parametrize(("depth", "dtype"), [(128, torch.float), (3, torch.double)])
def test_grid_equals_the_store_run_bit_for_bit(depth, dtype):
    torch.manual_seed(0)
    module = Chain(depth, '{"exact": "grid", "grid_bits": 16}').to(dtype)
    compare(module, *inputs(dtype, 4, 8), 16)


@pytest.mark.parametrize(
    ("depth", "dtype"), [(128, torch.float), (3, torch.double), (8, torch.bfloat16)]
)
def test_sidecar_equals_the_store_run_bit_for_bit(depth, dtype):
    torch.manual_seed(0)
    module = Chain(depth, '{"exact": "sidecar"}').to(dtype)
    compare(module, *inputs(dtype, 4, 8), None)


def test_without_an_exact_mode_bits_differ():
    """Or the tests above could not fail."""
    torch.manual_seed(0)
    module = Chain(64, "")
    with pytest.raises(AssertionError):
        compare(module, *inputs(torch.float, 4, 8), None)


class Big(nn.Module):
    """A residual that leaves the grid's range and what a sidecar has room for."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((), 1e9))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x) * self.weight


@pytest.mark.parametrize("exact", ["grid", "sidecar"])
def test_an_overflow_keeps_the_input(exact):
    torch.manual_seed(0)
    bits = 16 if exact == "grid" else None
    module = Chain(3, f'{{"exact": "{exact}"}}')
    module.fs[1] = Big()
    compare(module, *inputs(torch.float, 64, 8), bits)
    scripted, packed = torch.jit.script(module), []
    x, y = inputs(torch.float, 64, 8)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: packed.append(tuple(t.shape)) or t, lambda t: t
    ):
        scripted(x, y)
    # The final streams, and the input of the half that overflows; on the grid the
    # stream stays where it is too large, in each half after it.
    assert packed.count((64, 8)) == (4 if exact == "grid" else 3)


@pytest.mark.parametrize("backward_inside", [True, False])
@pytest.mark.parametrize("exact", ["grid", "sidecar"])
def test_reversible_row_18_autocast_in_torchscript(exact, backward_inside):
    """F runs in bfloat16 on float32 streams; backward inside or outside autocast."""
    torch.manual_seed(0)
    module = Chain(6, f'{{"exact": "{exact}"}}')
    twin = Chain(6, "")
    twin.load_state_dict(module.state_dict())
    scripted, (x, y) = torch.jit.script(module), inputs(torch.float, 4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        got = scripted(x, y)
        loss = loss_of(got)
        if backward_inside:
            loss.backward()
    if not backward_inside:
        loss.backward()
    grads = gradients(scripted, x, y)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        want = store(twin, x, y, 16 if exact == "grid" else None)
        loss = loss_of(want)
    loss.backward()
    assert_same_bits(got, want)
    assert_same_bits(grads, gradients(twin, x, y))


@pytest.mark.parametrize("exact", ["grid", "sidecar"])
def test_an_overflow_is_an_error_if_asked(exact):
    module = Chain(2, f'{{"exact": "{exact}", "overflow": "raise"}}')
    module.gs[0] = Big()
    scripted, (x, y) = torch.jit.script(module), inputs(torch.float, 64, 8)
    with pytest.raises(RuntimeError, match=r"half 1, but got an overflow"):
        scripted(x, y)
    with torch.no_grad():
        scripted(x, y)


def test_non_finite_streams_are_kept():
    module = Chain(2, '{"exact": "grid"}')
    scripted, (x, y) = torch.jit.script(module), inputs(torch.float, 4, 8)
    with torch.no_grad():
        x[0, 0] = float("inf")
        y[1, 1] = float("nan")
    loss_of(scripted(x, y)).backward()
    got = gradients(scripted, x, y)
    loss_of(store(module, x, y, 16)).backward()
    for a, b in zip(got, gradients(module, x, y), strict=True):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


def test_an_original_stream_stands_for_its_rounded_self():
    f = torch.jit.script(MLP())
    x, y = (torch.randn(4, 8) for _ in "xy")
    q = [OPS.reversible_quantize(t, 4) for t in (x, y)]
    call = OPS.reversible_begin([x, y], '{"exact": "grid", "grid_bits": 4}')
    a = OPS.reversible_half_residual(call, f._c, x, [y], [])
    with pytest.raises(ValueError, match="a current stream of this call"):
        OPS.reversible_half_residual(call, f._c, x, [y], [])
    b, c = OPS.reversible_end(call, [y, a])
    assert torch.equal(b, q[1])
    assert torch.equal(c, OPS.reversible_grid_add(q[0], f(q[1]), 4)[0])


def test_sidecars_cost_few_bits():
    torch.manual_seed(0)
    depth, x = 32, torch.randn(256, 64)
    scripted = torch.jit.script(Chain(depth, '{"exact": "sidecar"}', width=64))
    packed: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: packed.append(t.nbytes) or t, lambda t: t
    ):
        scripted(x, x + 0)
    bits = (sum(packed) - 2 * x.nbytes) * 8 / (2 * depth * x.numel())
    assert bits <= 3.25


class Router(nn.Module):
    """Top-2 of ten experts, remembered; the choice depends on a near tie."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(8, 10, bias=False)
        self.experts = nn.Parameter(torch.randn(10, 8) / 3)
        self.register_buffer("load", torch.zeros(10))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.score(x)
        scores = scores + 1e6  # so that rounding in x decides
        best = torch.ops.torch_sm3.reversible_remember(scores.topk(2)[1])
        keep = torch.ops.torch_sm3.reversible_remember(x > 0)
        self.load.add_(torch.bincount(best.flatten(), minlength=10))
        mixed = (self.experts[best] * scores.gather(1, best).unsqueeze(2)).sum(1)
        return torch.where(keep, mixed * 1e-6, x)


def test_reversible_row_20_routing_in_torchscript():
    """Routing is the same in both runs, and the counter advances once."""
    torch.manual_seed(0)
    module = Chain(6, "")
    for i in range(6):
        module.fs[i], module.gs[i] = Router(), Router()
    twin = Chain(6, "")
    for i in range(6):
        twin.fs[i], twin.gs[i] = Router(), Router()
    twin.load_state_dict(module.state_dict())
    scripted = torch.jit.script(module)
    x, y = inputs(torch.float, 32, 8)
    loss_of(scripted(x, y)).backward()
    got = gradients(scripted, x, y)
    loss_of(store(twin, x, y, None)).backward()
    assert_close(got, gradients(twin, x, y), 1e-3)
    for a, b in zip(scripted.buffers(), twin.buffers(), strict=True):
        assert torch.equal(a, b) and float(a.sum()) == 64


def test_remembered_values_are_saved_once_in_bits():
    module = Chain(1, "")
    module.fs[0] = Router()
    scripted, (x, y) = torch.jit.script(module), inputs(torch.float, 32, 8)
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: packed.append(t) or t, lambda t: t
    ):
        z = scripted(x, y)
    assert [t.nbytes for t in packed] == [1024, 1024, 32 * 2 * 8, 32 * 8 // 8]
    loss_of(z).backward()


class Forgetful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            x = torch.ops.torch_sm3.reversible_remember(x)
        return x * self.weight


def test_a_forgotten_value_names_the_half():
    module = Chain(2, "")
    module.fs[1] = Forgetful()
    scripted, (x, y) = torch.jit.script(module), inputs(torch.float, 4, 8)
    with pytest.raises(RuntimeError, match="first run of half 2 remembered, 1, but"):
        loss_of(scripted(x, y)).backward()


class Writes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.add_(1)
        return x * 2


class Integer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.long()


class Wide(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x])


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


def test_wrong_functions_name_the_half():
    """TorchScript makes every error a RuntimeError; called eagerly they are not."""
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    cases = [
        (Writes, RuntimeError, "F of half 0 to leave its inputs alone"),
        (Integer, TypeError, "F of half 0 to return a floating tensor"),
        (Wide, ValueError, r"half 0 to return the accumulator's shape \[4, 8\], but"),
        (Pair, TypeError, "F to return a tensor, but got Tuple"),
    ]
    for kind, error, message in cases:
        call = OPS.reversible_begin([x, y], "")
        with pytest.raises(error, match=message):
            OPS.reversible_half_residual(call, torch.jit.script(kind())._c, x, [y], [])


def test_the_options_are_saved_with_the_model():
    torch.manual_seed(0)
    scripted = torch.jit.script(Chain(4, '{"exact": "grid", "grid_bits": 10}'))
    file = io.BytesIO()
    torch.jit.save(scripted, file)
    file.seek(0)
    loaded = torch.jit.load(file)
    x, y = inputs(torch.float, 4, 8)
    loss_of(scripted(x, y)).backward()
    got = gradients(scripted, x, y)
    loss_of(loaded(x, y)).backward()
    assert_same_bits(got, gradients(loaded, x, y))


def test_freeze_raises_with_the_reason():
    frozen = torch.jit.freeze(torch.jit.script(Chain(1, "")).eval())
    x, y = inputs(torch.float, 4, 8)
    with pytest.raises(RuntimeError, match=r"torch\.jit\.freeze"):
        frozen(x, y)


def test_functorch_raises_and_forward_gradients_too():
    f, x = torch.jit.script(MLP()), torch.randn(3, 4, 8)

    def run(t: Tensor) -> Tensor:
        call = OPS.reversible_begin([t, t], "")
        y = OPS.reversible_half_residual(call, f._c, t, [t], [])
        return OPS.reversible_end(call, [y, t])[0].sum()

    with pytest.raises(RuntimeError, match="functorch"):
        torch.func.grad(run)(x)
    with pytest.raises(RuntimeError, match="functorch"):
        torch.vmap(run)(x)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.raises(RuntimeError, match="forward gradients"):
            run(dual)


class Four(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, dtype=torch.double))
        self.u = nn.Parameter(torch.randn(3, dtype=torch.double))

    def forward(self, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        return torch.sin(a * self.w) * b + torch.tanh(c * b) * d * self.u


def test_reversible_row_23_every_element_of_the_tensor_list():
    """Streams, side tensors and parameters are one list of a C++ Function."""
    f = torch.jit.script(Four())

    def run(x: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, *_: Tensor):
        call = OPS.reversible_begin([x, a, b], "")
        y = OPS.reversible_half_residual(call, f._c, x, [a, b], [c, d])
        return tuple(OPS.reversible_end(call, [y, a, b]))

    tensors = inputs(torch.double, 3) + inputs(torch.double, 3)
    tensors += (torch.randn(3, dtype=torch.double, requires_grad=True),)
    assert torch.autograd.gradcheck(run, (*tensors, f.w, f.u))


def test_after_an_error_inside_f_the_call_goes_on():
    f, wrong = torch.jit.script(MLP()), torch.jit.script(Wide())
    x, y = inputs(torch.float, 4, 8)
    call = OPS.reversible_begin([x, y], "")
    a = OPS.reversible_half_residual(call, f._c, x, [y], [])
    with pytest.raises(ValueError, match="half 1"):
        OPS.reversible_half_residual(call, wrong._c, y, [a], [])
    b = OPS.reversible_half_residual(call, f._c, y, [a], [])
    loss_of(OPS.reversible_end(call, [a, b])).backward()
    got = gradients(f, x, y)
    a = x + f(y)
    loss_of((a, y + f(a))).backward()
    assert_close(got, gradients(f, x, y), 1e-5)


def test_identity_is_one_node():
    x, y = inputs(torch.double, 3)
    integers = torch.arange(3)
    frozen = torch.ones(3)
    a, b, c, d = OPS.reversible_identity([x, y, integers, frozen])
    assert a.grad_fn is not None and a.grad_fn is b.grad_fn
    assert not c.requires_grad and not d.requires_grad
    order: list[str] = []
    x.register_hook(lambda _: order.append("x"))
    (a * b + a.sin()).sum().backward()
    assert order == ["x"]
    torch.testing.assert_close(x.grad, y.detach() + x.detach().cos())
    torch.testing.assert_close(y.grad, x.detach())
    torch.autograd.gradgradcheck(
        lambda x, y: OPS.reversible_identity([x, y])[1] * x, (x, y)
    )
    with torch.no_grad():
        assert OPS.reversible_identity([x])[0] is x


def test_identity_is_transparent_to_functorch():
    def f(x: Tensor) -> Tensor:
        (y,) = OPS.reversible_identity([x])
        return (y.sin() * y).sum()

    def g(x: Tensor) -> Tensor:
        return (x.sin() * x).sum()

    x = torch.randn(4, 3)
    torch.testing.assert_close(torch.func.grad(f)(x), torch.func.grad(g)(x))
    torch.testing.assert_close(torch.vmap(f)(x), torch.vmap(g)(x))
    hessian = torch.func.hessian(f)(x[0])
    torch.testing.assert_close(hessian, torch.func.hessian(g)(x[0]))
    _, tangent = torch.func.jvp(f, (x,), (x,))
    torch.testing.assert_close(tangent, torch.func.jvp(g, (x,), (x,))[1])
    torch.library.opcheck(OPS.reversible_identity.default, ([x, x],))
