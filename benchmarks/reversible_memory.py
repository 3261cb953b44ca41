# SPDX-License-Identifier: Apache-2.0
"""Activation memory of reversible blocks against every other way to run them.

Peaks are those of the allocator during forward and backward, above what was allocated
before: weights and gradients exist already. They are exact bytes on CPU and allocated,
not reserved, bytes on CUDA. On CPU the high-water mark of fresh processes confirms
them. A slope is the growth per block from the second depth to the last but one.
"""

from __future__ import annotations

import argparse
import json

import torch
from _cap import in_process
from _meter import bytes_of, resident_peak
from _report import Figure, arguments, finish
from _reversible_peers import Run
from _reversible_runs import (
    CHECKPOINT,
    FULL,
    INVERSE,
    NESTED,
    OURS,
    PLAIN,
    backward,
    inputs,
    model,
)

from torch_sm3.reversible import SelfAttention

Peaks = dict[str, dict[int, int]]

# Width, tokens and depth of the fresh processes: peaks of many pages.
CONFIRMED_AT = (128, 4096, 8)
CONFIRMED = [PLAIN, CHECKPOINT, NESTED, *OURS]


def prepared(
    width: int, tokens: int, depth: int, device: str, names: list[str]
) -> tuple[dict[str, Run], torch.Tensor]:
    """Return runs and their input; all gradients exist already."""
    found = model(width, depth, device, names)
    x = inputs(tokens, width, device)
    for tensor in (x, *found.parameters()):
        tensor.grad = torch.zeros_like(tensor)
    return found.runs, x


def peak_of(run: Run, x: torch.Tensor) -> int:
    """Return the peak bytes of a step that is not the first."""
    backward(run, x)  # the first learns what later ones may skip
    return bytes_of(lambda: backward(run, x), x.device.type).peak


def measure(options: argparse.Namespace) -> Peaks:
    """Return the peak of each way at each depth."""
    peaks: Peaks = {}
    for depth in options.depths:
        shape = options.width, options.tokens, depth, options.device
        runs, x = prepared(*shape, options.ways)
        for name, run in runs.items():
            peaks.setdefault(name, {})[depth] = peak_of(run, x)
    return peaks


def slope(by_depth: dict[int, int]) -> float:
    """Return the bytes per block."""
    depths = sorted(by_depth)
    low, high = (depths[1], depths[-2]) if len(depths) > 3 else (depths[0], depths[-1])
    return (by_depth[high] - by_depth[low]) / (high - low)


def requirements(peaks: Peaks, options: argparse.Namespace) -> list[Figure]:
    """Return what is required of the peaks."""
    figures = []
    slopes = {name: slope(by_depth) for name, by_depth in peaks.items()}
    for name in OURS.keys() & peaks.keys() if PLAIN in peaks else ():
        limit = None if "sidecar" in name else 0.01
        share = slopes[name] / slopes[PLAIN]
        figures.append(Figure(f"slope: {name} / plain", share, limit))
    changed = 2 * options.width * options.tokens  # elements that a block rebuilds
    for name in ("node, sidecar", "graph, sidecar"):
        if name in slopes:
            bits = 8 * slopes[name] / changed
            figures.append(Figure(f"bits per rebuilt element: {name}", bits, 3.25))
    depth = options.depths[len(options.depths) // 2]
    others = (PLAIN, CHECKPOINT, FULL, INVERSE, NESTED, "memcnn", "revlib", "revtorch")
    for name in ("node, none", "graph, none"):
        for other in others:
            if name in peaks and other in peaks:
                share = peaks[name][depth] / peaks[other][depth]
                title = f"peak at depth {depth}: {name} / {other}"
                figures.append(Figure(title, share, 1.0))
    return sorted(figures, key=lambda figure: figure.name)


def in_this_process(name: str) -> dict[str, int]:
    """Return the peak by the allocator and by the resident memory."""
    width, tokens, depth = CONFIRMED_AT
    runs, x = prepared(width, tokens, depth, "cpu", [name])
    metered = peak_of(runs[name], x)
    return {
        "metered": metered,
        "resident": resident_peak(lambda: backward(runs[name], x)),
    }


def confirm(name: str) -> Figure:
    """Compare both peaks in a fresh process."""
    both = in_process(__file__, one=name)
    assert both, "no cap, no lack of memory"
    share = both["resident"] / both["metered"]
    return Figure(f"high-water mark / metered peak: {name}", share, 1.15, 0.85)


def attention(device: str) -> Figure:
    """Return how the score memory of one slice grows with batch and heads."""
    length, width = 1024, 8

    def scores(batch: int, heads: int) -> float:
        layer = SelfAttention(width, heads, 2, 2, n_parallel_heads=1).to(device)
        x = torch.randn(batch, length, width, device=device)

        def both() -> None:
            layer.forward_and_or_backward(
                (x,), None, None, 0, output_grad=torch.ones_like(x)
            )

        both()
        return bytes_of(both, device).peak / (4 * length * length)

    grown = scores(4, 4) - scores(1, 1)
    title = "score matrices that 4 x the batch, 4 x the heads add to attention"
    return Figure(title, grown, 0.5)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    depths = [4, 8, 16, 32, 64, 128]
    parser.add_argument("--depths", type=int, nargs="+", default=depths)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--ways", nargs="+", default=[], help="default: all")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--one", metavar="WAY", help=argparse.SUPPRESS)
    arguments(parser)
    options = parser.parse_args()
    if options.quick:
        options.depths, options.tokens = [4, 8, 16, 24], 256
    options.depths.sort()
    return options


def main() -> None:
    """Measure, print, and write the figures."""
    options = parse()
    if options.one:
        print(json.dumps(in_this_process(options.one)))
        return
    peaks = measure(options)
    print(f"peak bytes of activations, width {options.width}, {options.tokens} tokens")
    print(f"{'depth':>22}" + "".join(f"{d:>13,}" for d in options.depths))
    for name, by_depth in peaks.items():
        print(f"{name:>22}" + "".join(f"{b:>13,}" for b in by_depth.values()))
    figures = requirements(peaks, options)
    figures.append(attention(options.device))
    if torch.device(options.device).type == "cpu":
        names = [name for name in CONFIRMED if name in peaks]
        figures += [confirm(name) for name in (names[:1] if options.quick else names)]
    slopes = {name: slope(by_depth) for name, by_depth in peaks.items()}
    finish(figures, options, {"peak_bytes": peaks, "bytes_per_block": slopes})


if __name__ == "__main__":
    main()
