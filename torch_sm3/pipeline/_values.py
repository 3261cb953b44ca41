# SPDX-License-Identifier: Apache-2.0
"""Values between stages: a text for their structure and a list of tensors.

The text is one letter per item: ``t`` the next tensor, ``N`` None, ``T`` and ``F``
booleans, ``i3;`` an integer, ``f0x1.8p+0;`` a float, ``s2:ab`` a string after its
length in bytes, ``(`` … ``)`` a tuple, ``[`` … ``]`` a list, ``{`` … ``}`` a dict as
keys and values in turn. It rides in the header of a message.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_BRACKETS: dict[type, tuple[str, str]] = {tuple: ("(", ")"), list: ("[", "]")}


def pack(value: Any, owner: str) -> tuple[str, list[torch.Tensor]]:
    """Take a value apart.

    Args:
        value: tensors, None, bool, int, float, str and tuples, lists and dicts of
            them, the dicts with str keys.
        owner: whose value it is, for the error, for example ``stage 0``.

    Returns:
        The structure's text and the tensors, in order.

    Raises:
        TypeError: naming the owner, the path in the structure and the type of what
            cannot travel.
    """
    tensors: list[torch.Tensor] = []
    return _walk(value, "output", owner, tensors), tensors


# No closure: one that calls itself would keep the tensors until a collection.
def _walk(item: Any, path: str, owner: str, tensors: list[torch.Tensor]) -> str:
    kind = type(item)
    if isinstance(item, torch.Tensor):
        # Whether a tensor of CUDA can reach its stage, the links know.
        if item.layout != torch.strided or item.device.type not in ("cpu", "cuda"):
            _refuse(f"a {item.layout} tensor on {item.device}", path, owner)
        if item.is_nested or item.is_quantized:
            form = "nested" if item.is_nested else "quantized"
            _refuse(f"a {form} tensor on {item.device}", path, owner)
        if kind is not torch.Tensor and is_traceable_wrapper_subclass(item):
            # It holds other tensors and no elements of its own.
            _refuse(kind.__name__, path, owner)
        tensors.append(item)
        return "t"
    if kind in _BRACKETS:
        left, right = _BRACKETS[kind]
        items = enumerate(item)
        inner = (_walk(x, f"{path}[{i}]", owner, tensors) for i, x in items)
        return left + "".join(inner) + right
    if kind is dict:
        for key in item:
            if type(key) is not str:
                _refuse(f"a key of type {type(key).__name__}", path, owner)
        inner = (
            _scalar(k) + _walk(x, f"{path}[{k!r}]", owner, tensors)
            for k, x in item.items()
        )
        return "{" + "".join(inner) + "}"
    if item is None or kind in (bool, int, float, str):
        return _scalar(item)
    return _refuse(kind.__name__, path, owner)


def _refuse(what: str, path: str, owner: str) -> str:
    raise TypeError(
        f"PipelineRunner: expected {owner} to return dense CPU or CUDA tensors, "
        "None, bool, int, float, str or tuples, lists and dicts of them, but got "
        f"{what} at {path}"
    )


def _scalar(item: Any) -> str:
    if item is None:
        return "N"
    if item is True or item is False:
        return "T" if item else "F"
    if isinstance(item, int):
        return f"i{item};"
    if isinstance(item, float):
        return f"f{item.hex()};"
    text = str(item)
    # What is no valid Unicode (a surrogate in an error's message) becomes '?'.
    data = text.encode("utf-8", "replace")
    return f"s{len(data)}:{data.decode()}"


def unpack(structure: str, tensors: list[torch.Tensor]) -> Any:
    """Put a value together again; the inverse of :func:`pack`.

    Args:
        structure: the structure's text.
        tensors: as many tensors as it names.

    Raises:
        ValueError: if the two do not fit.
    """
    if structure == "t" and len(tensors) == 1:
        return tensors[0]
    data = structure.encode()
    position = 0
    rest = iter(tensors)

    def until(mark: bytes) -> str:
        nonlocal position
        end = data.index(mark, position)
        piece = data[position:end].decode()
        position = end + 1
        return piece

    def items(close: bytes) -> list[Any]:
        nonlocal position
        found = []
        while data[position : position + 1] != close:
            found.append(read())
        position += 1
        return found

    def read() -> Any:
        nonlocal position
        mark = data[position : position + 1]
        position += 1
        if mark == b"t":
            return next(rest)
        if mark == b"(":
            return tuple(items(b")"))
        if mark == b"[":
            return items(b"]")
        if mark == b"{":
            flat = items(b"}")
            return dict(zip(flat[::2], flat[1::2], strict=True))
        if mark in _CONSTANTS:
            return _CONSTANTS[mark]
        if mark == b"i":
            return int(until(b";"))
        if mark == b"f":
            return float.fromhex(until(b";"))
        if mark == b"s":
            size = int(until(b":"))
            piece = data[position : position + size].decode()
            position += size
            return piece
        raise ValueError(f"structure: expected an item, but got {structure!r}")

    try:
        value = read()
        fits = position == len(data) and next(rest, None) is None
    except (StopIteration, IndexError):
        fits = False
    if not fits:
        raise ValueError(f"structure: expected whole items, but got {structure!r}")
    return value


_CONSTANTS = {b"N": None, b"T": True, b"F": False}


def map_tensors(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """Apply a function to the tensors in nested tuples, lists and dicts.

    Args:
        value: any value; what is no tensor stays as it is.
        function: what to do with a tensor.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(x, function) for x in value))
    if type(value) in (tuple, list):
        return type(value)(map_tensors(x, function) for x in value)
    if type(value) is dict:
        return {k: map_tensors(x, function) for k, x in value.items()}
    return value
