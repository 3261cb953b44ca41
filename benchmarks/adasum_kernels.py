# SPDX-License-Identifier: Apache-2.0
"""Bytes per second of Adasum's kernels over those of ``Tensor.copy_`` in the same run.

An inner product reads p leaves, a combination reads p and writes one; ``copy_`` reads
one and writes one. On the CPU every instruction set up to this machine's is measured
in a process of its own: one thread by the time that it computed, which other processes
do not lengthen, then two threads against one by the clock on the wall. With
``--device cuda`` the device's kernels are measured against its copy.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.multiprocessing as mp
from _report import Figure, arguments, finish

import torch_sm3  # noqa: F401  registers the operators

Calls = dict[str, Callable[[], object]]
Times = dict[str, list[float]]

OPS = torch.ops.torch_sm3
CAPABILITIES = ("avx2", "avx512")
MOST_RANKS = 8
WARM_UP = 5
# Ways to call mallopt: no mapping of single blocks, no return of free memory.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
# At least, of copy_: on the CPU with AVX-512 and with AVX2, on a device with
# full-rate float64.
LEAST = {
    "dots, p = 2": {"avx512": 0.7, "avx2": 0.4, "cuda": 0.6},
    "gram, p = 4": {"avx512": 0.35, "avx2": 0.35},
    "gram, p = 8": {"avx512": 0.17, "avx2": 0.17, "cuda": 0.4},
    "combine, p = 2": {"avx512": 1.0, "avx2": 1.0, "cuda": 0.8},
}
TWO_THREADS = 1.6


def keep_free_memory() -> None:
    """Let malloc give the same memory again, whose pages are there already."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def calls_of(
    size: int, dtype: torch.dtype, device: str
) -> tuple[Calls, dict[str, int]]:
    """Return the kernels on leaves of ``size`` bytes, and the bytes each touches."""
    elements = size // torch.empty(0, dtype=dtype).element_size()
    torch.manual_seed(0)
    stack = torch.randn(MOST_RANKS, elements, device=device).to(dtype)
    copy = torch.empty_like(stack[0])
    calls: Calls = {"copy": partial(copy.copy_, stack[0])}
    touched = {"copy": 2 * size}
    for p in (2, 4, MOST_RANKS):
        name = f"dots, p = {p}" if p == 2 else f"gram, p = {p}"
        calls[name] = partial(OPS.adasum_gram, stack[:p], [elements])
        touched[name] = p * size
        c = torch.full((1, p), 0.4, dtype=torch.float64, device=device)
        name = f"combine, p = {p}"
        calls[name] = partial(OPS.adasum_combine, stack[:p], c, [elements])
        touched[name] = (p + 1) * size
    return calls, touched


def warm(calls: Calls) -> None:
    """Call everything until malloc has found memory that it has used before."""
    for _ in range(4 * WARM_UP):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for call in calls.values():
            call()
        if resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 100:
            break


def device_clock() -> float:
    """Return the time after all that was enqueued."""
    torch.cuda.synchronize()
    return time.perf_counter()


def alternate(
    calls: Calls, threads: tuple[int, ...], repeats: int, clock: Callable[[], float]
) -> dict[int, Times]:
    """Return the seconds of every call of every round, by number of threads."""
    times: dict[int, Times] = {count: {name: [] for name in calls} for count in threads}
    for repeat in range(WARM_UP + repeats):
        for name, call in calls.items():
            for count in threads:
                torch.set_num_threads(count)
                start = clock()
                call()
                if repeat >= WARM_UP:
                    times[count][name].append(clock() - start)
    return times


def spread(times: Times) -> dict[str, list[float]]:
    """Return the quartiles of each, in milliseconds."""
    return {
        name: [1e3 * cut for cut in statistics.quantiles(values, n=4)]
        for name, values in times.items()
    }


@dataclass
class Measured:
    """What one process found.

    Attributes:
        capability: the instruction set that was used.
        rates: bytes per second of each kernel, by the medians.
        milliseconds: quartiles of the same.
        speedups: medians with one thread over those with two; may be empty.
    """

    capability: str
    rates: dict[str, float]
    milliseconds: dict[str, list[float]]
    speedups: dict[str, float]


def measure(
    options: argparse.Namespace, device: str, clock: Callable[[], float]
) -> Measured:
    """Measure all kernels in this process."""
    keep_free_memory()
    dtype = getattr(torch, options.dtype)
    calls, touched = calls_of(options.bytes, dtype, device)
    warm(calls)
    found = alternate(calls, (1,), options.repeats, clock)[1]
    rates = {name: touched[name] / statistics.median(found[name]) for name in found}
    speedups = {}
    if device == "cpu" and len(os.sched_getaffinity(0)) > 1:
        times = alternate(calls, (1, 2), options.repeats, time.perf_counter)
        for name in calls:
            one, two = (statistics.median(times[count][name]) for count in (1, 2))
            speedups[name] = one / two
    return Measured(OPS.cpu_capability(), rates, spread(found), speedups)


def _child(answers: Any, options: argparse.Namespace) -> None:
    answers.put(measure(options, "cpu", time.thread_time))


def measure_apart(options: argparse.Namespace, capability: str) -> Measured:
    """Measure in a process that is told to use one instruction set."""
    os.environ["TORCH_SM3_CPU_CAPABILITY"] = capability
    context = mp.get_context("spawn")
    answers = context.SimpleQueue()
    process = context.Process(target=_child, args=(answers, options))
    process.start()
    answer: Measured = answers.get()
    process.join()
    return answer


def of_copy(kind: str, rate: dict[str, float], required: bool) -> list[Figure]:
    """Return each kernel's bytes per second over those of the copy."""
    return [
        Figure(
            f"{kind}: {name}, over copy_",
            value / rate["copy"],
            least=LEAST.get(name, {}).get(kind) if required else None,
        )
        for name, value in rate.items()
        if name != "copy"
    ]


def on_cpu(options: argparse.Namespace) -> tuple[list[Figure], dict[str, Any]]:
    """Measure every instruction set of this machine."""
    figures: list[Figure] = []
    measured: dict[str, Any] = {}
    required = options.dtype == "float32"
    for capability in CAPABILITIES:
        found = measure_apart(options, capability)
        if found.capability != capability:
            continue
        measured[capability] = asdict(found)
        figures += of_copy(capability, found.rates, required)
        figures += [
            Figure(
                f"{capability}: {name}, two threads over one",
                speedup,
                least=TWO_THREADS if required and name in LEAST else None,
            )
            for name, speedup in found.speedups.items()
        ]
    return figures, measured


def on_cuda(options: argparse.Namespace) -> tuple[list[Figure], dict[str, Any]]:
    """Measure the current device."""
    # Those that compute half as many float64 as float32 per second.
    full_rate = torch.cuda.get_device_capability() in {(6, 0), (7, 0), (8, 0), (9, 0)}
    required = full_rate and options.dtype == "float32"
    found = measure(options, "cuda", device_clock)
    measured = {torch.cuda.get_device_name(): asdict(found)}
    return of_copy("cuda", found.rates, required), measured


def main() -> None:
    """Parse the command line, measure, print the figures and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--bytes", type=int, default=64 << 20, help="of each leaf")
    parser.add_argument("--repeats", type=int, default=30)
    arguments(parser)
    options = parser.parse_args()
    if options.quick:
        options.bytes, options.repeats = 8 << 20, 5
    on_device = on_cuda if options.device == "cuda" else on_cpu
    figures, measured = on_device(options)
    finish(figures, options, measured)


if __name__ == "__main__":
    main()
