# SPDX-License-Identifier: Apache-2.0
"""What gradients of Adasum must be: the oracle's numbers and the operators' bits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from helpers.adasum_pure import assert_near_oracle, combine

Grads = Sequence[torch.Tensor | None]
Pair = tuple[Grads, Grads]


def sides(results: Iterable[Sequence[Any]]) -> tuple[list[Any], list[Any]]:
    """Split what each rank returned, gradients before and after, into two lists."""
    before, after, *_ = zip(*results, strict=True)
    return list(before), list(after)


def assert_same(a: Grads, b: Grads) -> None:
    """Compare lists of gradients bit for bit."""
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert (x is None and y is None) or torch.equal(x, y)


def assert_adasum(
    results: Sequence[Grads],
    leaves: Sequence[Grads],
    *,
    bits: bool = True,
    **options: Any,
) -> None:
    """Compare the gradients of all ranks with the Adasum of their local ones.

    Args:
        results: the gradients after the exchange, of all ranks and of all runs.
        leaves: by rank, those before; None where a rank has none.
        bits: the operators give the same bits.
        **options: of ``adasum_coefficients`` and of the oracle.
    """
    for result in results[1:]:
        assert_same(result, results[0])
    for layer, result in enumerate(results[0]):
        local = [rank[layer] for rank in leaves]
        there = [leaf for leaf in local if leaf is not None]
        if not there:
            # A parameter that no rank used is left alone.
            assert result is None
            continue
        assert result is not None
        zero = torch.zeros_like(there[0])
        stack = torch.stack(
            [(zero if leaf is None else leaf).flatten() for leaf in local]
        )
        if bits:
            assert torch.equal(result.flatten(), combine(stack, **options))
        if result.numel() > 0:
            assert_near_oracle(stack, result.flatten(), **options)
