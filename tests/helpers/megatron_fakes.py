# SPDX-License-Identifier: Apache-2.0
"""Packages with the signatures of a generation of Megatron, and nothing behind them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from torch_sm3.megatron._signatures import GENERATIONS, SIGNATURES

SCHEDULES = list(SIGNATURES)[:7]
TASKS = ("finetune", "_train")


def row_of(name: str, generation: str) -> str | None:
    """Return a function's arguments in a generation, None if it is not there."""
    place = GENERATIONS.index(generation)
    known = [
        row
        for since, row in SIGNATURES[name].items()
        if GENERATIONS.index(since) <= place
    ]
    return known[-1]


def function_of(name: str, row: str) -> Callable[..., Any]:
    """Return a function with the arguments of a row of the table."""
    arguments = ", ".join(
        token.replace("=", "=None") if token.endswith("=") else token
        for token in row.split()
    )
    space: dict[str, Any] = {}
    exec(f"def {name}({arguments}):\n    return {name!r}", space)
    return space[name]


def homes(generation: str) -> dict[str, str]:
    """Return the modules of a generation by what they hold."""
    core = GENERATIONS.index(generation) >= GENERATIONS.index("23.04")
    late = GENERATIONS.index(generation) >= GENERATIONS.index("0.6")
    schedules = "core.pipeline_parallel.schedules" if core else "schedules"
    return {
        "schedules": "training" if generation == "A" else schedules,
        "training": "training.training" if late else "training",
        "optimizer": "core.optimizer" if late else "optimizer",
        "state": "core.parallel_state" if core else "mpu",
    }


@contextmanager
def package(
    generation: str, changed: dict[str, str] | None = None, name: str = "fake_megatron"
) -> Iterator[ModuleType]:
    """Import a package of a generation for the length of a block.

    Args:
        generation: the generation.
        changed: other arguments of some functions.
        name: of the package.
    """
    places = homes(generation)
    modules: dict[str, ModuleType] = {name: _module(name)}
    for place in places.values():
        parts = place.split(".")
        for end in range(1, len(parts) + 1):
            full = ".".join([name, *parts[:end]])
            if full not in modules:
                modules[full] = _module(full)
                setattr(modules[full.rpartition(".")[0]], parts[end - 1], modules[full])
    for function, rows in SIGNATURES.items():
        row = (changed or {}).get(function, row_of(function, generation))
        if row is None or function in TASKS or not rows:
            continue
        role = "schedules" if function in SCHEDULES else "training"
        role = "optimizer" if function == "get_megatron_optimizer" else role
        home = modules[f"{name}.{places[role]}"]
        setattr(home, function, function_of(function, row))
    # Megatron imports by name.
    training = modules[f"{name}.{places['training']}"]
    optimizer = modules[f"{name}.{places['optimizer']}"]
    training.get_megatron_optimizer = optimizer.get_megatron_optimizer
    sys.modules.update(modules)
    try:
        yield modules[name]
    finally:
        for full in modules:
            del sys.modules[full]


def _module(name: str) -> ModuleType:
    # A package, so that modules below it are looked for.
    spec = ModuleSpec(name, None, is_package=True)
    module = ModuleType(name)
    module.__path__, module.__spec__ = [], spec
    return module
