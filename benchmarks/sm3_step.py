# SPDX-License-Identifier: Apache-2.0
"""Time of one SM3 step against torch's fused optimizers and an axpy, in one run.

Prints ratios of medians: SM3's time over the other's, repetitions interleaved, on
matrices with their biases whose working set is larger than the last-level cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import torch_sm3

SHAPES = [(2048, 2048), (1024, 4096), (4096, 1024), (4096, 2048), (2048,), (4096,)]


def parameters(dtype: torch.dtype) -> list[Tensor]:
    """Return parameters with gradients, the same ones at every call."""
    torch.manual_seed(0)
    params = [torch.randn(shape).to(dtype).requires_grad_() for shape in SHAPES]
    for param in params:
        param.grad = torch.randn(param.shape).to(dtype)
    return params


def axpy(params: list[Tensor]) -> Callable[[], None]:
    """Return ``w -= c * g``, the least that any optimizer does."""

    def step() -> None:
        with torch.no_grad():
            for param in params:
                assert param.grad is not None
                param.add_(param.grad, alpha=-1e-6)

    return step


def candidates(dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """Return one step function per name, each on parameters of its own."""
    new = parameters
    optimizers: dict[str, torch.optim.Optimizer] = {
        "sm3": torch_sm3.SM3(new(dtype), lr=1e-6),
        "sm3 momentum": torch_sm3.SM3(new(dtype), lr=1e-6, momentum=0.9),
        "adamw fused": torch.optim.AdamW(new(dtype), lr=1e-6, fused=True),
        "adagrad fused": torch.optim.Adagrad(new(dtype), lr=1e-6, fused=True),
    }
    steps: dict[str, Callable[[], object]] = {n: o.step for n, o in optimizers.items()}
    return {**steps, "axpy": axpy(new(dtype))}


def measure(dtype: torch.dtype, repeats: int) -> dict[str, float]:
    """Return the median milliseconds of each candidate."""
    steps = candidates(dtype)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats + 3):
        for name, step in steps.items():
            begin = time.perf_counter()
            step()
            if repeat >= 3:
                times[name].append(1e3 * (time.perf_counter() - begin))
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Parse the command line, measure, print ratios and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write all medians to this file")
    options = parser.parse_args()
    results = []
    for threads in options.threads:
        torch.set_num_threads(threads)
        for dtype in (torch.float32, torch.bfloat16):
            medians = measure(dtype, options.repeats)
            kind = str(dtype).removeprefix("torch.")
            results.append({"threads": threads, "dtype": kind, "ms": medians})
            for ours in ("sm3", "sm3 momentum"):
                ratios = [
                    f"{medians[ours] / medians[other]:.2f} x {other}"
                    for other in ("adamw fused", "adagrad fused", "axpy")
                ]
                print(
                    f"{threads} thread(s) {kind:8} {ours:12} {medians[ours]:7.2f} ms = "
                    + ", ".join(ratios)
                )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
