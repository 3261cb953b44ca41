# SPDX-License-Identifier: Apache-2.0
"""Every algorithm of Adasum with all ranks in this process."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from helpers.adasum_pure import as_rows, bound_of
from hypothesis import strategies as st
from reference import adasum_oracle

MIB = 1 << 20
ALGORITHMS = ["auto", "pair", "gather", "gram", "two_level", "vhdd"]
EXACT = ["pair", "gather", "gram"]
TILE = 16384


def is_possible(algorithm: str, p: int) -> bool:
    """Whether an algorithm exists for ``p`` ranks that form no nodes."""
    power = p & (p - 1) == 0
    runs = any(p % q == 0 and q * q <= p for q in (2, 4, 8))
    return {"pair": p == 2, "two_level": runs, "vhdd": power}.get(algorithm, True)


def possible(p: int, among: Sequence[str] = ALGORITHMS) -> list[str]:
    return [algorithm for algorithm in among if is_possible(algorithm, p)]


def simulate(
    stack: torch.Tensor,
    sizes: Sequence[int],
    algorithm: str = "auto",
    mode: str = "tree",
    **options: Any,
) -> torch.Tensor:
    """Return what all ranks got, after checking that they got the same bits."""
    before = stack.clone()
    op = torch.ops.torch_sm3._adasum_loopback
    results = op(stack, list(sizes), mode, algorithm, **options)[0]
    assert torch.equal(bits(stack), bits(before)), "an operator without mutation"
    assert (bits(results) == bits(results[:1])).all(), f"ranks differ: {algorithm}"
    return results[0]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kind[tensor.element_size()])


def layers_of(stack: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    return list(torch.split(stack, list(sizes), dim=-1))


def layouts() -> st.SearchStrategy[list[int]]:
    """Return layers about the size of tiles, single elements and empty ones."""
    some = [0, 1, 2, 3, 17, 1000, TILE - 1, TILE, TILE + 1, 3 * TILE + 5]
    return st.lists(st.sampled_from(some), min_size=0, max_size=5)


def assert_near_oracle(
    stack: torch.Tensor,
    result: torch.Tensor,
    sizes: Sequence[int],
    algorithm: str,
    mode: str = "tree",
    **options: Any,
) -> None:
    """Compare every layer with the oracle.

    Algorithms that combine in levels round once at each: to float32 for 16 and 32
    bits, which what comes later sees as other leaves.
    """
    p = len(stack)
    levels = {"two_level": 1, "nodes": 1, "vhdd": max(math.ceil(math.log2(p)) - 1, 0)}
    more = levels.get(algorithm, 0)
    wide = torch.float64 if stack.dtype == torch.float64 else torch.float32
    unit = torch.finfo(wide).eps / 2
    for rows, found in zip(
        layers_of(stack, sizes), layers_of(result, sizes), strict=True
    ):
        if rows.shape[1] == 0:
            continue
        want = adasum_oracle.combine(as_rows(rows), mode, **options)
        norms = np.abs(want.coefficients) @ np.sqrt((as_rows(rows) ** 2).sum(axis=1))
        error = as_rows(found[None])[0] - want.vector
        allowed = bound_of(want, rows, result.dtype)
        slack = more * unit * 8 * want.kappa**2 * norms
        assert (np.abs(error) <= allowed + slack).all(), (
            algorithm,
            np.abs(error).max(),
            want.kappa,
        )


def wire_rows(rows: np.ndarray, sizes: Sequence[int], wire: str) -> np.ndarray:
    """Round rows as they travel: one power of two per tile for float16."""
    if wire == "bfloat16":
        # Eight bits, from float64 in one step (torch would pass through float32).
        mantissa, exponent = np.frexp(rows)
        return np.ldexp(np.rint(mantissa * 256), exponent - 8)
    result = rows.copy()
    starts = itertools.accumulate(sizes, initial=0)
    for start, size in zip(starts, sizes, strict=False):
        for first in range(start, start + size, TILE):
            tile = slice(first, min(first + TILE, start + size))
            for row in range(len(rows)):
                largest = np.abs(rows[row, tile]).max()
                shift = 0 if largest == 0 else 15 - int(np.frexp(largest)[1])
                scaled = np.ldexp(rows[row, tile], shift).astype(np.float16)
                result[row, tile] = np.ldexp(scaled.astype(np.float64), -shift)
    return result
