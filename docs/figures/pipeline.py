# SPDX-License-Identifier: Apache-2.0
"""Draw docs/figures/pipeline_*.svg: every kind of schedule at p = 4 and m = 8.

All have the same work: a stage takes F = I = W = 1, and half of that where a rank has
two of them.
"""

from __future__ import annotations

from pathlib import Path

from torch_sm3.pipeline import Costs, plan, plot

RANKS, MICROBATCHES = 4, 8
KINDS = {
    "gpipe": 1,
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
#: One way, in units of F; a stage takes 3.
LINK = 0.5


def draw(name: str, kind: str, chunks: int, costs: Costs, link: float = 0.0) -> None:
    """Write one picture."""
    schedule = plan(kind, RANKS, MICROBATCHES, chunks=chunks, link_cost=link)
    path = Path(__file__).with_name(f"pipeline_{name}.svg")
    plot(schedule, path, costs=costs, width=1000, messages=costs.latency != 0)


def main() -> None:
    """Draw all kinds, then 1F1B over slow links with and without a longer warm-up."""
    for kind, chunks in KINDS.items():
        time = 1.0 / chunks
        # A pair of DualPipe-V hides part of its halves behind each other.
        pair = 2.5 * time if kind == "dualpipe_v" else None
        draw(kind, kind, chunks, Costs(time, time, time, pair=pair))
    slow = Costs(1, 1, 1, latency=LINK)
    draw("slow_links_classic", "1f1b", 1, slow)
    draw("slow_links", "1f1b", 1, slow, LINK)


if __name__ == "__main__":
    main()
