# SPDX-License-Identifier: Apache-2.0
"""What Adasum's hook costs besides time on the wire: Python, memory, metrics, checks.

The memory is what torch's allocator hands out, on all threads, above what the same
backward pass takes with torch's hook; the first iteration, whose only bucket is as
large as the model, counts as well.
"""

# No `from __future__ import annotations`: DDP compares a hook's annotations as objects.

import argparse
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from _adasum_models import MEAN, perceptron, training_step, under_ddp
from _meter import bytes_of
from _ranks import Times, alternate, ratio, run, spread
from _report import Figure, arguments, finish

import torch_sm3

SCRATCH = 8 << 20
WIDTH, DEPTH = 1024, 8


def peaks() -> dict[str, list[int]]:
    """Return the peak bytes of three iterations with either hook."""
    x = torch.randn(8, WIDTH)
    found: dict[str, list[int]] = {}
    for name in (MEAN, "adasum"):
        ours = name == "adasum"
        state = torch_sm3.AdasumState(scratch_bytes=SCRATCH) if ours else None
        model = under_ddp(perceptron(WIDTH, DEPTH), state, bucket_cap_mb=8)

        def backward(model: torch.nn.Module = model) -> None:
            model(x).square().mean().backward()

        found[name] = [bytes_of(backward).peak for _ in range(3)]
        if state is not None:
            state.close()
    return found


def python_time(repeats: int) -> list[float]:
    """Return the seconds that the hook itself takes, per bucket."""
    state = torch_sm3.AdasumState()
    seconds: list[float] = []

    def timed(
        state: torch_sm3.AdasumState,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[torch.Tensor]:
        start = time.perf_counter()
        future = torch_sm3.adasum_hook(state, bucket)
        seconds.append(time.perf_counter() - start)
        return future

    model = torch.nn.parallel.DistributedDataParallel(
        perceptron(64, 64), bucket_cap_mb=0.1
    )
    model.register_comm_hook(state, timed)
    for _ in range(repeats):
        model(torch.randn(2, 64)).sum().backward()
    state.close()
    # The first iterations fill the caches of layouts.
    return seconds[len(seconds) // 2 :]


def options_cost(repeats: int) -> Times:
    """Return the seconds of a training step with metrics and with checks."""
    kinds: dict[str, dict[str, Any]] = {
        "plain": {"check": "off"},
        "metrics": {"check": "off", "metrics": True},
        "hash": {"check": "hash"},
    }
    states = {name: torch_sm3.AdasumState(**kind) for name, kind in kinds.items()}
    calls = {name: training_step(state, "plain") for name, state in states.items()}
    times = alternate(calls, repeats)
    for state in states.values():
        state.close()
    return times


def everything(repeats: int) -> dict[str, Any]:
    """Return all measurements of this rank."""
    return {
        "peaks": peaks(),
        "hook_seconds": python_time(repeats),
        "times": options_cost(repeats),
    }


def main() -> None:
    """Parse the command line, measure, print the figures and write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments(parser)
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    found = run(2, everything, 5 if options.quick else options.repeats)
    peak, times = found["peaks"], found["times"]
    more = max(a - b for a, b in zip(peak["adasum"], peak[MEAN], strict=True))
    layers = 2 * DEPTH
    figures = [
        Figure(
            "hook, Python's time per bucket in microseconds",
            1e6 * statistics.median(found["hook_seconds"]),
            100,
        ),
        Figure(
            f"peak MiB above {MEAN}, scratch {SCRATCH >> 20} MiB",
            more / 2**20,
            (SCRATCH + (1 << 20) + 8 * layers * 4) / 2**20,
        ),
        Figure("step: metrics / none", ratio(times, "metrics", "plain"), 1.02),
        Figure('step: check="hash" / "off"', ratio(times, "hash", "plain"), 1.10),
    ]
    measured = {"peak_bytes": peak, "quartiles_ms": spread(times)}
    finish(figures, options, measured)


if __name__ == "__main__":
    main()
