# SPDX-License-Identifier: Apache-2.0
"""Checks of SM3 on several ranks: many of them in one launch.

A check is a module-level function ``check(rank, folder)`` that all ranks run; it fails
by raising. Modules of checks list them by the number of ranks that they want.
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.processes import run_ranks

Check = Callable[[int, str], None]

MODULES = (
    "helpers.sm3_dtensor_checks",
    "helpers.sm3_mesh_checks",
    "helpers.sm3_dcp_checks",
    "helpers.sm3_engine_checks",
    "helpers.sm3_backward_checks",
    "helpers.sm3_last_checks",
)


def checks_of(ranks: int) -> dict[str, Check]:
    """Return all checks for a number of ranks, by name."""
    found: dict[str, Check] = {}
    for name in MODULES:
        for check in importlib.import_module(name).CHECKS[ranks]:
            assert check.__name__ not in found, "names are unique"
            found[check.__name__] = check
    return found


def _run_all(rank: int, world: int, folder: str) -> dict[str, str]:
    """Run all checks and return what went wrong, by name."""
    outcome: dict[str, str] = {}
    for name, check in checks_of(world).items():
        torch.manual_seed(0)
        try:
            check(rank, folder)
            outcome[name] = ""
        except (Exception, pytest.fail.Exception):
            outcome[name] = f"rank {rank}: {traceback.format_exc()}"
        _meet(name, world)
    return outcome


def _meet(name: str, world: int) -> None:
    """Wait for all ranks, without Gloo: one that failed would talk of other things."""
    store = dist.distributed_c10d._get_default_store()
    if store.add(f"{name}/count", 1) == world:
        store.set(f"{name}/all", "here")
    store.wait([f"{name}/all"], timedelta(seconds=60))


def outcomes(ranks: int, folder: str) -> dict[str, str]:
    """Launch the checks for a number of ranks; return errors of all ranks by name."""
    results: list[dict[str, Any]] = run_ranks(
        ranks, _run_all, folder, group_timeout=20.0, timeout=300.0
    )
    return {name: "\n".join(one[name] for one in results) for name in results[0]}


def assert_fine(outcome: dict[str, str], name: str) -> None:
    """Fail with what went wrong in a check."""
    assert not outcome[name].strip(), outcome[name]
