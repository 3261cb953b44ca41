# SPDX-License-Identifier: Apache-2.0
"""Time of a backward pass that exchanges meanwhile, against one after the other.

The same perceptron, cut into at least four buckets, runs backward with the hook, and
backward alone followed by ``adasum_all_reduce`` of the same gradients. The second
communicates only when all is computed; the ratio says how much the hook hides. It
needs a core for each rank besides those that compute: with fewer, there is nothing to
hide behind, and the figure then has no limit.
"""

from __future__ import annotations

import argparse
import os

import torch
from _adasum_models import perceptron, under_ddp
from _ranks import Times, alternate, ratio, run, spread
from _report import Figure, arguments, finish

import torch_sm3


def measure(width: int, depth: int, rows: int, repeats: int) -> tuple[Times, int]:
    """Return the seconds of every pass, and the number of buckets."""
    state, after = torch_sm3.AdasumState(), torch_sm3.AdasumState()
    megabytes = 4 * width * width * depth / 2**20
    model = under_ddp(perceptron(width, depth), state, bucket_cap_mb=megabytes / 8)
    alone = perceptron(width, depth)
    x = torch.randn(rows, width)

    def hook() -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    def one_after_the_other() -> None:
        alone.zero_grad()
        alone(x).square().mean().backward()
        gradients = [p.grad for p in alone.parameters() if p.grad is not None]
        torch_sm3.adasum_all_reduce(gradients, state=after)

    calls = {"hook": hook, "backward, then exchange": one_after_the_other}
    times = alternate(calls, repeats)
    state.close()
    after.close()
    return times, 8


def main() -> None:
    """Parse the command line, measure, print the ratio and write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments(parser)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    if options.quick:
        options.width, options.repeats = 256, 3
    times, buckets = run(
        options.ranks,
        measure,
        options.width,
        options.depth,
        options.rows,
        options.repeats,
    )
    cores = os.cpu_count() or 1
    enough = cores >= 2 * options.ranks
    name = f"backward, p = {options.ranks}, {cores} cores: hook / one after the other"
    value = ratio(times, "hook", "backward, then exchange")
    figures = [Figure(name, value, 0.9 if enough else None)]
    finish(figures, options, {"quartiles_ms": spread(times), "buckets": buckets})


if __name__ == "__main__":
    main()
