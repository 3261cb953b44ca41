# SPDX-License-Identifier: Apache-2.0
"""Affine, momentum and ring couplings by hand in float64 NumPy.

Forward passes are the formulas. Backward passes start from the outputs, rebuild the
inputs and return all gradients, row by row as in the table of the documentation. Each
function is ``F(x) = tanh(x @ w) @ u``, see ``reversible_oracle``.
"""

from __future__ import annotations

import numpy as np
from reference.reversible_oracle import Array, Weights, function, function_vjp


def bounded(raw: Array, clamp: float) -> Array:
    return clamp * np.tanh(raw / clamp)


def affine_half(acc: Array, context: Array, f: Weights, clamp: float) -> Array:
    raw, shift = np.split(function(context, f), 2, axis=-1)
    return acc * np.exp(bounded(raw, clamp)) + shift


def affine_half_inverse(out: Array, context: Array, f: Weights, clamp: float) -> Array:
    raw, shift = np.split(function(context, f), 2, axis=-1)
    return (out - shift) * np.exp(-bounded(raw, clamp))


def affine_half_logdet(context: Array, f: Weights, clamp: float) -> Array:
    raw, _ = np.split(function(context, f), 2, axis=-1)
    return bounded(raw, clamp).reshape(len(raw), -1).sum(1)


def affine_half_backward(
    out: Array,
    context: Array,
    grad: Array,
    grad_logdet: Array,
    f: Weights,
    clamp: float,
) -> tuple[Array, Array, Array, Weights]:
    """Return the old accumulator, its gradient, the context's, and the weights'."""
    raw, shift = np.split(function(context, f), 2, axis=-1)
    scale = np.exp(bounded(raw, clamp))
    per_row = grad_logdet.reshape(-1, *[1] * (raw.ndim - 1))
    grad_raw = (grad * (out - shift) + per_row) * (1 - np.tanh(raw / clamp) ** 2)
    pair = np.concatenate([grad_raw, grad], axis=-1)
    grad_context, grad_f = function_vjp(context, f, pair)
    return (out - shift) / scale, grad * scale, grad_context, grad_f


def momentum(x: Array, v: Array, f: Weights, gamma: float) -> tuple[Array, Array]:
    v = gamma * v + (1 - gamma) * function(x, f)
    return x + v, v


def momentum_inverse(
    x: Array, v: Array, f: Weights, gamma: float
) -> tuple[Array, Array]:
    x = x - v
    return x, (v - (1 - gamma) * function(x, f)) / gamma


def momentum_backward(
    x: Array, v: Array, grad_x: Array, grad_v: Array, f: Weights, gamma: float
) -> tuple[Array, Array, Array, Array, Weights]:
    """Return the old streams, their gradients, and the weights'."""
    x, v = momentum_inverse(x, v, f, gamma)
    both = grad_v + grad_x
    grad_f, weights = function_vjp(x, f, (1 - gamma) * both)
    return x, v, grad_x + grad_f, gamma * both, weights


def ring(streams: list[Array], fs: list[Weights]) -> list[Array]:
    first = streams[0] + function(sum(streams[1:]), fs[0])
    result = [first]
    for stream, f in zip(streams[1:], fs[1:], strict=True):
        result.append(stream + function(result[-1], f))
    return result


def ring_inverse(streams: list[Array], fs: list[Weights]) -> list[Array]:
    rest = [
        streams[i] - function(streams[i - 1], fs[i]) for i in range(1, len(streams))
    ]
    return [streams[0] - function(sum(rest), fs[0]), *rest]


def ring_backward(
    streams: list[Array], grads: list[Array], fs: list[Weights]
) -> tuple[list[Array], list[Array], list[Weights]]:
    """Return the old streams, their gradients, and the weights'."""
    old, grads = ring_inverse(streams, fs), list(grads)
    weights: list[Weights] = []
    for i in reversed(range(1, len(streams))):
        more, grad_f = function_vjp(streams[i - 1], fs[i], grads[i])
        grads[i - 1] = grads[i - 1] + more
        weights.insert(0, grad_f)
    more, grad_f = function_vjp(sum(old[1:]), fs[0], grads[0])
    grads[1:] = [grad + more for grad in grads[1:]]
    return old, grads, [grad_f, *weights]
