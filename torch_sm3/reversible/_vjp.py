# SPDX-License-Identifier: Apache-2.0
"""The vector-Jacobian product of a recomputed F, taken inside a backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves

from torch_sm3.reversible._replay import Replay


class Roots(NamedTuple):
    """Where a graph is differentiated, without the tensors that are there."""

    edges: list[GradientEdge]
    grads: list[Tensor]


def roots_of(values: Sequence[Any], grads: Sequence[Tensor | None]) -> Roots:
    """Return the roots among ``values`` to which a gradient arrives."""
    roots = Roots([], [])
    for value, grad in zip(values, grads, strict=True):
        if grad is not None and value.requires_grad:
            roots.edges.append(get_gradient_edge(value))
            roots.grads.append(grad.to(value.dtype))
    return roots


def vjp(
    replay: Replay, roots: Roots, inputs: Sequence[Tensor], needs: Sequence[bool]
) -> list[Tensor | None]:
    """Return the gradients of ``inputs``, None where none is needed or none arrives."""
    result: list[Tensor | None] = [None] * len(needs)
    # A weight may have been frozen since the first run; autograd passes it over.
    wanted = [i for i, need in enumerate(needs) if need and inputs[i].requires_grad]
    if not roots.edges or not wanted:
        return result
    with _SuspendedHooks(replay.owned):
        found = torch.autograd.grad(
            roots.edges,
            [inputs[i] for i in wanted],
            roots.grads,
            allow_unused=True,
        )
    for i, grad in zip(wanted, found, strict=True):
        result[i] = grad
    return result


def undeclared(
    roots: Sequence[Any], inputs: Sequence[Tensor]
) -> tuple[tuple[int, ...], ...]:
    """Return the shape of a leaf that F's graph reaches beyond ``inputs``, if any."""
    known = {id(tensor) for tensor in inputs}
    seen = {t.grad_fn for t in inputs if t.grad_fn is not None}
    todo = [root.grad_fn for root in tree_leaves(roots) if isinstance(root, Tensor)]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf: Tensor | None = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            return (tuple(leaf.shape),)
        todo += [edge[0] for edge in node.next_functions]
    return ()


def check_declared(step: Any, name: str) -> None:
    """Refuse a step whose first call reached a tensor from elsewhere.

    Raises:
        RuntimeError: if F's graph does.
    """
    if step.learned.undeclared:
        raise RuntimeError(
            f"reversible: expected every tensor that F of {name} needs the gradient of "
            "to be an input, side context, or an attribute of F, but got one of shape "
            f"{step.learned.undeclared[0]} from elsewhere (argument 'F'); "
            "engine='graph' permits it"
        )


class _SuspendedHooks:
    """Keeps tensor hooks for the outer backward pass, where they fire once."""

    __slots__ = ("_content", "_hooks")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        found: list[Any] = [tensor._backward_hooks for tensor in tensors]
        self._hooks = [hooks for hooks in found if hooks]

    def __enter__(self) -> None:
        self._content = [dict(hooks) for hooks in self._hooks]
        for hooks in self._hooks:
            # Emptied in place: autograd holds the dictionary itself.
            hooks.clear()

    def __exit__(self, *_: object) -> None:
        for hooks, content in zip(self._hooks, self._content, strict=True):
            hooks.update(content)
