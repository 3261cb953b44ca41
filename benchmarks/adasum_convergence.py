# SPDX-License-Identifier: Apache-2.0
"""Steps until a small MLP reaches a loss: ranks combined by Adasum, and by the mean.

All ranks are simulated in one process, through the operators that need no process
group. SGD combines gradients, as the DDP hook does; SM3 and Adam combine updates, as
``AdasumOptimizer`` does; the mean is always that of gradients. The base learning rate
is the one of the grid {1, 2, 5} x 10^k at which one rank needs the fewest steps. Two
questions:

- eight ranks of a batch of 64: at the base rate, at a third of it, and each at its own
  best rate of the grid;
- four ranks of 128, eight times the batch of one rank, at the base rate: curves.

A run that does not reach the target counts as many steps as it was given.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _adasum_task as task
import torch
from _adasum_task import METHODS, Method, Simulation, curve
from _report import Figure, arguments, finish

GRID = [float(f"{a}e{k}") for k in range(-5, 2) for a in (1, 2, 5)]
RANKS, BATCH = 8, 64
#: Of "eight times the batch", on half the ranks.
FEWER, LARGER = 4, 128
#: What is required: at the base rate, and at a third of it.
LIMITS = {"sgd": (0.65, None), "sm3": (0.9, 0.6), "adam": (0.95, 0.75)}
AT_ITS_BEST = 1.15

Curves = list[list[float]]


@dataclass(frozen=True)
class Setting:
    """How a method is run on all seeds."""

    mode: str
    ranks: int
    batch: int
    limit: int


def curves(method: Method, setting: Setting, lr: float, seeds: Sequence[int]) -> Curves:
    """Return the smooth losses of every seed's run."""
    runs = [
        Simulation(method, setting.mode, setting.ranks, setting.batch, lr, seed)
        for seed in seeds
    ]
    return [curve(run, setting.limit) for run in runs]


def steps(found: Curves, limit: int) -> list[int]:
    """Return the steps to the target of every seed's run."""
    reached = [bool(losses) and losses[-1] < task.TARGET for losses in found]
    pairs = zip(found, reached, strict=True)
    return [len(losses) if good else limit for losses, good in pairs]


def best_rate(start: float, count: Callable[[float], float]) -> float:
    """Return the rate of the grid with the lowest count around a start.

    Walks downhill; of equal neighbors the lower rate wins.
    """
    at = GRID.index(start)
    while True:
        near = GRID[max(at - 1, 0) : at + 2]
        best = min(near, key=count)
        if best == GRID[at]:
            return best
        at = GRID.index(best)


def search(
    method: Method, setting: Setting, start: float, seeds: Sequence[int]
) -> tuple[float, dict[float, list[int]]]:
    """Return the best rate and the steps at all rates that were tried."""
    tried: dict[float, list[int]] = {}

    def count(lr: float) -> float:
        if lr not in tried:
            tried[lr] = steps(curves(method, setting, lr, seeds), setting.limit)
        return statistics.mean(tried[lr])

    return best_rate(start, count), tried


def eight_ranks(
    name: str, base: float, options: argparse.Namespace
) -> tuple[list[Figure], dict[str, Any]]:
    """Compare Adasum with the mean at three rates."""
    method, seeds = METHODS[name], options.seeds
    settings = {m: Setting(m, RANKS, BATCH, options.limit) for m in ("tree", "mean")}
    figures, found = [], {}
    for part, limit in zip((1.0, 1 / 3), LIMITS[name], strict=True):
        counts = {
            mode: steps(curves(method, setting, part * base, seeds), setting.limit)
            for mode, setting in settings.items()
        }
        ratio = sum(counts["tree"]) / sum(counts["mean"])
        where = "base rate" if part == 1.0 else "a third of it"
        figures.append(Figure(f"{method.name}: Adasum / mean, {where}", ratio, limit))
        found[where] = counts
    best: dict[str, tuple[float, float]] = {}
    for mode, setting in settings.items():
        lr, tried = search(method, setting, base, seeds)
        best[mode] = lr, statistics.mean(tried[lr])
        found[f"grid, {mode}"] = {f"{lr:g}": tried[lr] for lr in sorted(tried)}
    rates = ", ".join(f"{mode} {lr:g}" for mode, (lr, _) in best.items())
    ratio = best["tree"][1] / best["mean"][1]
    title = f"{method.name}: each at its best ({rates})"
    return [*figures, Figure(title, ratio, AT_ITS_BEST)], found


def four_ranks(name: str, base: float, options: argparse.Namespace) -> dict[str, Any]:
    """Return curves of one rank, and of eight times its batch on four ranks."""
    found = {}
    for title, mode, ranks, batch in (
        ("one rank", "mean", 1, BATCH),
        ("mean", "mean", FEWER, LARGER),
        ("Adasum", "tree", FEWER, LARGER),
    ):
        setting = Setting(mode, ranks, batch, options.limit)
        found[title] = curves(METHODS[name], setting, base, options.seeds)
    return found


def measure(options: argparse.Namespace) -> tuple[list[Figure], dict[str, Any]]:
    """Run everything; print what is found on the way."""
    figures: list[Figure] = []
    rows: dict[str, Any] = {}
    for name, method in METHODS.items():
        alone = Setting("mean", 1, BATCH, options.limit)
        base, tried = search(method, alone, method.start, options.seeds)
        print(f"{method.name}: base rate {base:g}, {tried[base]} steps on one rank")
        own, found = eight_ranks(name, base, options)
        larger = four_ranks(name, base, options)
        counts = {way: steps(c, options.limit) for way, c in larger.items()}
        for way, count in counts.items():
            print(f"  {FEWER} x {LARGER}, {way}: {count} steps", flush=True)
        ratio = sum(counts["Adasum"]) / sum(counts["mean"])
        title = f"{method.name}: Adasum / mean, {FEWER} ranks of {LARGER}, base rate"
        figures += [*own, Figure(title, ratio)]
        rows[name] = {
            "method": method.name,
            "base": base,
            "one rank": {f"{lr:g}": tried[lr] for lr in sorted(tried)},
            f"{RANKS} ranks": found,
            f"{FEWER} ranks": counts,
            "curves": {
                way: [[round(x, 4) for x in losses] for losses in c]
                for way, c in larger.items()
            },
        }
    return figures, rows


def draw(rows: dict[str, Any], to: Path) -> None:
    """Draw the curves of four ranks, a panel for each optimizer."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Picture

    picture = Picture(figsize=(12, 4), layout="constrained")
    FigureCanvasAgg(picture)
    panels = picture.subplots(1, len(rows), sharey=True, squeeze=False)[0]
    colors = {"one rank": "gray", "mean": "C1", "Adasum": "C0"}
    for axes, row in zip(panels, rows.values(), strict=True):
        for way, runs in row["curves"].items():
            counts = row[f"{FEWER} ranks"][way]
            batch = BATCH if way == "one rank" else FEWER * LARGER
            label = f"{way}, batch {batch}: {statistics.mean(counts):.0f}"
            for losses in runs:
                x = range(1, len(losses) + 1)
                axes.plot(x, losses, color=colors[way], label=label, linewidth=1.2)
                label = "_nolegend_"
        axes.axhline(task.TARGET, color="black", linewidth=0.8, linestyle=":")
        axes.set(xlabel="step", title=f"{row['method']}, rate {row['base']:g}")
        axes.grid(alpha=0.3)
        axes.legend(title="steps to the target", fontsize="small")
    panels[0].set(ylabel="training loss, smooth", ylim=(0.7, 3.0))
    picture.savefig(to, dpi=100)
    print(f"drawn: {to}")


def main() -> None:
    """Parse the command line, run, draw, and write the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--limit", type=int, default=600, help="steps of a run")
    parser.add_argument("--noise", type=float, default=task.NOISE, help="of the task")
    parser.add_argument("--target", type=float, default=task.TARGET, help="loss")
    parser.add_argument("--png", type=Path, help="picture to draw")
    parser.add_argument("--redraw", type=Path, help="draw from this JSON, run nothing")
    arguments(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.redraw:
        rows = json.loads(options.redraw.read_text())["rows"]
        draw(rows, options.png or options.redraw.with_suffix(".png"))
        return
    task.NOISE, task.TARGET = options.noise, options.target
    if options.quick:
        options.seeds = options.seeds[:2]
    figures, rows = measure(options)
    if options.png:
        draw(rows, options.png)
    finish(figures, options, {"rows": rows})


if __name__ == "__main__":
    main()
