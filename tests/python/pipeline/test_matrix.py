# SPDX-License-Identifier: Apache-2.0
"""All kinds of schedules in all small sizes against one process, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import pipeline_ranks_matrix as matrix
from helpers.pipeline_ranks_matrix import CHUNKS, Case
from helpers.pool import Pools

KINDS = [*CHUNKS, "forward"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["none", *KINDS])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_schedule_has_the_bits_of_one_process(
    pools: Pools, ranks: int, kind: str
) -> None:
    if kind == "none" and ranks > 1:
        pytest.skip("kind none is for one rank")
    todo = list(matrix.cases(ranks, kind))
    assert len(todo) >= 2
    # Only so long that a machine with other work to do is not taken for a hang.
    answers = pools(ranks).run(matrix.check, todo, timeout=600.0)
    assert answers == [[]] * ranks


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_schedule_of_every_kind_has_the_bits_of_one_process(
    pools: Pools, ranks: int
) -> None:
    # A cut through the whole that comes by every kind, m and v.
    todo = [
        list(matrix.cases(ranks, kind))[(5 * ranks + 7 * k) % 2 :: 13]
        for k, kind in enumerate(KINDS)
    ]
    answers = pools(ranks).run(matrix.check, [case for own in todo for case in own])
    assert answers == [[]] * ranks


# --- row 6 of section 12: dropout, one model, all kinds and placements ---------


def _agree(pools: Pools, stages: int, todo: dict[int, list[Case]]) -> None:
    """Compare the bits of all runs with those of one rank."""
    m = next(iter(todo.values()))[0].microbatches
    wanted = pools(1).run(matrix.dropped, [Case("none", m, 1)], stages)[0][0]
    assert len(wanted) == 2 + 2 * stages
    for ranks, cases in todo.items():
        answers = pools(ranks).run(matrix.dropped, cases, stages, timeout=600.0)
        for number, case in enumerate(cases):
            merged: dict[Any, Any] = {}
            for answer in answers:
                merged.update(answer[number])
            assert merged == wanted, (ranks, case)


def _with_stages(stages: int, m: int) -> dict[int, list[Case]]:
    """Give the schedules of p in {1, 2, 4} and v in {1, 2} with so many stages."""
    todo: dict[int, list[Case]] = {}
    for ranks in (1, 2, 4):
        for kind, chunks in CHUNKS.items():
            for v in (1, 2):
                fits = kind != "dualpipe_v" or m >= 2 * ranks
                if v in chunks and ranks * v == stages and fits:
                    todo.setdefault(ranks, []).append(Case(kind, m, v))
    return todo


@pytest.mark.slow
@pytest.mark.parametrize("m", [3, 8])
@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_dropout_draws_the_same_for_all_kinds_and_placements(
    pools: Pools, stages: int, m: int
) -> None:
    _agree(pools, stages, _with_stages(stages, m))


def test_dropout_draws_the_same_for_some_kinds_and_placements(pools: Pools) -> None:
    todo = {
        1: [Case("interleaved", 4, 2)],
        2: [Case("1f1b", 4, 1), Case("zb_h2", 4, 1)],
    }
    _agree(pools, 2, todo)
