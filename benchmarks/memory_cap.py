# SPDX-License-Identifier: Apache-2.0
"""The largest GPT that trains under one memory cap: ours, AdamW, Adafactor.

Every try is a process of its own. Its data segment (``RLIMIT_DATA``: heap, private
mappings, stacks) may grow by the same number of bytes beyond what Python and torch hold
after a warm-up step; in them it makes the model and the optimizer and does some steps
on one batch, and the loss must fall. The depth is searched for at one width, batch and
number of tokens. Ours has reversible blocks, and SM3 that steps inside the backward
pass or by ``ReversibleTrainer``. The others run the ordinary residual form of the same
sublayers, which keeps one stream where a reversible block has two. Times are per token
of a whole step: of each at its own largest model, and of all at the largest that all
can train.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import torch
from _cap import in_process, limit
from _gpt_ways import CONTEXT, OURS, VOCABULARY, WAYS, Way, model_of
from _meter import bytes_of
from _report import Figure, arguments, finish


def train(
    way: Way, width: int, depth: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Make a model, do some steps on one batch and return what came out."""
    model = model_of(way, width, depth)
    step = way.step(model)
    tokens = torch.randint(VOCABULARY, (options.batch, CONTEXT))
    losses, times = [], []
    for _ in range(options.steps):
        start = time.perf_counter()
        losses.append(step(tokens).item())
        times.append(time.perf_counter() - start)
    return {
        "depth": depth,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "losses": losses,
        "us_per_token": 1e6 * min(times[1:]) / tokens.numel(),
    }


def child(options: argparse.Namespace) -> None:
    """Train one model under the cap, in this process."""
    way = WAYS[options.child]
    train(way, 32, 1, options)  # threads, and code that is loaded late
    limit(options.cap * 2**20)
    print(json.dumps(train(way, options.width, options.depth, options)))


def attempt(
    name: str, depth: int, options: argparse.Namespace
) -> dict[str, Any] | None:
    """Train in a fresh process; return None where it runs out of memory."""
    same = {key: getattr(options, key) for key in ("cap", "width", "batch", "steps")}
    found = in_process(__file__, child=name, depth=depth, **same)
    if found and not found["losses"][-1] < found["losses"][0]:
        raise SystemExit(f"{name}: the loss does not fall: {found['losses']}")
    return found


def guess(way: Way, options: argparse.Namespace) -> int:
    """Return the depth at which the allocator's peak should meet 9/10 of the cap."""

    def peak(depth: int) -> int:
        return bytes_of(lambda: train(way, options.width, depth, options)).peak

    low, high = 2, 6
    each = (peak(high) - peak(low)) / (high - low)
    return max(1, int(low + (0.9 * options.cap * 2**20 - peak(low)) / each))


def largest(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the deepest model that trains, by bisection around a guess."""
    best: dict[str, Any] | None = None
    depth = guess(WAYS[name], options)
    fits, fails, stride = 0, 0, max(1, depth // 16)
    while fails == 0 or fails - fits > (max(1, fits // 8) if options.quick else 1):
        found = attempt(name, depth, options)
        print(f"  {name}, depth {depth}: {'fits' if found else 'no'}", file=sys.stderr)
        if found:
            fits, best = depth, found
        else:
            fails = depth
        if fits and fails:
            depth = (fits + fails) // 2
        else:
            depth = max(1, depth + (stride if found else -stride))
            stride *= 2
        if fails == 1:
            break
    if best is None:
        raise SystemExit(f"{name}: nothing fits into {options.cap} MiB (option --cap)")
    return best


def report(
    best: dict[str, dict[str, Any]], equal: dict[str, dict[str, Any]]
) -> list[Figure]:
    """Print the table and return the ratios."""
    common = next(iter(equal.values()))["parameters"]
    print(f"{'':36}{'blocks':>8}{'parameters':>14}{'us/token':>11}{'':>6}us/token at")
    print(f"{'':36}{'':>8}{'':>14}{'':>11}{common:>17,}")
    for name, found in best.items():
        same = equal[name]["us_per_token"]
        print(
            f"{name:36}{found['depth']:>8}{found['parameters']:>14,}"
            f"{found['us_per_token']:>11.1f}{same:>17.1f}"
        )
    figures = []
    for name, found in best.items():
        if name != OURS:
            share = best[OURS]["parameters"] / found["parameters"]
            least = WAYS[name].least
            figures.append(Figure(f"parameters: ours / {name}", share, None, least))
            slower = equal[OURS]["us_per_token"] / equal[name]["us_per_token"]
            figures.append(
                Figure(f"time per token, equal models: ours / {name}", slower)
            )
    return figures


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--cap", type=int, default=256, help="MiB of data")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4, help=f"times {CONTEXT} tokens")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--depth", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--child", choices=list(WAYS), help=argparse.SUPPRESS)
    arguments(parser)
    options = parser.parse_args()
    if options.quick:
        options.cap, options.width, options.batch = 48, 128, 2
    return options


def main() -> None:
    """Search, print, and write the figures."""
    options = parse()
    if options.child:
        child(options)
        return
    print(
        f"largest GPT under {options.cap} MiB: width {options.width}, "
        f"{options.batch * CONTEXT} tokens a step, {torch.get_num_threads()} threads"
    )
    best = {name: largest(name, options) for name in WAYS}
    smallest = min(found["depth"] for found in best.values())
    equal = {name: attempt(name, smallest, options) or best[name] for name in WAYS}
    figures = report(best, equal)
    finish(figures, options, {"largest": best, "equal": equal})


if __name__ == "__main__":
    main()
