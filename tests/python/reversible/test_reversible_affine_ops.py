# SPDX-License-Identifier: Apache-2.0
"""``reversible_affine``, its inverse and its gradients."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from helpers.bits import FLOATS, LAYOUTS, denormals
from helpers.instruction_sets import outputs
from reference import reversible_ops_oracle as oracle
from torch import Tensor

from torch_sm3 import _ops

PAIRS = list(itertools.product(FLOATS, FLOATS))


def numbers(shape: tuple[int, ...], *dtypes: torch.dtype) -> list[Tensor]:
    return [(2 * torch.randn(shape, dtype=torch.double)).to(d) for d in dtypes]


def exactly(x: Tensor) -> np.ndarray:
    """Return the numbers with more digits than any dtype has."""
    return x.detach().double().numpy().astype(np.longdouble)


def check(got: Tensor, want: np.ndarray, size: np.ndarray, eps: float) -> None:
    """Compare up to errors of ``eps * size`` and one rounding to the result's dtype."""
    info = torch.finfo(got.dtype)
    bound = eps * size + info.eps / 2 * (np.abs(want) + info.smallest_normal)
    error = np.abs(exactly(got) - want)
    assert (error <= bound).all(), (error / bound).max()


@pytest.mark.parametrize("clamp", [0.3, 2.0, 7.5])
@pytest.mark.parametrize(("acc", "scale"), PAIRS, ids=str)
def test_equals_the_formula(acc, scale, clamp):
    a, r, t, g = numbers((31, 33), acc, scale, scale, acc)
    arithmetic = torch.float64 if acc == torch.float64 else torch.float32
    A, R, T, G = (exactly(x.to(arithmetic)) for x in (a, r, t, g))
    exp = np.exp(oracle.log_scale(R, clamp)[0])
    # exp and tanh each within two units in the last place, and the error of s
    # counts as often as s is large.
    eps = (3 + 3 * clamp) * torch.finfo(arithmetic).eps

    out = _ops.reversible_affine(a, r, t, clamp)
    assert out.dtype == acc
    check(out, oracle.affine(A, R, T, clamp), np.abs(A * exp) + np.abs(T), eps)

    inverse = _ops.reversible_affine_inverse(a, r, t, clamp)
    assert inverse.dtype == acc
    size = (np.abs(A) + np.abs(T)) / exp
    check(inverse, oracle.affine_inverse(A, R, T, clamp), size, eps)

    grads = _ops.reversible_affine_backward(g, a, r, clamp)
    wants = oracle.affine_backward(G, A, R, clamp)
    assert [x.dtype for x in grads] == [acc, scale]
    check(grads[0], wants[0], np.abs(wants[0]), eps)
    # Far out, 1 - tanh^2 falls as exp(-2 r / clamp) does.
    check(grads[1], wants[1], (1 + np.abs(R) / clamp) * np.abs(wants[1]), eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_exp_and_tanh_within_two_units_in_the_last_place(dtype):
    eps = torch.finfo(dtype).eps
    one, zero = (torch.full((400_000,), v, dtype=dtype) for v in (1.0, 0.0))
    x = torch.linspace(-30, 30, 400_000, dtype=torch.double).to(dtype)
    X = exactly(x)
    # exp alone: under a huge clamp s is the scale itself, to its last place.
    near = torch.linspace(-1, 1, 400_000, dtype=torch.double).to(dtype)
    got = exactly(_ops.reversible_affine(one, near, zero, 2.0**30))
    want = np.exp(exactly(near))
    assert (np.abs(got - want) <= 4 * eps * want).all()
    # The slope alone, where tanh is so near to one that 1 - tanh^2 has no digits.
    slope = exactly(_ops.reversible_affine_backward(zero + eps, one / eps, x, 1.0)[1])
    want = np.exp(np.tanh(X)) / np.cosh(X) ** 2
    assert (np.abs(slope - want) <= 10 * eps * want).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("clamp", [0.5, 2.0])
def test_the_inverse_undoes_it(dtype, clamp):
    a, r, t = numbers((1000,), dtype, dtype, dtype)
    out = _ops.reversible_affine(a, r, t, clamp)
    back = _ops.reversible_affine_inverse(out, r, t, clamp)
    size = (a.double().abs() + t.double().abs()) * math.exp(2 * clamp)
    bound = 4 * torch.finfo(dtype).eps * size
    assert ((back.double() - a.double()).abs() <= bound).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_special_values(dtype):
    inf, nan = math.inf, math.nan

    def one(a, r, t, clamp=2.0):
        tensors = (torch.tensor([v], dtype=dtype) for v in (a, r, t))
        return _ops.reversible_affine(*tensors, clamp).item()

    def rounded(x):
        return torch.tensor(x).to(dtype).item()

    low, high = rounded(math.exp(-2)), rounded(math.exp(2))
    assert one(1.0, inf, 0.0) == pytest.approx(high, rel=1e-6)
    assert one(1.0, -inf, 0.0) == pytest.approx(low, rel=1e-6)
    assert math.isnan(one(1.0, nan, 0.0))
    assert math.isnan(one(nan, 0.0, 0.0)) and math.isnan(one(0.0, 0.0, nan))
    assert one(inf, -9.0, 1.0) == inf and one(-inf, 9.0, 1.0) == -inf
    assert math.isnan(one(inf, 0.0, -inf))
    assert one(3.0, 0.0, 0.0) == 3.0 and one(3.0, -0.0, 0.0) == 3.0
    assert math.copysign(1, one(-0.0, 0.5, -0.0)) == -1
    # exp may overflow and vanish: the clamp is the caller's.
    assert one(1.0, 5000.0, 0.0, 4096.0) == inf
    assert one(1.0, -5000.0, 0.0, 4096.0) == 0.0
    tiny = denormals(dtype)
    zero = torch.zeros_like(tiny)
    assert torch.equal(_ops.reversible_affine(tiny, zero, zero, 2.0), tiny)
    # s of a tiny scale is nothing to exp; the gradient is there.
    assert torch.equal(_ops.reversible_affine(zero + 1, tiny, zero, 2.0), zero + 1)
    assert torch.equal(
        _ops.reversible_affine_backward(zero + 1, zero + 1, tiny, 2.0)[1], zero + 1
    )


@pytest.mark.parametrize("left", LAYOUTS)
@pytest.mark.parametrize("right", LAYOUTS)
def test_layouts(left, right):
    a, r, t = torch.randn(3, 6, 8).unbind()
    a, r = LAYOUTS[left](a), LAYOUTS[right](r)
    plain = [x.contiguous() for x in (a, r, t)]
    for op in (_ops.reversible_affine, _ops.reversible_affine_inverse):
        out = op(a, r, t, 2.0)
        assert torch.equal(out, op(*plain, 2.0))
        assert out.stride() == torch.empty_like(a).stride()
        meta = op(*(x.to("meta") for x in (a, r, t)), 2.0)
        assert (meta.shape, meta.dtype) == (out.shape, out.dtype)
    for x, y in zip(
        _ops.reversible_affine_backward(t, a, r, 2.0),
        _ops.reversible_affine_backward(t.contiguous(), *plain[:2], 2.0),
        strict=True,
    ):
        assert torch.equal(x, y) and x.stride() == torch.empty_like(a).stride()
    empty = torch.zeros(0, 2)
    assert _ops.reversible_affine(empty, empty, empty, 1.0).shape == (0, 2)
    assert _ops.reversible_affine(a[0, 0], r[0, 0], t[0, 0], 1.0).shape == ()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_threads(threads):
    before = torch.get_num_threads()
    a, r, t = torch.randn(3, 100_003).unbind()
    # Element by element: no neighbour and no place in memory may matter.
    expected = torch.cat(
        [
            _ops.reversible_affine(*parts, 2.0)
            for parts in zip(a.split(777), r.split(777), t.split(777), strict=True)
        ]
    )
    try:
        torch.set_num_threads(threads)
        assert torch.equal(_ops.reversible_affine(a, r, t, 2.0), expected)
    finally:
        torch.set_num_threads(before)


def doubles(count: int) -> list[Tensor]:
    result = [torch.randn(3, 4, dtype=torch.double) for _ in range(count)]
    result[1] = result[1].t().contiguous().t()
    return [x.requires_grad_() for x in result]


@pytest.mark.parametrize("name", ["", "_inverse", "_backward"])
@pytest.mark.parametrize("clamp", [0.7, 2.0])
def test_gradients_of_every_order(name, clamp):
    op = getattr(_ops, f"reversible_affine{name}")
    inputs = doubles(3)
    assert torch.autograd.gradcheck(lambda *x: op(*x, clamp), inputs)
    assert torch.autograd.gradgradcheck(lambda *x: op(*x, clamp), inputs)


@pytest.mark.parametrize(("acc", "other"), PAIRS, ids=str)
def test_gradients_come_in_the_dtypes_of_their_tensors(acc, other):
    a, r, t, g = numbers((5, 7), acc, other, other, acc)
    tensors = [x.requires_grad_() for x in (a, r, t)]
    for op in (_ops.reversible_affine, _ops.reversible_affine_inverse):
        grads = torch.autograd.grad(op(a, r, t, 2.0), tensors, g)
        assert [x.dtype for x in grads] == [acc, other, other]
    forward = torch.autograd.grad(
        _ops.reversible_affine(a, r, t, 2.0), tensors, g, create_graph=True
    )
    with torch.no_grad():
        direct = _ops.reversible_affine_backward(g, a, r, 2.0)
    assert torch.equal(forward[0], direct[0]) and torch.equal(forward[1], direct[1])
    assert torch.equal(forward[2], g.to(other))
    second = torch.autograd.grad(forward[1].sum(), [a, r])
    assert [x.dtype for x in second] == [acc, other]


def test_gradients_of_some_inputs_only():
    a, r, t = doubles(3)
    for wanted in ([a], [r], [t], [a, t]):
        for x in (a, r, t):
            x.requires_grad_(any(x is w for w in wanted))
        for op in (_ops.reversible_affine, _ops.reversible_affine_inverse):
            assert torch.autograd.gradcheck(lambda *x, f=op: f(a, r, t, 2.0), wanted)


@pytest.mark.parametrize("name", ["", "_inverse", "_backward"])
@pytest.mark.parametrize("grad", [False, True])
def test_opcheck(name, grad):
    op = getattr(torch.ops.torch_sm3, f"reversible_affine{name}").default
    for dtypes in ([torch.float32] * 3, [torch.bfloat16, torch.float32, torch.float16]):
        inputs = [x.requires_grad_(grad) for x in numbers((4, 5), *dtypes)]
        torch.library.opcheck(op, (*inputs, 2.0))
    inputs = [x.t().requires_grad_(grad) for x in numbers((0, 5), *[torch.double] * 3)]
    torch.library.opcheck(op, (*inputs, 0.5))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("reversible_affine", ("acc", "scale", "shift")),
        ("reversible_affine_inverse", ("out", "scale", "shift")),
        ("reversible_affine_backward", ("grad", "acc", "scale")),
    ],
)
def test_errors(name, arguments):
    op = getattr(_ops, name)
    x = torch.randn(2, 3)
    for i, argument in enumerate(arguments):
        for bad in (torch.zeros(2, 3, dtype=torch.long), x.cfloat()):
            tensors = [bad if i == k else x for k in range(3)]
            with pytest.raises(
                TypeError, match=rf"{name}: expected float16, .*'{argument}'"
            ):
                op(*tensors, 2.0)
    with pytest.raises(ValueError, match=rf"{name}: expected the shape \[2, 3\]"):
        op(x, x, x[0], 2.0)
    with pytest.raises(ValueError, match=rf"{name}: expected the device"):
        op(x, x, x.to("meta"), 2.0)
    with pytest.raises(NotImplementedError):
        op(x, x.to_sparse(), x, 2.0)
    for clamp in (0.0, -1.0, math.inf, math.nan, 1e-50, 1e40):
        with pytest.raises(ValueError, match=rf"{name}: .* > 0, .*'clamp'"):
            op(x, x, x, clamp)
    op(x.double(), x.double(), x.double(), 1e-50)


DIGEST = """
import hashlib
import torch
from torch_sm3 import _ops
torch.manual_seed(0)
torch.set_num_threads(2)
digest = hashlib.sha256()
for a in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
    for v in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        x, r, t = torch.randn(3, 70001, dtype=torch.double).unbind()
        x, r, t = x.to(a), (r * 9).to(v), t.to(v)
        for y in (
            _ops.reversible_affine(x, r, t, 2.0),
            _ops.reversible_affine(x, r * 20, t, 500.0),
            _ops.reversible_affine_inverse(x, r, t, 3.0),
            *_ops.reversible_affine_backward(x, x, r, 2.0),
        ):
            digest.update(y.contiguous().view(torch.uint8).numpy().tobytes())
print(digest.hexdigest())
"""


def test_bits_do_not_depend_on_the_instruction_set():
    assert len(outputs(DIGEST)) == 1
