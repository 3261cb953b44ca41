# SPDX-License-Identifier: Apache-2.0
"""Additive coupling by hand in float64 NumPy: forward, inverse, gradients.

Each residual function is ``F(x) = tanh(x @ w) @ u``. Written for reading, not speed,
and without autograd.
"""

from __future__ import annotations

import numpy as np

Array = np.ndarray
Weights = tuple[Array, Array]


def function(x: Array, weights: Weights) -> Array:
    w, u = weights
    return np.tanh(x @ w) @ u


def function_vjp(
    x: Array, weights: Weights, grad: Array
) -> tuple[Array, tuple[Array, Array]]:
    """Return the gradients of ``x`` and of both weights."""
    w, u = weights
    hidden = np.tanh(x @ w)
    grad_before_tanh = (grad @ u.T) * (1 - hidden**2)
    return grad_before_tanh @ w.T, (x.T @ grad_before_tanh, hidden.T @ grad)


def forward(
    x1: Array, x2: Array, blocks: list[tuple[Weights, Weights]]
) -> tuple[Array, Array]:
    for f, g in blocks:
        x1 = x1 + function(x2, f)
        x2 = x2 + function(x1, g)
    return x1, x2


def inverse(
    y1: Array, y2: Array, blocks: list[tuple[Weights, Weights]]
) -> tuple[Array, Array]:
    for f, g in reversed(blocks):
        y2 = y2 - function(y1, g)
        y1 = y1 - function(y2, f)
    return y1, y2


def backward(
    y1: Array,
    y2: Array,
    grad1: Array,
    grad2: Array,
    blocks: list[tuple[Weights, Weights]],
) -> tuple[Array, Array, list[tuple[Weights, Weights]]]:
    """Return gradients of both inputs and of all weights, from the outputs alone."""
    weight_grads: list[tuple[Weights, Weights]] = []
    for f, g in reversed(blocks):
        y2 = y2 - function(y1, g)
        grad_x, grad_g = function_vjp(y1, g, grad2)
        grad1 = grad1 + grad_x
        y1 = y1 - function(y2, f)
        grad_x, grad_f = function_vjp(y2, f, grad1)
        grad2 = grad2 + grad_x
        weight_grads.insert(0, (grad_f, grad_g))
    return grad1, grad2, weight_grads
