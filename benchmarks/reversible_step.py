# SPDX-License-Identifier: Apache-2.0
"""Time of a training step of reversible blocks against every other way to run them.

All ways train the same weights. A step is forward, backward and fused AdamW. Each round
does one step of every way, in an order that rotates; a figure is the median over the
rounds of the ratio of two times of one round, so that a machine that slows down in
between slows both. ``--ways`` limits what is timed.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from _meter import bytes_of
from _report import Figure, arguments, finish
from _reversible_runs import (
    CHECKPOINT,
    FULL,
    INVERSE,
    MONITOR,
    NESTED,
    PLAIN,
    Model,
    backward,
    build,
    inputs,
    model,
    ours,
    plain,
    verify,
)

# What is required: our way, the other, the most that our time may be of the other's.
LIMITS = [
    ("node, none", PLAIN, 1.35),
    ("node, none", CHECKPOINT, 1.0),
    ("graph, none", CHECKPOINT, 1.05),
    ("node, none", FULL, None),
    ("node, none", INVERSE, 0.85),
    ("node, none", NESTED, 1.0),
    ("node, none", "memcnn", None),
    ("node, none", "revlib", None),
    ("node, none", "revtorch", None),
    ("node, grid", "node, none", 1.03),
    ("node, sidecar", "node, none", 1.10),
    ("graph, grid", "graph, none", None),
    ("graph, sidecar", "graph, none", None),
    (MONITOR, "node, none", 1.02),
]

Times = dict[str, list[float]]


def rounds(calls: dict[str, Callable[[], object]], repeats: int, device: str) -> Times:
    """Return the seconds of every call in every round but the first, a warm-up."""
    names = list(calls)
    times: Times = {name: [] for name in names}
    gc.collect()
    gc.disable()
    for repeat in range(repeats + 1):
        shift = repeat % len(names)
        for name in names[shift:] + names[:shift]:
            start = time.perf_counter()
            calls[name]()
            if torch.device(device).type == "cuda":
                torch.cuda.synchronize()
            if repeat > 0:
                times[name].append(time.perf_counter() - start)
    gc.enable()
    return times


def ratio(times: Times, a: str, b: str) -> float:
    """Return the median over the rounds of one time over another."""
    pairs = zip(times[a], times[b], strict=True)
    return statistics.median(ours / other for ours, other in pairs)


def time_steps(found: Model, x: torch.Tensor, repeats: int) -> Times:
    """Return the times of a whole step of every way."""
    optimizer = torch.optim.AdamW(found.parameters(), lr=1e-5, fused=True)

    def step(name: str) -> Callable[[], object]:
        def call() -> None:
            backward(found.runs[name], x)
            optimizer.step()
            optimizer.zero_grad()

        return call

    return rounds({name: step(name) for name in found.runs}, repeats, x.device.type)


def without_grad(options: argparse.Namespace) -> list[Figure]:
    """Return time and bytes of the path without grad over a loop by hand."""
    blocks = build(options.width, options.depth, options.device)
    x = inputs(options.tokens, options.width, options.device)
    calls = {"ours": ours(blocks), "loop": plain(blocks)}

    def call(name: str) -> Callable[[], object]:
        def run() -> None:
            with torch.no_grad():
                calls[name](x)

        return run

    both = {name: call(name) for name in calls}
    times = rounds(both, 2 * options.repeats, options.device)
    peaks = {name: bytes_of(run, options.device).peak for name, run in both.items()}
    return [
        Figure("time without grad: ours / loop", ratio(times, "ours", "loop"), 1.01),
        Figure(
            "peak bytes without grad: ours / loop", peaks["ours"] / peaks["loop"], 1.0
        ),
    ]


def function_runs(options: argparse.Namespace) -> list[Figure]:
    """Return how often a step runs each function of a block, for both engines."""
    figures = []
    for engine in ("node", "graph"):
        blocks = build(32, 4, options.device)
        run = ours(blocks, engine=engine)
        x = inputs(8, 32, options.device)
        backward(run, x)  # the first step may look at the functions more often
        count = 0

        def add(*_: Any) -> None:
            nonlocal count
            count += 1

        for block in blocks:
            for function in (block.F, block.G):
                function.register_forward_pre_hook(add)
        backward(run, x)
        each = count / (2 * len(blocks))
        figures.append(Figure(f"runs of F in a step, {engine} engine", each, 2.0, 2.0))
    return figures


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--width", type=int, help="default: 512, on CUDA 2048")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--ways", nargs="+", default=[], help="default: all")
    parser.add_argument("--device", default="cpu")
    arguments(parser)
    options = parser.parse_args()
    if options.width is None:
        options.width = 2048 if torch.device(options.device).type == "cuda" else 512
    if options.quick:
        options.tokens, options.width, options.repeats = 256, 128, 3
    return options


def main() -> None:
    """Measure, print, and write the figures."""
    options = parse()
    x = inputs(options.tokens, options.width, options.device)
    found = model(options.width, options.depth, options.device, options.ways)
    verify(found, x)
    print(
        f"step time, depth {options.depth}, width {options.width}, {options.tokens} "
        f"tokens, {torch.get_num_threads()} threads, {options.repeats} rounds"
    )
    times = time_steps(found, x, options.repeats)
    seconds = {name: statistics.median(values) for name, values in times.items()}
    for name, value in seconds.items():
        share = (
            "" if PLAIN not in times else f" {ratio(times, name, PLAIN):8.3f} x plain"
        )
        print(f"{name:>22} {1e3 * value:10.1f} ms{share}")
    figures = [
        Figure(f"step time: {a} / {b}", ratio(times, a, b), limit)
        for a, b, limit in LIMITS
        if a in times and b in times
    ]
    figures += without_grad(options) + function_runs(options)
    finish(figures, options, {"step_seconds": seconds, "rounds": times})


if __name__ == "__main__":
    main()
