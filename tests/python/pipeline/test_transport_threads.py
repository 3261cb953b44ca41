# SPDX-License-Identifier: Apache-2.0
"""Threads behind a pipeline's messages leave the core to whoever computes."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import torch.distributed as dist
from helpers.scenarios import Scenarios

from torch_sm3.pipeline._links import new_group

two_ranks = Scenarios(2)


def threads() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/task")}


def policies_of_a_group() -> tuple[int, list[int], int]:
    """Return the policy of this thread, those of a group's threads and ours again."""
    before, policy = threads(), os.sched_getscheduler(0)
    group = new_group(None, 20.0)
    started = [os.sched_getscheduler(thread) for thread in threads() - before]
    answer = policy, started, os.sched_getscheduler(0)
    dist.barrier(group)
    dist.destroy_process_group(group)
    return answer


@two_ranks
def ordinary(rank: int, ranks: int) -> Any:
    return policies_of_a_group()


@two_ranks
def of_a_thread_with_a_policy(rank: int, ranks: int) -> Any:
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    answer = policies_of_a_group()
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    return answer


@two_ranks
def where_policies_may_not_be_set(rank: int, ranks: int) -> Any:
    with mock.patch("os.sched_setscheduler", side_effect=PermissionError):
        return policies_of_a_group()


def test_threads_of_a_group_do_not_preempt_others() -> None:
    for before, started, after in two_ranks.answers(ordinary):
        assert (before, after) == (os.SCHED_OTHER, os.SCHED_OTHER)
        assert started
        assert set(started) == {os.SCHED_BATCH}


def test_a_policy_of_its_own_is_left_to_a_thread() -> None:
    for before, _, after in two_ranks.answers(of_a_thread_with_a_policy):
        assert (before, after) == (os.SCHED_BATCH, os.SCHED_BATCH)


def test_a_group_is_made_where_policies_may_not_be_set() -> None:
    for before, started, after in two_ranks.answers(where_policies_may_not_be_set):
        assert {before, *started, after} == {os.SCHED_OTHER}
