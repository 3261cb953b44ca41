# SPDX-License-Identifier: Apache-2.0
"""Time of a training step with Adasum against the same step with torch's hook.

The step is that of ``examples/train_gpt.py`` at its defaults: forward, backward under
DDP, SM3. Both models live in the same processes and take turns, so a machine that
slows down slows both; a figure is the ratio of two medians.
"""

from __future__ import annotations

import argparse
from typing import Any

from _adasum_models import MEAN, training_step
from _ranks import Times, alternate, ratio, run, spread
from _report import Figure, arguments, finish

import torch_sm3

# Most that the time may be of that with torch's hook, by number of ranks.
LIMITS = {2: 1.10, 4: 1.35}


def measure(blocks: str, repeats: int) -> Times:
    """Return the seconds of every step on this rank."""
    state = torch_sm3.AdasumState()
    calls = {MEAN: training_step(None, blocks), "adasum": training_step(state, blocks)}
    times = alternate(calls, repeats)
    state.close()
    return times


def main() -> None:
    """Parse the command line, measure, print ratios and write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments(parser)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--blocks", default="reversible", help="as of train_gpt.py")
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    repeats = 5 if options.quick else options.repeats
    figures: list[Figure] = []
    measured: dict[str, Any] = {}
    for world in options.ranks:
        times = run(world, measure, options.blocks, repeats)
        value = ratio(times, "adasum", MEAN)
        name = f"step, p = {world}: adasum_hook / {MEAN}"
        figures.append(Figure(name, value, LIMITS.get(world)))
        measured[f"p = {world}"] = spread(times)
    finish(figures, options, {"quartiles_ms": measured})


if __name__ == "__main__":
    main()
