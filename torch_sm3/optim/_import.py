# SPDX-License-Identifier: Apache-2.0
"""State dicts of other torch ports of SM3, turned into ours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from torch_sm3.optim._batch import ResolvedCover
from torch_sm3.optim._options import DEFAULTS, check_group, make_plain
from torch_sm3.optim._resolve import resolve
from torch_sm3.optim._state import accumulators, momentum_dtype
from torch_sm3.optim._storage import encode_blocks

SOURCES = ("enealor", "pytorch_optimizer", "gpt_neox")
# Written by them and without a meaning here, or with another one.
_DROPPED = ("beta", "step", "foreach", "params")


def import_state_dict(
    state_dict: Mapping[str, Any], params: ParamsT, source: str = "enealor"
) -> dict[str, Any]:
    """Turn a state dict of another torch port of SM3 into one of :class:`SM3`.

    Accumulators become float32 vectors without dimensions of size 1; a 2 x 2 matrix
    gets the minimum of both. ``beta > 0`` becomes ``beta2`` with ``compat="enealor"``,
    whose accumulators never fall.

    Args:
        state_dict: what the other optimizer's ``state_dict()`` returned; is not
            modified.
        params: the parameters or groups that :class:`SM3` is made with, in the order
            of the other optimizer. A group may set ``cover`` and ``momentum_dtype``.
        source: "enealor" (PyTorch-SM3), "pytorch_optimizer" or "gpt_neox".

    Returns:
        A dict for :meth:`SM3.load_state_dict`.

    Raises:
        ValueError: for an unknown source, another count of parameters, or
            accumulators that do not fit a parameter.

    Example:
        >>> theirs = {
        ...     "state": {
        ...         0: {
        ...             "step": 7,
        ...             "momentum_buffer": 0.0,
        ...             "accumulator_0": torch.tensor([[1.0], [2.0]]),
        ...             "accumulator_1": torch.tensor([[3.0, 4.0, 5.0]]),
        ...         }
        ...     },
        ...     "param_groups": [
        ...         {"lr": 0.3, "momentum": 0.0, "beta": 0.0, "eps": 1e-30, "params": [0]}
        ...     ],
        ... }
        >>> weight = torch.nn.Parameter(torch.zeros(2, 3))
        >>> optimizer = torch_sm3.SM3([weight])
        >>> optimizer.load_state_dict(torch_sm3.import_state_dict(theirs, [weight]))
        >>> optimizer.state[weight]["accumulator_1"], optimizer.param_groups[0]["lr"]
        (tensor([3., 4., 5.]), 0.3)
    """  # noqa: E501
    if source not in SOURCES:
        raise _error(f"one of {SOURCES}", repr(source), "source")
    groups = _groups(params)
    theirs = state_dict["param_groups"]
    counts = [len(group["params"]) for group in theirs]
    if counts != [len(group["params"]) for group in groups]:
        raise _error(
            f"groups of {counts} parameters",
            [len(group["params"]) for group in groups],
            "params",
        )
    states: dict[Any, Any] = {}
    ours: list[dict[str, Any]] = []
    for their_group, group in zip(theirs, groups, strict=True):
        options = _options(their_group, group)
        ours.append({**options, "params": list(their_group["params"])})
        for key, param in zip(their_group["params"], group["params"], strict=True):
            if key in state_dict["state"]:
                state = state_dict["state"][key]
                step = their_group.get("step", 0) if "step" not in state else None
                states[key] = _import_one(key, param, state, options, step)
    return {"state": states, "param_groups": ours}


def _error(expected: str, value: object, name: str) -> ValueError:
    return ValueError(
        f"import_state_dict: expected {expected}, but got {value} (argument {name!r})"
    )


def _groups(params: ParamsT) -> list[dict[str, Any]]:
    """Return groups of tensors, whatever form of parameters is given."""
    given: list[Any] = list(params)
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    return [{**group, "params": _tensors(group["params"])} for group in groups]


def _tensors(params: Tensor | Iterable[Any]) -> list[Tensor]:
    if isinstance(params, Tensor):
        return [params]
    return [param[1] if isinstance(param, tuple) else param for param in params]


def _options(theirs: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group."""
    options = {**DEFAULTS, **{k: v for k, v in theirs.items() if k not in _DROPPED}}
    for key in ("cover", "momentum_dtype"):
        options[key] = group.get(key, DEFAULTS[key])
    beta = theirs.get("beta", 0.0)
    if beta:
        options.update(beta2=beta, compat="enealor")
    make_plain(options)
    check_group(options)
    return options


def _import_one(
    key: object,
    param: Tensor,
    theirs: Mapping[str, Any],
    options: Mapping[str, Any],
    step: int | None,
) -> dict[str, Any]:
    count = theirs["step"] if step is None else step
    state: dict[str, Any] = {"step": torch.tensor(int(count), dtype=torch.int64)}
    computing = torch.float64 if param.dtype == torch.float64 else torch.float32
    vectors = _vectors(key, tuple(param.shape), accumulators(theirs))
    vectors = [vector.detach().to(computing) for vector in vectors]
    cover = resolve(options["cover"], param.shape, options["compat"])
    for i, accumulator in enumerate(_into(cover, tuple(param.shape), vectors)):
        state[f"accumulator_{i}"] = accumulator
    buffer: Any = theirs.get("momentum_buffer")
    # Theirs is 0.0 or a sparse tensor where it was never used.
    known = isinstance(buffer, Tensor) and buffer.layout == torch.strided
    if known and options["momentum"] > 0:
        state.update(_momentum(buffer, param, options["momentum_dtype"]))
    return state


def _vectors(
    key: object, shape: tuple[int, ...], given: Sequence[Tensor]
) -> list[Tensor]:
    """Return one vector for each dimension, one number for a scalar."""
    sizes = list(shape) or [1]
    found = [accumulator.reshape(-1) for accumulator in given]
    if len(found) == 1 and len(sizes) > 1 and found[0].numel() == sizes[0]:
        # The first gradient was sparse: the rows alone are known, and stay the minimum.
        top = found[0].max() if sizes[0] else found[0].new_zeros(())
        found += [top.expand(size) for size in sizes[1:]]
    if [vector.numel() for vector in found] != sizes:
        raise _error(
            f"accumulators of {sizes} elements for parameter {key}",
            [tuple(accumulator.shape) for accumulator in given],
            "state_dict",
        )
    return found


def _into(
    cover: ResolvedCover, shape: tuple[int, ...], vectors: Sequence[Tensor]
) -> list[Tensor]:
    """Return the accumulators of a cover that bounds what the vectors bound."""
    kept = [vector for vector, size in zip(vectors, shape, strict=False) if size != 1]
    if cover.axes == tuple((axis,) for axis in range(len(kept))) and kept:
        return [vector.clone() for vector in kept]
    least = vectors[0].new_full(shape, torch.inf)
    for axis, vector in enumerate(vectors):
        sizes = [-1 if d == axis else 1 for d in range(len(shape))]
        least = torch.minimum(least, vector.reshape(sizes))
    least = least.reshape(cover.view)
    result: list[Tensor] = []
    for group, size in zip(cover.axes, cover.shapes, strict=True):
        others = [axis for axis in range(len(cover.view)) if axis not in group]
        largest = least.amax(dim=others) if others else least
        result.append(largest.reshape(size).clone())
    return result


def _momentum(buffer: Tensor, param: Tensor, option: str | None) -> dict[str, Tensor]:
    """Return a momentum buffer in the dtype that the group wants."""
    dtype = momentum_dtype(param.dtype, param.shape, option)
    if dtype == torch.int8:
        codes, scales = encode_blocks(buffer.float(), None)
        return {"momentum_buffer": codes, "momentum_scale": scales}
    return {"momentum_buffer": buffer.detach().to(dtype, copy=True)}
