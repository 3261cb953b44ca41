# SPDX-License-Identifier: Apache-2.0
"""Step time of ReversibleTrainer against the store run of the same layers.

Medians of interleaved repetitions of a whole step: forward, backward and SM3. In theory
a reversible step takes 4/3 of a stored one, whose backward pass is twice its forward
pass, and one that clips by two backward passes 7/4 of one that does not.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from _report import Figure, arguments, finish
from _trainer_layers import make

from torch_sm3.trainer import ReversibleTrainer, Trainer

#: What each is set beside, and how many times its time it may take, with some slack.
WAYS: dict[str, tuple[dict[str, Any], str, float | None]] = {
    "reversible": ({}, "store", 1.45),
    "reversible, grid": ({"exact": "grid"}, "reversible", 1.05),
    "reversible, sidecar": ({"exact": "sidecar"}, "reversible", 1.15),
    "reversible, two passes": ({"clip_grad_norm": 1.0}, "reversible", 1.85),
    "reversible, parked gradients": (
        {"clip_grad_norm": 1.0, "clip_strategy": "host_grads"},
        "reversible",
        1.15,
    ),
    "reversible, offloaded": ({"offload": "host"}, "reversible", None),
}


def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    """Return the seconds of each repetition of each way."""
    trainers = {"store": make(Trainer.from_blocks, options.width, options.depth)}
    for name, (settings, _, _) in WAYS.items():
        trainers[name] = make(
            ReversibleTrainer, options.width, options.depth, **settings
        )
    x = torch.randn(options.tokens, options.width)
    times: dict[str, list[float]] = {name: [] for name in trainers}
    for repeat in range(options.repeats + 2):
        for name, trainer in trainers.items():
            start = time.perf_counter()
            trainer.one_step(x, rng=repeat)
            if repeat > 1:  # the first steps make slots, and learn
                times[name].append(time.perf_counter() - start)
    return times


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=15)
    arguments(parser)
    options = parser.parse_args()
    if options.quick:
        options.width, options.tokens, options.repeats = 128, 256, 3
    return options


def main() -> None:
    """Measure, print, and write the figures."""
    options = parse()
    print(
        f"step time: {options.depth} couplings of MLPs of width {options.width}, "
        f"{options.tokens} tokens, {torch.get_num_threads()} threads, median of "
        f"{options.repeats}"
    )
    times = measure(options)
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, seconds in medians.items():
        print(f"{name:32} {1e3 * seconds:9.1f} ms")
    figures = [
        Figure(f"time: {name} / {other}", medians[name] / medians[other], limit)
        for name, (_, other, limit) in WAYS.items()
    ]
    finish(figures, options, {"seconds": times})


if __name__ == "__main__":
    main()
