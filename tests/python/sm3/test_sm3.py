# SPDX-License-Identifier: Apache-2.0
"""SM3 against its oracles, and the facts that hold without tolerance."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.sm3_oracle import NumpySM3, Options, RoundedSM3

import torch_sm3

SHAPES = [(), (1,), (7,), (1, 1), (2, 2), (5, 1), (3, 4), (1, 6, 5), (64, 33)]
SHAPES += [(4, 3, 5), (8, 1, 3, 3), (2, 3, 4, 2, 3), (0, 3), (3, 0), (2, 2, 2, 2, 2, 2)]
OPTIONS = [
    Options(),
    Options(momentum=0.9),
    Options(momentum=0.5, weight_decay=0.01, maximize=True),
    Options(beta2=0.9, eps=1e-8),
    Options(beta2=0.99, momentum=0.9, weight_decay=0.1),
    Options(eps=0.0),
]


def make(weight: torch.Tensor, o: Options) -> tuple[torch.nn.Parameter, torch_sm3.SM3]:
    param = torch.nn.Parameter(weight.clone(memory_format=torch.preserve_format))
    optimizer = torch_sm3.SM3(
        [param],
        lr=o.lr,
        momentum=o.momentum,
        beta2=o.beta2,
        eps=o.eps,
        weight_decay=o.weight_decay,
        maximize=o.maximize,
    )
    return param, optimizer


def accumulators(optimizer: torch_sm3.SM3, param: torch.Tensor) -> list[torch.Tensor]:
    state = optimizer.state[param]
    return [state[k] for k in sorted(state) if k.startswith("accumulator")]


def wild(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return gradients over many orders of magnitude, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    scale = 10.0 ** torch.randint(-12, 9, shape, generator=generator)
    return torch.randn(shape, generator=generator) * scale.relu()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_and_values_of_the_oracles(shape, options) -> None:
    weight = torch.randn(shape)
    param, optimizer = make(weight, options)
    exact = NumpySM3(weight.double().numpy(), options)
    rounded = RoundedSM3(weight, options)
    for step in range(20):
        grad = torch.randn(shape) * 10.0 ** (step % 5 - 2)
        param.grad = grad.clone()
        optimizer.step()
        exact.step(grad.double().numpy())
        rounded.step(grad)
        assert torch.equal(param.detach(), rounded.w)
        ours = accumulators(optimizer, param)
        for mu, expected, reference in zip(ours, rounded.mu, exact.mu, strict=True):
            assert torch.equal(mu.flatten(), expected.flatten())
            np.testing.assert_allclose(mu.flatten(), reference.flatten(), rtol=2e-5)
        if options.momentum > 0:
            assert torch.equal(optimizer.state[param]["momentum_buffer"], rounded.m)
        assert torch.equal(param.grad, grad), "gradients are never written"
    np.testing.assert_allclose(param.detach(), exact.w, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS[:2], ids=str)
def test_bits_of_every_dtype_pair(dtype, grad_dtype, options) -> None:
    weight = torch.randn(40, 33).to(dtype)
    param, optimizer = make(weight, options)
    rounded = RoundedSM3(weight, options)
    for _ in range(4):
        grad = torch.randn(40, 33).to(grad_dtype)
        param.grad = None
        param.grad_dtype = None
        param.grad = grad
        optimizer.step()
        rounded.step(grad)
        assert torch.equal(param.detach(), rounded.w)
    for mu, expected in zip(accumulators(optimizer, param), rounded.mu, strict=True):
        assert mu.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert torch.equal(mu.flatten(), expected.flatten())


def test_golden_values() -> None:
    g1 = torch.tensor([[1.0, -2, 3], [0, 4, -1]])
    g2 = torch.tensor([[2, 0, -1], [1e-5, 1, 0]])
    expected = {
        None: (
            [10, 17],
            [5, 17, 10],
            [-0.0279442719, 0.019, -0.0158377223, -1e-7, -0.0214253563, 0.019],
        ),
        0.9: (
            [0.91, 1.54],
            [0.49, 1.54, 0.91],
            [
                *(-0.0886547041, 0.0600832755, -0.0496004272),
                *(-3.33333333e-7, -0.0681415052, 0.0600832755),
            ],
        ),
    }
    for beta2, (rows, columns, weights) in expected.items():
        param, optimizer = make(torch.zeros(2, 3), Options(momentum=0.9, beta2=beta2))
        for grad in (g1, g2):
            param.grad = grad.clone()
            optimizer.step()
        mu = accumulators(optimizer, param)
        torch.testing.assert_close(mu[0], torch.tensor(rows).float(), rtol=1e-6, atol=0)
        torch.testing.assert_close(
            mu[1], torch.tensor(columns).float(), rtol=1e-6, atol=0
        )
        torch.testing.assert_close(
            param.detach().flatten(), torch.tensor(weights), rtol=1e-6, atol=1e-12
        )


@pytest.mark.parametrize(
    ("g", "u", "mu"),
    [
        (1e-5, 1.0, 1e-10),
        (1e-16, 0.0995037, 1e-32),
        (1e-20, 1e-5, 0.0),
        (1e20, 1.0, 3.4028233e38),
    ],
)
def test_first_step_of_one_element(g, u, mu) -> None:
    param, optimizer = make(torch.zeros(1), Options(lr=1.0))
    param.grad = torch.tensor([g])
    optimizer.step()
    assert -param.item() == pytest.approx(u, rel=1e-5)
    assert accumulators(optimizer, param)[0].item() == pytest.approx(mu, rel=1e-6)


shapes = st.lists(st.integers(0, 5), max_size=6).map(tuple)


@settings(max_examples=60, deadline=None)
@given(shape=shapes, seed=st.integers(0, 2**31))
def test_bounds_hold_in_rounded_arithmetic(shape, seed) -> None:
    param, optimizer = make(torch.zeros(shape), Options(lr=1.0))
    sums = torch.zeros(shape)
    before = None
    for step in range(5):
        grad = wild(shape, seed + step)
        old = param.detach().clone()
        param.grad = grad
        optimizer.step()
        sums = sums + grad * grad
        mu = accumulators(optimizer, param)
        # Each accumulator covers: no smaller than the sum of any element in its set.
        real = [d for d, n in enumerate(shape) if n != 1]
        if len(mu) > 1:
            for d, one in zip(real, mu, strict=True):
                view = [-1 if k == d else 1 for k in range(len(shape))]
                assert (one.view(view) >= sums).all()
        else:
            assert torch.equal(mu[0].flatten(), sums.flatten())
        if before is not None:
            assert all((a >= b).all() for a, b in zip(mu, before, strict=True))
        before = [one.clone() for one in mu]
        assert ((param.detach() - old).abs() <= 1.0 + 1e-6).all()


@settings(max_examples=40, deadline=None)
@given(shape=shapes, seed=st.integers(0, 2**31))
def test_zero_gradient_changes_no_bit(shape, seed) -> None:
    torch.manual_seed(seed)
    param, optimizer = make(torch.randn(shape), Options())
    param.grad = wild(shape, seed)
    optimizer.step()
    weight, mu = param.detach().clone(), [a.clone() for a in optimizer_mu(optimizer)]
    param.grad = torch.zeros(shape)
    optimizer.step()
    assert torch.equal(param.detach(), weight)
    for ours, expected in zip(optimizer_mu(optimizer), mu, strict=True):
        assert torch.equal(ours, expected)
    assert optimizer.state[param]["step"] == 2


def optimizer_mu(optimizer: torch_sm3.SM3) -> list[torch.Tensor]:
    return accumulators(optimizer, optimizer.param_groups[0]["params"][0])


def test_permuting_dimensions_permutes_the_state() -> None:
    weight, grad = torch.randn(3, 4, 5), torch.randn(3, 4, 5)
    one, first = make(weight, Options())
    other, second = make(weight.permute(2, 0, 1).contiguous(), Options())
    one.grad, other.grad = grad, grad.permute(2, 0, 1).contiguous()
    first.step()
    second.step()
    assert torch.equal(one.detach().permute(2, 0, 1), other.detach())
    mine, theirs = accumulators(first, one), accumulators(second, other)
    for i, j in enumerate((2, 0, 1)):
        assert torch.equal(theirs[i], mine[j])


def test_vectors_are_adagrad() -> None:
    weight = torch.randn(50)
    param, optimizer = make(weight, Options(lr=0.1))
    other = torch.nn.Parameter(weight.clone())
    adagrad = torch.optim.Adagrad([other], lr=0.1, eps=0)
    for _ in range(10):
        param.grad = torch.randn(50)
        other.grad = param.grad.clone()
        optimizer.step()
        adagrad.step()
    torch.testing.assert_close(param, other, rtol=1e-6, atol=1e-6)


def strided_copies(x: torch.Tensor) -> list[torch.Tensor]:
    """Return tensors of equal values with other strides and offsets."""
    base = torch.zeros([2 * n + 1 for n in x.shape])
    every_second = base[tuple(slice(1, None, 2) for _ in x.shape)]
    every_second.copy_(x)
    reverse = tuple(range(x.dim() - 1, -1, -1))
    return [x, every_second, x.permute(reverse).contiguous().permute(reverse)]


@pytest.mark.parametrize("shape", [(9,), (7, 9), (3, 4, 5), (2, 2)], ids=str)
def test_strides_change_no_bit(shape) -> None:
    weight, grads = torch.randn(shape), [torch.randn(shape) for _ in range(3)]
    results = []
    for w in strided_copies(weight):
        for variant in range(3):
            param = torch.nn.Parameter(w)
            param.data = w.clone(memory_format=torch.preserve_format)
            if not w.is_contiguous():
                param.data = w
                w.copy_(weight)
            optimizer = torch_sm3.SM3([param], momentum=0.9)
            for grad in grads:
                param.grad = strided_copies(grad)[variant]
                optimizer.step()
            results.append((param.detach().clone(), optimizer_mu(optimizer)))
    for value, mu in results[1:]:
        assert torch.equal(value, results[0][0])
        assert all(torch.equal(a, b) for a, b in zip(mu, results[0][1], strict=True))


HASH = """
import hashlib, sys, torch, torch_sm3
torch.set_num_threads(int(sys.argv[1]))
torch.manual_seed(0)
digest = hashlib.sha256()
shapes = [(515, 700), (40, 30, 90), (200003,), (70000, 3), (3, 70000), (9, 8, 7, 6)]
for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
    params = [torch.nn.Parameter(torch.randn(s).to(dtype)) for s in shapes]
    optimizer = torch_sm3.SM3(params, momentum=0.9, weight_decay=0.01)
    for _ in range(2):
        for p in params:
            p.grad = torch.randn(p.shape).to(dtype)
        optimizer.step()
    for p in params:
        for t in (p, *optimizer.state[p].values()):
            digest.update(t.detach().contiguous().view(-1).view(torch.uint8).numpy())
print(torch.ops.torch_sm3.cpu_capability(), digest.hexdigest())
"""


def test_threads_and_instruction_sets_change_no_bit() -> None:
    digests = {}
    runs = [("avx512", 1), ("avx512", 2), ("avx512", 8)]
    runs += [("avx2", 3), ("scalar", 1), ("scalar", 5)]
    for capability, threads in runs:
        environment = {**os.environ, "TORCH_SM3_CPU_CAPABILITY": capability}
        run = subprocess.run(
            [sys.executable, "-c", HASH, str(threads)],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        )
        used, digest = run.stdout.split()
        digests[used, threads] = digest
    assert len(set(digests.values())) == 1, digests
    assert len({used for used, _ in digests}) > 1, "one instruction set was compared"
