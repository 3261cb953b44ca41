# SPDX-License-Identifier: Apache-2.0
"""Runs of F outside the graph of the call, and the comparison of their bits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from torch_sm3.reversible._steps import is_stream


@contextlib.contextmanager
def with_bare_graph(name: str) -> Iterator[None]:
    """Run F with grad, for a graph that is dropped at once."""
    # Saved-tensor hooks of the user's are for what the call keeps, not for this.
    hooks = saved_tensors_hooks(Tensor.detach, lambda x: x)
    with refused_writes(name), torch.enable_grad(), hooks:
        yield


@contextlib.contextmanager
def refused_writes(name: str) -> Iterator[None]:
    """Say whose F it was that autograd did not let write to a leaf."""
    try:
        yield
    except RuntimeError as error:
        if "in-place operation" not in str(error):
            raise
        raise RuntimeError(
            f"reversible: expected F of {name} to leave its inputs alone, but got a "
            "write in place (argument 'F')"
        ) from error


def leaf(item: Any) -> Any:
    """Return a stream as a leaf that requires grad, anything else as it is."""
    return item.detach().requires_grad_() if is_stream(item) else item


def detached(item: Any) -> Any:
    """Return a tensor without its graph, anything else as it is."""
    return item.detach() if isinstance(item, Tensor) else item


def same_bits(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Tell whether the tensors of two lists agree in every bit."""
    return all(
        torch.equal(_bits(a), _bits(b))
        for a, b in zip(left, right, strict=True)
        if isinstance(a, Tensor) and isinstance(b, Tensor)
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().flatten().contiguous().view(torch.uint8)
