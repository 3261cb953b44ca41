# SPDX-License-Identifier: Apache-2.0
"""Gantt charts: the right boxes at the right places, in SVG and in PNG."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

import pytest
from helpers.pipeline_charts import SVG_NAME, elements, place
from helpers.pipeline_traces import synthetic

from torch_sm3.pipeline import Costs, Schedule, plan, plot, simulate, verify
from torch_sm3.pipeline._boxes import Box, Lane, phases
from torch_sm3.pipeline._canvas import Color, is_dark
from torch_sm3.pipeline._gantt import COLORS, ticks, tone
from torch_sm3.pipeline._memory import levels_of, thinned
from torch_sm3.pipeline._picture import merged

KINDS = [
    ("gpipe", 3, 5, None),
    ("1f1b", 4, 8, None),
    ("interleaved", 2, 4, 2),
    ("zb_h1", 3, 6, None),
    ("zbv", 2, 4, None),
    ("v_half", 4, 8, None),
    ("forward", 3, 4, 2),
]


@pytest.mark.parametrize(("kind", "ranks", "m", "chunks"), KINDS)
def test_every_action_that_takes_time_is_one_box(
    kind: str, ranks: int, m: int, chunks: int | None
) -> None:
    schedule = plan(kind, ranks, m, chunks=chunks)
    wanted = Counter(
        action.op for rank in range(ranks) for action in schedule.actions(rank)
    )
    svg = plot(schedule).svg()
    got = Counter(box.get("class", "").split()[1] for box in elements(svg, "box"))
    assert got == wanted
    assert len(elements(svg, "lane")) == ranks


@pytest.mark.parametrize(("kind", "ranks", "m", "chunks"), KINDS)
def test_boxes_stand_where_the_simulation_says(
    kind: str, ranks: int, m: int, chunks: int | None
) -> None:
    schedule = plan(kind, ranks, m, chunks=chunks)
    costs = Costs(1.0, 2.0, 0.5, latency=0.25)
    ran = simulate(schedule, costs)
    svg = plot(schedule, costs=costs, width=1000).svg()
    lanes = [place(x) for x in elements(svg, "lane")]
    left, _, wide, _ = lanes[0]
    found = {}
    for box in elements(svg, "box"):
        hint = box.find(f"{SVG_NAME}title")
        assert hint is not None and hint.text is not None
        x, y, w, _h = place(box)
        lane = next(i for i, (_, top, _, high) in enumerate(lanes) if top == y)
        found[hint.text.split()[0]] = lane, x, x + w
    for rank in range(ranks):
        row = ran.schedule.actions(rank)
        for action, (start, end) in zip(row, ran.timeline()[rank], strict=True):
            if action.op in "FBIW":
                lane, x0, x1 = found.pop(action.text)
                assert lane == rank
                scale = wide / ran.makespan
                assert x0 == pytest.approx(left + start * scale, abs=0.02)
                # A hair line parts neighbours.
                assert x1 == pytest.approx(left + end * scale, abs=0.7)
    assert not found


def test_chunks_are_lighter_and_kinds_keep_their_colour() -> None:
    one = plot(plan("zb_h1", 2, 4)).svg()
    two = plot(plan("zbv", 2, 4)).svg()
    for kind in "FIW":
        (base,) = {x.get("fill") for x in elements(one, kind)}
        assert base == "#{:02x}{:02x}{:02x}".format(*COLORS[kind])
        assert base in {x.get("fill") for x in elements(two, kind)}
        assert len({x.get("fill") for x in elements(two, kind)}) == 2


def luminance(color: Color) -> float:
    parts = (c / 255 for c in color)
    a, b, c = (
        x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts
    )
    return 0.2126 * a + 0.7152 * b + 0.0722 * c


@pytest.mark.parametrize("kind", COLORS)
def test_numbers_can_be_read_on_every_colour(kind: str) -> None:
    for chunk in range(4):
        color = tone(kind, chunk, 4)
        ink = 255 if is_dark(color) else 0
        bright, dark = sorted([luminance((ink, ink, ink)), luminance(color)])[::-1]
        assert (bright + 0.05) / (dark + 0.05) >= 4.5


def test_colours_differ() -> None:
    for a, b in itertools.combinations("FBIW", 2):
        assert sum(abs(x - y) for x, y in zip(COLORS[a], COLORS[b], strict=True)) > 100


def test_messages_are_arrows_from_send_to_consumer() -> None:
    schedule = plan("1f1b", 3, 4)
    lines = [plot(schedule, messages=on).svg().count("<line") for on in (False, True)]
    # A shaft and two wings; 2 links, both ways, 4 microbatches.
    assert lines[1] - lines[0] == 3 * 2 * 2 * 4


def test_messages_that_skip_stages_are_arrows_too() -> None:
    routed = plan("1f1b", 3, 2).with_routes([(0, 2)])
    row = routed.lower().actions(0)
    assert {a.text for a in row if a.route} == {
        "0SEND_F0>2",
        "0SEND_F1>2",
        "0RECV_B0<2",
        "0RECV_B1<2",
    }
    shown = [plot(routed, messages=on).svg().count("<line") for on in (False, True)]
    assert shown[1] - shown[0] == 3 * (2 * 2 * 2 + 2 * 2)


def test_phases_of_1f1b() -> None:
    ran = simulate(plan("1f1b", 2, 3), Costs(1, 1, 1))
    row, spans = ran.schedule.actions(0), ran.timeline()[0]
    boxes = [
        Box(*span, action.op)
        for action, span in zip(row, spans, strict=True)
        if action.op in "FB"
    ]
    # F0 F1 (rank 1: F0 B0) B0 F2 B1 B2
    assert phases(boxes) == [(0, 4), (4, 7), (7, ran.makespan)]
    assert phases([box for box in boxes if box.kind == "F"]) == []


def test_a_pair_that_runs_as_one_shares_the_lane() -> None:
    schedule = plan("dualpipe_v", 2, 4)
    svg = plot(schedule, costs=Costs(1, 1, 1, pair=2.5)).svg()
    whole = place(elements(svg, "lane")[0])[3]
    heights = Counter(round(place(x)[3] / whole, 2) for x in elements(svg, "box"))
    pairs = sum(a.paired for rank in range(2) for a in schedule.actions(rank))
    assert pairs > 0
    assert heights[0.5] == 2 * pairs


def test_many_boxes_are_merged_and_keep_their_time(tmp_path: Path) -> None:
    schedule = plan("1f1b", 2, 1_500)
    chart = plot(schedule, tmp_path / "many.svg")
    rows = Counter(place(x)[1] for x in elements(chart.svg(), "lane"))
    assert len(rows) == 2
    assert len(elements(chart.svg(), "box")) <= 2 * 2_000
    assert (tmp_path / "many.svg").stat().st_size < 600_000

    spans = [Box(i, i + 0.75, "FB"[i % 2]) for i in range(5_000)]
    lane = merged(Lane("", spans, [], 0.0), 100, 5_000.0)
    assert lane.merged and len(lane.boxes) <= 100
    for kind in "FB":
        area = sum(
            (x.end - x.start) * (x.high - x.low) for x in lane.boxes if x.kind == kind
        )
        assert area == pytest.approx(2_500 * 0.75)
    few = Lane("", spans[:100], [], 0.0)
    assert merged(few, 100, 5_000.0) is few


def test_a_thousand_ranks_do_not_grow_without_bound() -> None:
    svg = plot(plan("1f1b", 300, 300)).svg()
    assert len(elements(svg, "box")) <= 60_000
    root = ET.fromstring(svg.encode())
    assert float(root.get("height", "inf")) < 2_500


# --- arguments -------------------------------------------------------------


def test_titles_are_escaped_and_shown() -> None:
    chart = plot(plan("gpipe", 2, 2), title="a < b & 'c'")
    root = ET.fromstring(chart.svg().encode())
    texts = [x.text for x in root.iter(f"{SVG_NAME}text")]
    assert "a < b & 'c'" in texts
    assert root.get("aria-label") == "a < b & 'c'"
    assert chart._repr_svg_() == chart.svg()


def test_default_title_tells_kind_sizes_and_makespan() -> None:
    svg = plot(plan("1f1b", 2, 4)).svg()
    assert ">1f1b · p = 2 · m = 4 · makespan 15<" in svg


def test_a_simulation_is_drawn_as_it_ran() -> None:
    schedule = plan("1f1b", 2, 3)
    costs = Costs(1.0, 1.0, 1.0, latency=0.5)
    assert plot(simulate(schedule, costs)).svg() == plot(schedule, costs=costs).svg()


def test_nothing_to_draw_is_drawn() -> None:
    empty = Schedule.parse(
        "schedule 1 kind=none ranks=1 stages=1 microbatches=1 placement=loop\n"
        "rank 0: 0F0 0B0\n"
    )
    svg = plot(empty, costs=Costs(0, 0, 0)).svg()
    assert not elements(svg, "box") and len(elements(svg, "lane")) == 1


@pytest.mark.parametrize("path", ["a.pdf", "a", "svg"])
def test_unknown_files_are_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(ValueError, match=r"plot: expected a file \.svg or \.png"):
        plot(plan("gpipe", 2, 2), tmp_path / path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("width", [0, 100, -1e9, 1e9, float("inf"), float("nan")])
def test_charts_too_narrow_or_too_wide_are_refused(width: float) -> None:
    with pytest.raises(ValueError, match="plot: expected from 300 to 20000 pixels, bu"):
        plot(plan("gpipe", 2, 2), width=width)


@pytest.mark.parametrize("end", [0.003, 0.9, 1.0, 7.0, 39.4, 1e6])
def test_ticks_are_round_and_few(end: float) -> None:
    marks = ticks(end, 10)
    assert marks[0] == 0 and 2 <= len(marks) <= 11 and marks[-1] <= end * (1 + 1e-9)
    digits = {f"{marks[1]:.0e}"[0]}
    assert digits <= {"1", "2", "5"}


# --- bubble and memory -----------------------------------------------------


@pytest.mark.parametrize(("kind", "ranks", "m", "chunks"), KINDS)
def test_what_is_hatched_is_the_bubble(
    kind: str, ranks: int, m: int, chunks: int | None
) -> None:
    ran = simulate(plan(kind, ranks, m, chunks=chunks), Costs(1, 2, 0.5, latency=0.25))
    svg = plot(ran).svg()
    lanes = [place(x) for x in elements(svg, "lane")]
    scale = lanes[0][2] / ran.makespan
    for rank, (_, top, _, high) in enumerate(lanes):
        hatched = [place(x) for x in elements(svg, "bubble") if place(x)[1] == top]
        assert {x[3] for x in hatched} <= {high}
        assert sum(x[2] for x in hatched) == pytest.approx(
            ran.idle[rank] * scale, abs=0.02 * len(hatched) + 0.01
        )
        share = 100 * ran.idle[rank] / ran.makespan
        assert svg.count(f">bubble {share:.1f} %<") >= 1


def test_a_merged_lane_is_hatched_below_its_boxes() -> None:
    svg = plot(plan("1f1b", 2, 1_500)).svg()
    lanes = [place(x) for x in elements(svg, "lane")]
    assert [place(x) for x in elements(svg, "bubble")] == lanes
    # Thousands of arrows would hide what they connect.
    assert plot(plan("1f1b", 2, 1_500), messages=True).svg() == svg


def strips(svg: str) -> list[list[tuple[float, float, float]]]:
    """Return start, end and height of what is drawn on each strip of memory."""
    found = []
    for x0, top, wide, high in [place(x) for x in elements(svg, "strip")]:
        bars = [place(x) for x in elements(svg, "memory")]
        own = [x for x in bars if top - 0.02 <= x[1] <= top + high]
        found.append([((x - x0) / wide, (x + w - x0) / wide, h) for x, _, w, h in own])
    return found


@pytest.mark.parametrize(("kind", "ranks", "m", "chunks"), KINDS[:-1])
@pytest.mark.parametrize("named", [False, True])
def test_memory_is_that_of_the_verifier(
    kind: str, ranks: int, m: int, chunks: int | None, named: bool
) -> None:
    schedule = plan(kind, ranks, m, chunks=chunks)
    part = schedule.ranks / schedule.stages
    costs = Costs(activation_bytes=part * (3_000 if named else 1))
    peaks = verify(schedule, memory=costs).peak_bytes
    svg = plot(schedule, memory=True, costs=costs if named else None).svg()
    shown = strips(svg)
    assert len(shown) == ranks
    highest = max(h for own in shown for *_, h in own)
    for rank, own in enumerate(shown):
        peak = max(h for *_, h in own) / highest * max(peaks)
        assert peak == pytest.approx(peaks[rank], rel=0.01)
        text = levels_of([peaks[rank]], [(0, 1)], 1, in_bytes=named).text()
        assert f">{text}<" in svg
        # In order, and no two at a time.
        for (_, end, _), (start, *_) in itertools.pairwise(own):
            assert end <= start + 1e-3
    word = "live bytes" if named else "live activations, in microbatches"
    assert f">{word}<" in svg
    assert not elements(plot(schedule).svg(), "strip")


def test_forwards_keep_nothing() -> None:
    svg = plot(plan("forward", 2, 3), memory=True).svg()
    assert svg.count(">peak 0<") == 2 and not elements(svg, "memory")


def test_memory_is_taken_at_the_start_and_given_back_at_the_end() -> None:
    memory = levels_of([8, 8, 12, 0], [(0, 1), (1, 2), (3, 4), (5, 6)], 9.0)
    assert memory.levels == [(0, 3, 8), (3, 6, 12)]
    assert memory.peak == 12 and memory.text() == "peak 12 B"
    assert levels_of([3 * 2**20], [(0, 1)], 2.0).text() == "peak 3 MiB"
    assert levels_of([2.5], [(0, 1)], 2.0, in_bytes=False).text() == "peak 2.5"
    assert levels_of([], [], 1.0).levels == []


def test_many_levels_are_thinned_and_keep_their_peak() -> None:
    live = [float(i % 7) for i in range(5_000)]
    memory = levels_of(live, [(i, i + 1) for i in range(5_000)], 5_000.0)
    few = thinned(memory, 100, 5_000.0)
    assert len(few.levels) <= 100 < len(memory.levels)
    assert max(x.value for x in few.levels) == few.peak == memory.peak == 6
    assert thinned(few, 100, 5_000.0) is few


def test_a_trace_shows_measured_and_predicted_memory() -> None:
    costs = Costs(0.01, 0.01, 0.01, activation_bytes=100)
    trace = synthetic(plan("1f1b", 2, 3), costs)
    svg = plot(trace, memory=True, costs=costs).svg()
    shown = strips(svg)
    assert len(shown) == 4
    for measured, predicted in (shown[:2], shown[2:]):
        assert [h for *_, h in measured] == [h for *_, h in predicted]
    assert svg.count(">peak 200 B<") == 2 and svg.count(">peak 100 B<") == 2


def test_a_predicted_lane_has_a_bubble_of_its_own_makespan() -> None:
    trace = synthetic(plan("1f1b", 2, 3), Costs(0.01, 0.01, 0.01))
    # On paper all is twice as fast, and no later hatched than its own end.
    svg = plot(trace, costs=Costs(0.005, 0.005, 0.005)).svg()
    share = 100 * (1 - 9 / 12)
    assert svg.count(f">bubble {share:.1f} %<") == 4
    lanes = [place(x) for x in elements(svg, "lane")]
    for x, y, wide, _ in [place(x) for x in elements(svg, "bubble")]:
        left, _, whole, _ = lanes[[top for _, top, *_ in lanes].index(y)]
        paper = [top for _, top, *_ in lanes].index(y) % 2
        assert x + wide <= left + whole * (0.5 if paper else 1) + 0.02


def test_a_trace_without_bytes_shows_what_is_predicted() -> None:
    costs = Costs(0.01, 0.01, 0.01)
    trace = synthetic(plan("1f1b", 2, 3), costs)
    for own in trace.steps:
        for stamps in own:
            stamps.live[:] = type(stamps.live)("q", bytes(8 * len(stamps.live)))
    svg = plot(trace, memory=True, costs=costs).svg()
    assert len(strips(svg)) == 2 and ">peak 2<" in svg
