# SPDX-License-Identifier: Apache-2.0
"""Data parallel training of a sequence equals that of the plain run."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.processes import run_ranks
from helpers.reversible_ranks import (
    DDP_CASES,
    FSDP_CASES,
    all_ddp,
    all_fsdp,
)


@pytest.fixture(scope="module")
def replicated():
    return run_ranks(2, all_ddp, timeout=400)


@pytest.fixture(scope="module")
def sharded():
    return run_ranks(2, all_fsdp, timeout=400)


def assert_equal(left, right, tolerance):
    for got, want in zip(left, right, strict=True):
        assert (got is None) == (want is None)
        if want is not None:
            np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("engine_name", ["node", "graph"])
@pytest.mark.parametrize("case", DDP_CASES, ids=str)
def test_reversible_row_07_ddp(replicated, case, engine_name):
    mode, _, drop = case
    answers = [rank[case] for rank in replicated]
    for answer in answers:
        got, want = answer[engine_name], answer["plain"]
        assert got.keys() == want.keys()
        if "error" in want:
            # Plain DDP refuses the unused parameters of the dropped output too.
            assert drop and mode in ("default", "view")
            assert got["error"] == want["error"]
            continue
        assert_equal(got["grads"], want["grads"], 1e-9)
        buckets = [event for event in got["events"] if event != "again"]
        assert buckets == [event for event in want["events"] if event != "again"]
        assert len(buckets) == len(set(buckets)) > 1
    if "grads" in answers[0][engine_name]:
        assert_equal(*(answer[engine_name]["grads"] for answer in answers), 0)


@pytest.mark.parametrize("engine_name", ["node", "graph"])
def test_buckets_are_reduced_while_blocks_are_recomputed(replicated, engine_name):
    events = replicated[0]["default", False, False][engine_name]["events"]
    last = len(events) - 1 - events[::-1].index("again")
    assert any(event != "again" for event in events[:last])


@pytest.mark.parametrize("engine_name", ["node", "graph"])
def test_no_sync_accumulates(replicated, engine_name):
    for rank in replicated:
        assert_equal(rank["no_sync"][engine_name], rank["no_sync"]["plain"], 1e-9)


@pytest.mark.parametrize("case", FSDP_CASES, ids=str)
def test_reversible_row_18_sharded_in_mixed_precision(sharded, case):
    """Bit for bit: streams are exact, and F's graph is the plain one's."""
    for rank in sharded:
        got, want = rank[case]["auto"], rank[case]["plain"]
        assert_equal(got["grads"], want["grads"], 0)
        assert (got["generator"] == want["generator"]).all()


@pytest.mark.parametrize("case", FSDP_CASES, ids=str)
def test_reversible_row_25_hooks_of_shards_fire_once(sharded, case):
    for rank in sharded:
        for run in ("plain", "auto"):
            assert set(rank[case][run]["fired"]) == {1}


@pytest.mark.parametrize("units", ["functions", "blocks"])
def test_reversible_row_07_sharded_blocks_get_the_graph_engine(sharded, units):
    assert sharded[0][units, "none"]["auto"]["node"] != "HalfNodeBackward"


def test_side_context_of_sharded_blocks(sharded):
    for rank in sharded:
        assert_equal(rank["side"]["auto"], rank["side"]["plain"], 0)


def test_the_node_engine_refuses_shards(sharded):
    for rank in sharded:
        assert "block 0" in rank["node"] and "engine='graph'" in rank["node"]
