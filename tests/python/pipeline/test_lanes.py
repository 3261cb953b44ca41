# SPDX-License-Identifier: Apache-2.0
"""Links for tensors of a device: one communicator per direction, opened up front."""

from __future__ import annotations

import pytest
import torch
from helpers import pipeline_ranks_lanes as ranks_lanes
from helpers.pool import Pools
from torch import nn

from torch_sm3.pipeline import plan
from torch_sm3.pipeline._lanes import device_of, directed_links

SCHEDULES = [
    ("interleaved", 4, 8, 2),
    ("interleaved", 2, 4, 2),
    ("zbv", 4, 8, None),
    ("dualpipe_v", 2, 5, None),
    ("zb_h1", 2, 3, None),
]


def test_every_pair_of_ranks_with_messages_has_a_link_each_way() -> None:
    assert directed_links([0], []) == []
    assert directed_links([0, 0, 0], []) == []
    assert directed_links([0, 1, 0, 1], []) == [(0, 1), (1, 0)]
    ring = directed_links([0, 1, 2, 3, 0, 1, 2, 3], [])
    assert ring == [(0, 1), (0, 3), (1, 0), (1, 2), (2, 1), (2, 3), (3, 0), (3, 2)]
    # The two middle stages of a V are on one rank.
    assert directed_links([0, 1, 1, 0], []) == [(0, 1), (1, 0)]
    assert directed_links([0, 1, 2], [(0, 2)])[1:4] == [(0, 2), (1, 0), (1, 2)]


def test_a_rank_with_weights_on_the_cpu_has_no_lanes() -> None:
    assert device_of([nn.Linear(2, 2)]) == torch.device("cpu")
    here = "cuda" if torch.cuda.is_available() else "cpu"
    assert device_of([nn.Tanh()]).type == here


@pytest.mark.parametrize(("kind", "ranks", "m", "chunks"), SCHEDULES)
def test_pipeline_row_18_lanes_are_opened_up_front(
    pools: Pools, kind: str, ranks: int, m: int, chunks: int | None
) -> None:
    schedule = plan(kind, ranks, m, chunks=chunks)
    answers = pools(ranks).run(ranks_lanes.trained, schedule.text)
    links = directed_links(schedule.placement, [])
    for rank, (wrong, opened) in enumerate(answers):
        assert wrong == []
        # In the one order of all ranks, whatever the schedule uses first.
        assert opened == [link for link in links if rank in link]


def test_routes_take_lanes_and_ties_do_not(pools: Pools) -> None:
    by_lane = pools(3).run(ranks_lanes.routed_and_tied, True)
    by_frame = pools(3).run(ranks_lanes.routed_and_tied, False)
    for mine, others in zip(by_lane, by_frame, strict=True):
        assert len(mine) == 2
        assert all(map(torch.equal, mine, others))


def test_a_failed_step_leaves_the_lanes_in_order(pools: Pools) -> None:
    assert pools(2).run(ranks_lanes.recovered) == [[], []]


def test_lanes_at_one_end_are_an_error_of_all(pools: Pools) -> None:
    for told in pools(2).run(ranks_lanes.lanes_at_one_end):
        assert told.startswith("ProtocolError: rank 1 expected activation"), told
        assert told.endswith("header: expected tensors on the CPU"), told


def test_a_device_without_lanes_is_refused(pools: Pools) -> None:
    for told in pools(2).run(ranks_lanes.device_without_lanes):
        assert "whose group is of NCCL, but got" in told, told
        assert told.endswith("on cuda:0 (argument 'tensors')"), told


def test_a_group_of_gloo_opens_no_lanes(pools: Pools) -> None:
    assert pools(2).run(ranks_lanes.no_lanes_for_gloo) == [True, True]


@pytest.mark.parametrize(("kind", "ranks", "m", "chunks"), SCHEDULES)
def test_tensors_stay_on_their_devices(
    pools: Pools, kind: str, ranks: int, m: int, chunks: int | None
) -> None:
    if torch.cuda.device_count() < ranks or not torch.distributed.is_nccl_available():
        pytest.skip(f"needs NCCL and {ranks} GPUs")
    text = plan(kind, ranks, m, chunks=chunks).text
    for good in pools(ranks).run(ranks_lanes.on_cuda, text):
        assert all(good), good
