# SPDX-License-Identifier: Apache-2.0
"""The plain training step, and Philox in NumPy; neither knows the product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

U32, U64 = np.uint32, np.uint64


def philox(key: Sequence[int], counter: Sequence[int]) -> list[int]:
    """Philox-4x32-10 as in the paper, on NumPy's wrapping integers.

    Args:
        key: two words.
        counter: four words.
    """
    with np.errstate(over="ignore"):
        x = np.array(counter, dtype=U64)
        k = np.array(key, dtype=U32)
        for _ in range(10):
            product0 = x[0] * U64(0xD2511F53)
            product1 = x[2] * U64(0xCD9E8D57)
            high0, low0 = product0 >> U64(32), product0 & U64(0xFFFFFFFF)
            high1, low1 = product1 >> U64(32), product1 & U64(0xFFFFFFFF)
            x = np.array(
                [high1 ^ x[1] ^ U64(k[0]), low1, high0 ^ x[3] ^ U64(k[1]), low0],
                dtype=U64,
            )
            k = k + np.array([0x9E3779B9, 0xBB67AE85], dtype=U32)
    return [int(word) for word in x]


def fold(seed: int, index: int) -> int:
    """First 64 bits of Philox with a seed as its key, at a counter."""
    words = philox(
        [seed & 0xFFFFFFFF, seed >> 32], [index & 0xFFFFFFFF, index >> 32, 0, 0]
    )
    return words[0] + (words[1] << 32)


def plain_step(
    run: Callable[[Sequence[Tensor], int], Tensor],
    batch: Sequence[Tensor],
    parameters: Sequence[Tensor],
    optimizers: Sequence[torch.optim.Optimizer],
    microbatch_size: int | None = None,
    limit: float | None = None,
    scaler: Any = None,
) -> Tensor:
    """The step that everyone writes by hand.

    Args:
        run: loss of a microbatch, given its tensors and its number.
        batch: all examples.
        parameters: whose gradients are clipped together.
        optimizers: of the parameters.
        microbatch_size: examples of a microbatch; the last may have fewer.
        limit: of the gradients' norm.
        scaler: a GradScaler.

    Returns:
        The mean loss.
    """
    count = len(batch[0])
    size = microbatch_size or count
    total = torch.zeros(())
    for parameter in parameters:
        parameter.grad = None
    for i, start in enumerate(range(0, count, size)):
        part = [x[start : start + size] for x in batch]
        loss = run(part, i)
        share = len(part[0]) / count
        total = total + loss.detach() * share
        scaled = loss * share
        (scaled if scaler is None else scaler.scale(scaled)).backward()
    if scaler is not None:
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        # One overflow anywhere spoils the step of all.
        bad = not all(
            torch.isfinite(p.grad).all() for p in parameters if p.grad is not None
        )
    if limit is not None:
        torch.nn.utils.clip_grad_norm_(parameters, limit)
    for optimizer in optimizers:
        if scaler is None:
            optimizer.step()
        elif not bad:
            scaler.step(optimizer)
    if scaler is not None:
        scaler.update()
    for parameter in parameters:
        parameter.grad = None
    return total


def layered(
    built: Any, seed: int
) -> tuple[
    Callable[[Sequence[Tensor], int], Tensor], list[Tensor], list[torch.nn.Module]
]:
    """The layered model of the tests by its maths.

    Args:
        built: blocks and loss layer.
        seed: of the step on a rank; each layer runs under its own.

    Returns:
        The loss of a microbatch given its number, all parameters, all layers.
    """
    ((embed,), first), ((between,), second) = built[0]
    layers = [embed, *first, between, *second, built[1]]

    def run(part: Sequence[Tensor], microbatch: int) -> Tensor:
        def enter(i: int) -> None:
            torch.manual_seed(fold(fold(seed, i), microbatch))

        def call(function: Any, x: Tensor) -> Tensor:
            masked = type(function).__name__ == "Masked"
            return function(x, mask=mask, memory=memory) if masked else function(x)

        tokens, mask, targets, weights = part
        enter(0)
        x1, x2, memory = embed(tokens)
        for i, layer in enumerate(layers[1:-1], 1):
            enter(i)
            kind = type(layer).__name__
            if kind == "Between":
                x1, x2 = layer(x1, x2)
            elif kind == "AdditiveCoupling":
                x1 = x1 + call(layer.F, x2)
                x2 = x2 + call(layer.G, x1)
            elif kind == "HalfResidual":
                x1 = x1 + layer.layers[0](x2, memory)
            else:
                x1, x2 = x2, x1
        enter(len(layers) - 1)
        return layers[-1](x1, x2, memory, mask, targets, weights)

    parameters = {id(p): p for layer in layers for p in layer.parameters()}
    return run, list(parameters.values()), layers
