# SPDX-License-Identifier: Apache-2.0
"""Failures of several ranks, of replicas, of silent ranks, and what they leave."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import pipeline_ranks_losses as ranks_losses
from helpers.pool import Pool, Pools


@pytest.mark.parametrize("who", [[0, 1, 2], [1, 2], [0, 2]])
def test_the_least_of_several_failures_is_reported(
    pools: Pools, who: list[int]
) -> None:
    answers = pools(3).run(ranks_losses.all_at_once, who)
    first, *rest = who
    text = "ArithmeticError: no room for stage"
    wanted = (first, first, 0, f"{first}UNSHARD", "ArithmeticError")
    others = tuple(f"rank {r} at {r}UNSHARD: {text} {r}" for r in rest)
    for rank, (found, listed, own, sound) in enumerate(answers):
        assert found == (*wanted, f"no room for stage {first}")
        assert listed == others
        assert own == (rank == first) and sound


def test_a_hook_that_raises_on_one_replica_ends_the_step_of_all(pools: Pools) -> None:
    wanted = [
        (1, 1, 0, "1REDUCE_GRAD", "LookupError", 1),
        ("RuntimeError", True),
        True,
    ]
    assert pools(4).run(ranks_losses.hook_of_one_replica) == [wanted] * 4


def test_an_error_can_be_pickled(pools: Pools) -> None:
    assert pools(2).run(ranks_losses.pickled) == [True] * 2


@pytest.mark.parametrize(
    "state",
    [
        "used",
        "sending",
        pytest.param("new", marks=pytest.mark.slow),
        pytest.param("failed", marks=pytest.mark.slow),
        pytest.param("cycle", marks=pytest.mark.slow),
    ],
)
def test_a_leaked_runner_does_not_hold_the_interpreter_up(state: str) -> None:
    # "spawn": these processes end as any other Python does.
    pool = Pool(2, "spawn")
    try:
        pool.run(ranks_losses.leak, state)
        assert pool.leave() == [0, 0]
    finally:
        pool.close()


@pytest.mark.parametrize(
    "victim",
    [
        1,
        3,
        pytest.param(0, marks=pytest.mark.slow),
        pytest.param(2, marks=pytest.mark.slow),
    ],
)
def test_all_ranks_name_one_failure_when_one_is_silent(
    pools: Pools, tmp_path: Path, victim: int
) -> None:
    answers = pools(4).run(ranks_losses.silent, victim, str(tmp_path))
    found = {answer[0] for answer in answers}
    assert len(found) == 1, answers
    rank, _, _, _, kind, message = found.pop()
    assert kind == "TimeoutError"
    if victim == 3:
        # The rank of the last stage would have decided.
        assert (rank, message) == (3, "rank 3 did not answer in time")
    else:
        assert message.startswith(f"rank {rank} waited 3 s for rank {victim}")
    assert all(again and sound for _, again, sound in answers)


@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_that_fail_leave_nothing(pools: Pools, ranks: int) -> None:
    assert pools(ranks).run(ranks_losses.fifty_failures) == [[]] * ranks
