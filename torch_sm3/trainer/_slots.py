# SPDX-License-Identifier: Apache-2.0
"""Optimizer states of all layers as nested lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_sm3.trainer._layers import Layer, Model


def nesting_of(model: Model) -> list[Any]:
    """Return the indices of a model's layers, nested as its slots are.

    A block without standard layers has None in their place.
    """
    nested: list[Any] = [
        [None if standard is None else standard.index, [r.index for r in reversible]]
        for standard, reversible in model.blocks
    ]
    return [*nested, model.loss.index]


def get_slots(layers: Sequence[Layer], nesting: Any) -> Any:
    """Return copies of the states of all optimizers."""
    if isinstance(nesting, list):
        return [get_slots(layers, item) for item in nesting]
    optimizer = None if nesting is None else layers[nesting].optimizer
    if optimizer is None:
        return []
    full = optimizer.state_dict()
    keys = [key for group in full["param_groups"] for key in group["params"]]
    return [
        {
            name: value.detach().clone() if isinstance(value, Tensor) else value
            for name, value in full["state"].get(key, {}).items()
        }
        for key in keys
    ]


def set_slots(op: str, layers: Sequence[Layer], nesting: Any, slots: Any) -> None:
    """Load what :func:`get_slots` returned.

    Raises:
        ValueError: if the structure is another; nothing is changed then.
    """
    pairs: list[tuple[torch.optim.Optimizer, Any]] = []
    _match(op, layers, nesting, slots, "slots", pairs)
    for optimizer, states in pairs:
        full = optimizer.state_dict()
        keys = [key for group in full["param_groups"] for key in group["params"]]
        # An optimizer takes an absent state, but not always an empty one, for one
        # that its next step makes.
        full["state"] = {k: s for k, s in zip(keys, states, strict=True) if s}
        optimizer.load_state_dict(full)


def _match(
    op: str,
    layers: Sequence[Layer],
    nesting: Any,
    slots: Any,
    path: str,
    pairs: list[tuple[torch.optim.Optimizer, Any]],
) -> None:
    if isinstance(nesting, list):
        _check_list(op, slots, len(nesting), path)
        for i, (inner, item) in enumerate(zip(nesting, slots, strict=True)):
            _match(op, layers, inner, item, f"{path}[{i}]", pairs)
        return
    optimizer = None if nesting is None else layers[nesting].optimizer
    if optimizer is None:
        _check_list(op, slots, 0, path)
        return
    params = [p for group in optimizer.param_groups for p in group["params"]]
    _check_list(op, slots, len(params), path)
    for i, state in enumerate(slots):
        if not isinstance(state, dict):
            raise ValueError(
                f"{op}: expected a dict in {path}[{i}], but got "
                f"{type(state).__name__} (argument 'slots')"
            )
        present = optimizer.state.get(params[i], {})
        for name, value in state.items():
            mine = present.get(name)
            both = isinstance(value, Tensor) and isinstance(mine, Tensor)
            if both and value.shape != mine.shape:
                raise ValueError(
                    f"{op}: expected {path}[{i}]['{name}'] of shape "
                    f"{tuple(mine.shape)}, but got {tuple(value.shape)} "
                    "(argument 'slots')"
                )
    pairs.append((optimizer, slots))


def _check_list(op: str, slots: Any, count: int, path: str) -> None:
    if not isinstance(slots, (list, tuple)) or len(slots) != count:
        got = f"{len(slots)}" if isinstance(slots, (list, tuple)) else repr(slots)
        raise ValueError(
            f"{op}: expected a list of {count} in {path}, but got {got} "
            "(argument 'slots')"
        )
