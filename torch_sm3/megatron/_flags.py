# SPDX-License-Identifier: Apache-2.0
"""Flags of SM3 on Megatron's command line."""

from __future__ import annotations

import argparse
import functools
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from torch_sm3.optim import SM3

# Megatron has flags of its own for these, or decides them.
_NOT_HERE = {"params", "lr", "weight_decay", "foreach", "fused", "differentiable"}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}


def replacements(
    module: ModuleType,
) -> Iterator[tuple[Callable[..., Any], Callable[..., Any]]]:
    """Yield functions that add Megatron's flags, and what also adds those of SM3.

    Args:
        module: Megatron's of arguments.
    """
    for name, function in list(vars(module).items()):
        if name.startswith("_add_") and name.endswith("_args") and callable(function):
            yield function, _with_flags(function, name == "_add_training_args")


def options_of(args: Any) -> dict[str, Any]:
    """Return the arguments of SM3 that were given on the command line.

    Args:
        args: Megatron's arguments or configuration, which may know nothing of them.
    """
    given = {name: getattr(args, f"sm3_{name}", None) for name, _ in _arguments()}
    return {name: value for name, value in given.items() if value is not None}


def _with_flags(function: Callable[..., Any], own: bool) -> Callable[..., Any]:
    @functools.wraps(function)
    def add(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        result = function(parser, *args, **kwargs)
        known = parser._option_string_actions
        if own:
            if "--optimizer" not in known:
                # v2.0 has only one.
                parser.add_argument("--optimizer", default="adam", choices=["adam"])
            _add(parser)
        choice = known.get("--optimizer")
        if choice is not None and "sm3" not in (choice.choices or ["sm3"]):
            choice.choices = [*(choice.choices or ()), "sm3"]
        return result

    return add


def _add(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(title="SM3")
    for name, default in _arguments():
        flag = "--sm3-" + name.replace("_", "-")
        if default is False:
            group.add_argument(flag, action="store_true", default=None)
        elif name.endswith("dtype"):
            group.add_argument(flag, type=_dtype, metavar=f"{{{','.join(_DTYPES)}}}")
        elif isinstance(default, str) or name == "compat":
            group.add_argument(flag)
        else:
            group.add_argument(flag, type=int if isinstance(default, int) else float)


def _arguments() -> Iterator[tuple[str, Any]]:
    for parameter in inspect.signature(SM3).parameters.values():
        if parameter.name not in _NOT_HERE:
            yield parameter.name, parameter.default


def _dtype(text: str) -> torch.dtype:
    if text not in _DTYPES:
        raise argparse.ArgumentTypeError(f"one of {', '.join(_DTYPES)}")
    return _DTYPES[text]
