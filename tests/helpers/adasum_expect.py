# SPDX-License-Identifier: Apache-2.0
"""What gradients of Adasum must be: the oracle's numbers and the operators' bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from reference.adasum_oracle import adasum, kappa

from torch_sm3 import _ops

Grads = Sequence[torch.Tensor | None]

_ETA = 2.0**-52


def combine(leaves: Sequence[torch.Tensor], **options: Any) -> torch.Tensor:
    """Return the Adasum of one layer by the operators, without any process group."""
    stack = torch.stack([leaf.flatten() for leaf in leaves])
    size = [stack.shape[1]]
    c = _ops.adasum_coefficients(_ops.adasum_gram(stack, size), **options)
    return _ops.adasum_combine(stack, c, size).view(leaves[0].shape)


def assert_is_oracle(result: torch.Tensor, leaves: Sequence[torch.Tensor]) -> None:
    """Compare one layer with the slow tree, within the promised bound of an element."""
    rows = [leaf.double().numpy().ravel() for leaf in leaves]
    want = adasum(rows).astype("f8")
    found = result.double().numpy().ravel()
    if not np.isfinite(want).all() or not want.any():
        np.testing.assert_array_equal(found, want)
        return
    kind = torch.finfo(result.dtype)
    # |c_i| is at most about kappa, hence the third one.
    sums = 8 * len(rows) * _ETA * kappa(rows) ** 3 * np.abs(rows).sum(0)
    bound = kind.eps / 2 * np.abs(want) + kind.smallest_normal * kind.eps / 2 + sums
    assert (np.abs(found - want) <= bound).all()


def assert_same(a: Grads, b: Grads) -> None:
    """Compare lists of gradients bit for bit."""
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert (x is None and y is None) or torch.equal(x, y)


def assert_adasum(
    results: Sequence[Grads], leaves: Sequence[Grads], **options: Any
) -> None:
    """Compare the gradients of all ranks with the Adasum of their local ones.

    Args:
        results: the gradients after the exchange, of all ranks and of all runs.
        leaves: by rank, those before; None where a rank has none.
        **options: of ``adasum_coefficients``; without any, the oracle is asked too.
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
        local = [zero if leaf is None else leaf for leaf in local]
        assert torch.equal(result, combine(local, **options))
        if not options:
            assert_is_oracle(result, local)
