# SPDX-License-Identifier: Apache-2.0
"""Draw docs/figures/pipeline_*.svg and write the table of docs/pipeline_schedules.md.

All schedules have the same work: a rank takes F = I = W = 1 for a microbatch, its
stages together, and keeps one unit of activations of it.
"""

from __future__ import annotations

from pathlib import Path

from torch_sm3.pipeline import Chart, Costs, Schedule, kinds, plan, plot, simulate

RANKS, MICROBATCHES = 4, 8
#: Stages per rank.
CHUNKS = {
    "none": 1,
    "gpipe": 1,
    "forward": 2,
    "1f1b": 1,
    "interleaved": 2,
    "looped_bfs": 2,
    "zb_h1": 1,
    "zb_h2": 1,
    "zbv": 2,
    "v_half": 2,
    "v_min": 2,
    "dualpipe_v": 2,
}
#: Ranks and microbatches of the table's columns.
SIZES = ((4, 8), (4, 32), (8, 32), (16, 64))
#: One way, in units of F; a rank takes 3 for a microbatch.
LINK = 0.5
#: What a search may use in the picture of `auto`, in full-rank activations.
LIMIT = 3.0
PAGE = Path(__file__).parents[1] / "pipeline_schedules.md"
START, END = "<!-- table: start -->\n", "<!-- table: end -->\n"


def even(chunks: int, latency: float = 0.0) -> Costs:
    """Return the costs of equal stages, ``chunks`` of them on a rank."""
    part = 1.0 / chunks
    return Costs(part, part, part, activation_bytes=part, latency=latency)


def chart(schedule: Schedule, costs: Costs, **options: bool) -> Chart:
    """Draw a schedule as wide as a page."""
    return plot(schedule, costs=costs, width=1000, **options)


def charts() -> dict[str, Chart]:
    """Return all pictures by their names."""
    found = {}
    for kind, chunks in CHUNKS.items():
        costs = even(chunks)
        if kind == "dualpipe_v":
            # A pair hides a part of its halves behind each other.
            costs = Costs(0.5, 0.5, 0.5, pair=1.25, activation_bytes=0.5)
        ranks = 1 if kind == "none" else RANKS
        schedule = plan(kind, ranks, MICROBATCHES, chunks=chunks)
        found[kind] = chart(schedule, costs)
    slow = even(1, latency=LINK)
    for name, link in (("slow_links_classic", 0.0), ("slow_links", LINK)):
        schedule = plan("1f1b", RANKS, MICROBATCHES, link_cost=link)
        found[name] = chart(schedule, slow, messages=True)
    whole = even(1)
    best = plan("auto", RANKS, MICROBATCHES, costs=whole, memory_limit=LIMIT)
    found["auto"] = chart(best, best.costs or whole, memory=True)
    for kind in ("1f1b", "zb_h2", "v_min"):
        schedule = plan(kind, RANKS, MICROBATCHES, chunks=CHUNKS[kind])
        found[f"memory_{kind}"] = plot(
            schedule,
            # Named without bytes, so that the strips count microbatches.
            costs=Costs(*3 * [1.0 / CHUNKS[kind]]),
            width=1000,
            memory=True,
        )
    two = plan("1f1b", RANKS, MICROBATCHES, split=2)
    found["split"] = chart(two, whole, messages=True)
    return found


def table() -> str:
    """Return bubble and peak of every kind that trains, as the simulator says."""
    cells = [f"p = {p}, m = {m}" for p, m in SIZES]
    lines = [
        "| kind | v | " + " | ".join(cells) + " |",
        "|---" * (2 + len(SIZES)) + "|",
    ]
    for kind, chunks in CHUNKS.items():
        if kind in ("none", "forward"):
            continue
        row = []
        for p, m in SIZES:
            ran = simulate(plan(kind, p, m, chunks=chunks), even(chunks))
            share = 100 * (1 - 3 * m / ran.makespan)
            row.append(f"{share:.1f} %, {max(ran.peak_bytes):.4g}")
        lines.append(f"| `{kind}` | {chunks} | " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """Return docs/pipeline_schedules.md with the table as it should be."""
    before, rest = PAGE.read_text(encoding="utf-8").split(START)
    _, after = rest.split(END)
    return f"{before}{START}\n{table()}\n{END}{after}"


def main() -> None:
    """Write pictures and table."""
    assert {*CHUNKS, "auto"} == set(kinds()), "a kind without a picture"
    for name, drawn in charts().items():
        path = Path(__file__).with_name(f"pipeline_{name}.svg")
        path.write_text(drawn.svg(), encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
