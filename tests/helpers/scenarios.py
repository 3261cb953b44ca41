# SPDX-License-Identifier: Apache-2.0
"""Run many functions on one set of Gloo ranks: starting processes takes longest."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from helpers.processes import run_ranks

Scenario = Callable[[int, int], Any]


def _run_all(rank: int, world_size: int, functions: list[Scenario]) -> list[Any]:
    answers = []
    for function in functions:
        try:
            answers.append((True, function(rank, world_size)))
        except Exception:
            answers.append((False, traceback.format_exc()))
        dist.barrier()
    return answers


class Scenarios:
    """Collect functions with ``@scenarios`` and run them all at the first question.

    A function ``(rank, world_size)`` stands at the top of a module and leaves the
    default process group as it was.

    Args:
        ranks: number of processes.
        timeout: seconds for all functions together.
    """

    def __init__(self, ranks: int, timeout: float = 240.0) -> None:
        self.ranks = ranks
        self.timeout = timeout
        self.functions: list[Scenario] = []
        self._answers: list[list[Any]] | Exception | None = None

    def __call__(self, function: Scenario) -> Scenario:
        """Add a function."""
        self.functions.append(function)
        return function

    def answers(self, function: Scenario) -> list[Any]:
        """Return what a function returned on each rank.

        Args:
            function: one that was added.

        Raises:
            AssertionError: with the traceback, if it failed on any rank.
        """
        if self._answers is None:
            try:
                self._answers = run_ranks(
                    self.ranks, _run_all, self.functions, timeout=self.timeout
                )
            except AssertionError as error:
                self._answers = error
        if isinstance(self._answers, Exception):
            raise self._answers
        index = self.functions.index(function)
        results = [answer[index] for answer in self._answers]
        failed = [
            f"rank {rank}: {value}"
            for rank, (good, value) in enumerate(results)
            if not good
        ]
        assert not failed, "\n".join(failed)
        return [value for _, value in results]
