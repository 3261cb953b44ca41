# SPDX-License-Identifier: Apache-2.0
"""SM3 as a user calls it, against both oracles, and with strides of all kinds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
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


def optimizer_mu(optimizer: torch_sm3.SM3) -> list[torch.Tensor]:
    return accumulators(optimizer, optimizer.param_groups[0]["params"][0])


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
