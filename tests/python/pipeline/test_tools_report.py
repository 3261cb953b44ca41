# SPDX-License-Identifier: Apache-2.0
"""Reports: busy, bubble, waiting and peak of every rank, and what to do about them."""

from __future__ import annotations

import json

import pytest
from helpers.pipeline_traces import synthetic

from torch_sm3.pipeline import Costs, plan, simulate
from torch_sm3.pipeline.report import report

EVEN = Costs(0.010, 0.012, 0.008)


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "zb_h1"])
def test_figures_of_a_step_that_went_as_planned(kind: str) -> None:
    p, m = 3, 6
    schedule = plan(kind, p, m)
    said = report(synthetic(schedule, EVEN))
    ran = simulate(schedule, EVEN)
    assert said.kind == kind
    assert said.makespan == pytest.approx(ran.makespan, abs=1e-8)
    assert said.predicted_makespan == pytest.approx(ran.makespan, abs=1e-7)
    for rank in range(p):
        got = said.measured[rank]
        assert got.busy == pytest.approx(m * 0.030, abs=1e-7)
        assert got.bubble == pytest.approx(ran.makespan - m * 0.030, abs=1e-7)
        # A synthetic rank is idle only inside actions, and before and after all.
        assert 0 <= got.waiting <= got.bubble + 1e-9
        assert said.predicted[rank].busy == pytest.approx(got.busy, abs=1e-7)
        assert said.predicted[rank].bubble == pytest.approx(got.bubble, abs=1e-6)
    last = simulate(schedule, EVEN).timeline()[0]
    assert said.measured[0].waiting == pytest.approx(last[-1][1] - m * 0.030, abs=1e-7)


def test_peaks_are_those_of_the_stamps() -> None:
    said = report(synthetic(plan("1f1b", 3, 6), EVEN))
    # min(p - r, m) microbatches of 100 bytes, plus what the stamps see between.
    assert [x.peak_bytes for x in said.measured] == [300, 200, 100]


def test_stages_of_equal_work_get_no_hint() -> None:
    said = report(synthetic(plan("1f1b", 2, 32), EVEN))
    assert said.hints == []
    assert said.stage_seconds == pytest.approx([0.030, 0.030], abs=1e-7)


def test_the_largest_stage_is_named_with_what_an_even_cut_saves() -> None:
    costs = Costs([0.01, 0.03, 0.01], [0.01, 0.03, 0.01], [0.01, 0.03, 0.01])
    said = report(synthetic(plan("1f1b", 3, 16), costs))
    assert said.largest_stage == 1
    assert "rank 1 has 1.80 times the work of the mean rank" in said.hints[0]
    assert "stage 1 is the largest" in said.hints[0]
    # Rank 1 alone takes 16 x 90 ms; evenly cut it would take 16 x 50 ms.
    assert 16 * 0.09 < said.makespan < 16 * 0.09 + 2 * 0.09
    share = round(100 * 16 * 0.04 / said.makespan)
    assert f"up to {share} % of the step" in said.hints[0]


def test_two_chunks_that_even_out_get_no_hint() -> None:
    costs = Costs([0.01, 0.03, 0.03, 0.01], 0.01, 0.01)
    said = report(synthetic(plan("interleaved", 2, 16, chunks=2), costs))
    assert not [hint for hint in said.hints if "even cut" in hint]


def test_long_waits_are_said() -> None:
    said = report(synthetic(plan("1f1b", 4, 2), EVEN))
    assert any("for messages; more microbatches" in hint for hint in said.hints)


def test_other_costs_predict() -> None:
    schedule = plan("1f1b", 2, 4)
    said = report(synthetic(schedule, EVEN), Costs(0.020, 0.024, 0.016))
    assert said.predicted_makespan == pytest.approx(2 * said.makespan, rel=1e-6)


def test_the_table_shows_both_sides_of_every_rank() -> None:
    said = report(synthetic(plan("1f1b", 2, 4), EVEN))
    lines = str(said).splitlines()
    assert lines[0] == "1f1b: 150.00 ms measured, 150.00 ms predicted"
    assert lines[3].split()[:7] == [
        "0", "120.00", "120.00", "30.00", "30.00", "30.00", "30.00",
    ]  # fmt: skip
    assert lines[4].split()[:5] == ["1", "120.00", "120.00", "30.00", "30.00"]
    assert "largest stage: 0, 30.00 ms" in lines
    again = json.loads(json.dumps(said.to_dict()))
    assert again["measured"][1]["busy"] == said.measured[1].busy
    assert again["makespan"] == said.makespan
