# SPDX-License-Identifier: Apache-2.0
"""Activation memory and step time of reversible blocks, in one run.

The same additive couplings run as a reversible sequence, under ordinary autograd and
under ``torch.utils.checkpoint`` (non-reentrant, one region per block). By its early
stop, checkpoint does not compute a region's last matrix product again: of two MLPs a
block it saves a quarter of the second forward pass. A reversible block needs that
product to rebuild its input, so the same is also timed without early stop
(``full checkpoint``): equal work. Peaks are those of the allocator during forward and
backward, above what was allocated before: weights and gradients exist already. Times
are medians of interleaved repetitions of forward, backward and AdamW step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from torch_sm3.reversible import AdditiveCoupling, ReversibleSequence

Run = Callable[[Tensor], tuple[Any, ...]]


def mlp(width: int) -> nn.Module:
    """Return a pre-norm MLP of expansion 4."""
    return nn.Sequential(
        nn.LayerNorm(width),
        nn.Linear(width, 4 * width),
        nn.GELU(),
        nn.Linear(4 * width, width),
    )


def sequence(width: int, depth: int, device: str) -> ReversibleSequence:
    """Return ``depth`` couplings whose parameters have gradients already."""
    torch.manual_seed(0)
    blocks = [AdditiveCoupling(mlp(width), mlp(width)) for _ in range(depth)]
    seq = ReversibleSequence(*blocks).to(device)
    for parameter in seq.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return seq


def runs(seq: ReversibleSequence) -> dict[str, Run]:
    """Return the ways to run the same blocks."""

    def plain(x: Tensor) -> tuple[Any, ...]:
        stack: tuple[Any, ...] = (x, x)
        for block in seq:
            stack = block(*stack)
        return stack

    def checkpointed(x: Tensor) -> tuple[Any, ...]:
        stack: tuple[Any, ...] = (x, x)
        for block in seq:
            stack = checkpoint(block, *stack, use_reentrant=False)
        return stack

    def full(x: Tensor) -> tuple[Any, ...]:
        with set_checkpoint_early_stop(False):
            return checkpointed(x)

    return {
        "plain": plain,
        "checkpoint": checkpointed,
        "full checkpoint": full,
        "reversible": lambda x: seq(x, x),
    }


def step(run: Run, x: Tensor) -> None:
    """Do a forward and a backward pass."""
    y1, y2 = run(x)
    (y1 + y2).square().mean().backward()


def peak_bytes(run: Run, x: Tensor) -> int:
    """Return the highest allocation of a step above the start."""
    if x.is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(run, x)
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step(run, x)
    assert profiler.profiler is not None
    results = profiler.profiler.kineto_results
    changes = [
        (event.start_ns(), event.nbytes())
        for event in results.events()
        if event.name() == "[memory]"
    ]
    live = peak = 0
    for _, size in sorted(changes, key=lambda change: change[0]):
        live += size
        peak = max(peak, live)
    return peak


def measure_memory(options: argparse.Namespace) -> dict[str, dict[int, int]]:
    """Return the peak of each way at each depth."""
    x = torch.randn(options.tokens, options.width, device=options.device)
    peaks: dict[str, dict[int, int]] = {}
    for depth in options.depths:
        seq = sequence(options.width, depth, options.device)
        for name, run in runs(seq).items():
            step(run, x)  # the first call learns what it may skip later
            peaks.setdefault(name, {})[depth] = peak_bytes(run, x)
    return peaks


def measure_time(options: argparse.Namespace) -> dict[str, float]:
    """Return the median seconds of a whole step of each way."""
    x = torch.randn(options.time_tokens, options.time_width, device=options.device)
    seq = sequence(options.time_width, options.time_depth, options.device)
    optimizer = torch.optim.AdamW(seq.parameters(), lr=1e-4)
    times: dict[str, list[float]] = {}
    for repeat in range(options.repeats + 1):
        for name, run in runs(seq).items():
            start = time.perf_counter()
            step(run, x)
            optimizer.step()
            if x.is_cuda:
                torch.cuda.synchronize()
            if repeat > 0:  # the first round warms up
                times.setdefault(name, []).append(time.perf_counter() - start)
            optimizer.zero_grad()
    return {name: statistics.median(values) for name, values in times.items()}


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--depths", type=int, nargs="+", default=[4, 8, 16, 32, 64])
    parser.add_argument("--width", type=int, default=128, help="of the memory part")
    parser.add_argument("--tokens", type=int, default=1024, help="of the memory part")
    parser.add_argument("--time-depth", type=int, default=4)
    parser.add_argument("--time-width", type=int, default=512)
    parser.add_argument("--time-tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    return parser.parse_args()


def main() -> None:
    """Measure, print, and write the figures."""
    options = parse()
    peaks = measure_memory(options)
    print(f"peak bytes of activations, width {options.width}, {options.tokens} tokens")
    print(f"{'depth':>15}" + "".join(f"{d:>12}" for d in options.depths))
    for name, by_depth in peaks.items():
        print(f"{name:>15}" + "".join(f"{b:>12}" for b in by_depth.values()))
    first, last = min(options.depths), max(options.depths)
    slopes = {
        name: (by_depth[last] - by_depth[first]) / max(1, last - first)
        for name, by_depth in peaks.items()
    }
    for name, slope in slopes.items():
        share = slope / max(1.0, slopes["plain"])
        print(f"{name}: {slope:.0f} bytes per block, {100 * share:.2f} % of plain")
    times = measure_time(options)
    print(
        f"step time, depth {options.time_depth}, width {options.time_width}, "
        f"{options.time_tokens} tokens, {torch.get_num_threads()} threads, median of "
        f"{options.repeats}"
    )
    others = [name for name in times if name != "reversible"]
    for name, seconds in times.items():
        ratios = [f"/ {o} {seconds / times[o]:.3f}" for o in others]
        print(f"{name:>15} {1e3 * seconds:9.1f} ms  {'  '.join(ratios)}")
    if options.json:
        figures = {
            "options": {k: str(v) for k, v in vars(options).items()},
            "threads": torch.get_num_threads(),
            "peak_bytes": peaks,
            "bytes_per_block": slopes,
            "step_seconds": times,
        }
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
