# SPDX-License-Identifier: Apache-2.0
"""Time of one SM3 step against torch's fused optimizers, an axpy and another port.

Every figure is a ratio of medians of one process, repetitions interleaved: SM3's time
over the other's. Matrices and their biases fill four times the last-level cache.
``--check`` fails where a ratio is beyond 1.5 times its limit.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

import torch_sm3

Step = Callable[[], object]

MATRICES = [(2048, 2048), (1024, 4096), (4096, 1024), (4096, 2048)]
RATE = 1e-6
# An axpy that gains less than this share of its threads is bound by memory.
MEMORY_BOUND = 0.7


@dataclass
class Ratio:
    """One required ratio and what was measured."""

    case: str
    threads: int
    ours: str
    other: str
    limit: float
    milliseconds: tuple[float, float] = (0.0, 0.0)

    @property
    def value(self) -> float:
        """Our time over the other's."""
        return self.milliseconds[0] / self.milliseconds[1]

    def line(self) -> str:
        """Return one line of the table."""
        verdict = "" if self.value <= self.limit else "  <-- beyond the limit"
        return (
            f"{self.threads:2} thread(s)  {self.case:18} {self.ours:16} "
            f"{self.milliseconds[0]:8.2f} ms = {self.value:6.3f} x {self.other:24} "
            f"(limit {self.limit:.2f}){verdict}"
        )


def cache_bytes() -> int:
    """Return the size of the last-level cache, 32 MiB where the system hides it."""
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        unit = {"K": 2**10, "M": 2**20}.get(text[-1], 1)
        sizes.append(int(text.rstrip("KM")) * unit)
    return max(sizes) or 32 * 2**20


def parameters(
    shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Return parameters with gradients, the same ones at every call."""
    torch.manual_seed(0)
    params = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    for param in params:
        param.grad = torch.randn(param.shape).to(dtype)
    return params


def large(dtype: torch.dtype) -> list[Tensor]:
    """Return matrices and biases of four times the last-level cache."""
    numel = sum(math.prod(shape) for shape in MATRICES)
    bytes_once = 2 * dtype.itemsize * numel
    times = max(1, math.ceil(4 * cache_bytes() / bytes_once))
    return parameters([*MATRICES, *((s[0],) for s in MATRICES)] * times, dtype)


def axpy(params: list[Tensor]) -> Step:
    """Return ``w -= c * g``, the least that any optimizer does."""

    @torch.no_grad()
    def step() -> None:
        for param in params:
            assert param.grad is not None
            param.add_(param.grad, alpha=-RATE)

    return step


def sm3(params: list[Tensor], **options: object) -> Step:
    """Return a step of ours."""
    return torch_sm3.SM3(params, lr=RATE, **options).step  # type: ignore[arg-type]


def adamw(params: list[Tensor]) -> Step:
    """Return a step of torch's fused AdamW."""
    return torch.optim.AdamW(params, lr=RATE, fused=True).step


def other_port(params: list[Tensor]) -> Step | None:
    """Return a step of pytorch_optimizer's SM3, None where it is not installed."""
    try:
        from pytorch_optimizer import SM3 as OtherSM3
    except ImportError:
        return None
    return OtherSM3(params, lr=RATE).step


def measure(steps: dict[str, Step], repeats: int, warm_up: int = 3) -> dict[str, float]:
    """Return the median milliseconds of each, repetitions interleaved."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    gc.collect()
    gc.disable()
    for repeat in range(repeats + warm_up):
        for name, step in steps.items():
            begin = time.perf_counter()
            step()
            if repeat >= warm_up:
                times[name].append(1e3 * (time.perf_counter() - begin))
    gc.enable()
    return {name: statistics.median(values) for name, values in times.items()}


def compare(
    case: str,
    steps: dict[str, Step],
    limits: list[tuple[str, str, float]],
    repeats: int,
) -> list[Ratio]:
    """Measure all steps together and return the ratios that are asked for."""
    medians = measure(steps, repeats)
    threads = torch.get_num_threads()
    return [
        Ratio(case, threads, a, b, limit, (medians[a], medians[b]))
        for a, b, limit in limits
        if a in medians and b in medians
    ]


def axpy_limit(threads: int, repeats: int) -> float:
    """Return the limit over an axpy, which depends on what bounds the axpy."""
    step = axpy(large(torch.float32))
    torch.set_num_threads(1)
    alone = measure({"axpy": step}, repeats)["axpy"]
    torch.set_num_threads(threads)
    together = measure({"axpy": step}, repeats)["axpy"]
    return 1.25 if alone / together < MEMORY_BOUND * threads else 1.7


def float32(repeats: int) -> list[Ratio]:
    """Large float32 matrices, with and without momentum."""
    kind = torch.float32
    steps = {
        "sm3": sm3(large(kind)),
        "sm3 momentum": sm3(large(kind), momentum=0.9),
        "adamw fused": adamw(large(kind)),
        "adagrad fused": torch.optim.Adagrad(large(kind), lr=RATE, fused=True).step,
        "axpy": axpy(large(kind)),
    }
    limits = [
        ("sm3", "adamw fused", 0.60),
        ("sm3 momentum", "adamw fused", 0.85),
        ("sm3", "adagrad fused", 0.85),
        ("sm3", "axpy", axpy_limit(torch.get_num_threads(), repeats)),
    ]
    return compare("float32", steps, limits, repeats)


def port(repeats: int) -> list[Ratio]:
    """The SM3 of pytorch_optimizer, which is slow: a case of its own."""
    other = other_port(large(torch.float32))
    if other is None:
        print("pytorch_optimizer is not installed: left out", file=sys.stderr)
        return []
    steps = {"sm3": sm3(large(torch.float32)), "pytorch_optimizer": other}
    limits = [("sm3", "pytorch_optimizer", 0.2)]
    return compare("float32", steps, limits, max(5, repeats // 2))


def bfloat16(repeats: int) -> list[Ratio]:
    """Large bfloat16 matrices."""
    kind = torch.bfloat16
    steps = {
        "sm3": sm3(large(kind)),
        "sm3 momentum": sm3(large(kind), momentum=0.9),
        "adamw fused": adamw(large(kind)),
    }
    limits = [("sm3", "adamw fused", 0.60), ("sm3 momentum", "adamw fused", 0.85)]
    return compare("bfloat16", steps, limits, repeats)


def small(repeats: int) -> list[Ratio]:
    """2,000 tensors of 256 elements: what Python and the calls cost."""
    shapes: list[tuple[int, ...]] = [(256,)] * 2000
    steps = {"sm3": sm3(parameters(shapes)), "adamw fused": adamw(parameters(shapes))}
    limits = [("sm3", "adamw fused", 1.0)]
    return compare("2,000 x 256", steps, limits, 3 * repeats)


def ranks(repeats: int) -> list[Ratio]:
    """Tensors of rank 3 and 4 against a matrix of as many elements."""
    shapes: dict[str, tuple[int, ...]] = {
        "rank 3": (64, 512, 512),
        "rank 4": (2048, 910, 3, 3),
        "matrix": (4096, 4096),
    }
    steps = {name: sm3(parameters([shape])) for name, shape in shapes.items()}
    limits = [("rank 3", "matrix", 1.3), ("rank 4", "matrix", 1.3)]
    return compare("float32", steps, limits, repeats)


def turned(repeats: int) -> list[Ratio]:
    """A gradient that lies across its parameter."""
    across = parameters([(4096, 4096)])
    assert across[0].grad is not None
    across[0].grad = across[0].grad.t().contiguous().t()
    steps = {
        "turned gradient": sm3(across),
        "contiguous": sm3(parameters([(4096, 4096)])),
    }
    limits = [("turned gradient", "contiguous", 2.5)]
    return compare("float32", steps, limits, repeats)


def sparse(repeats: int) -> list[Ratio]:
    """Sparse gradients of as many rows of a table and of one twice as long.

    The rows are few enough for each to lie on a page of its own in both tables.
    """

    def table(rows: int) -> Step:
        param = torch.zeros(rows, 64, requires_grad=True)
        generator = torch.Generator().manual_seed(0)
        named = torch.randint(rows, (1, 4000), generator=generator)
        grad = torch.sparse_coo_tensor(
            named, torch.randn(4000, 64), param.shape, check_invariants=True
        )
        param.grad = grad.coalesce()
        return sm3([param])

    steps = {"rows doubled": table(2_000_000), "rows": table(1_000_000)}
    return compare("sparse", steps, [("rows doubled", "rows", 1.1)], 4 * repeats)


def paths(repeats: int) -> list[Ratio]:
    """The fused operator against one torch operation per rounding."""
    steps = {
        "fused": sm3(large(torch.float32)),
        "for-loop": sm3(large(torch.float32), fused=False),
    }
    limits = [("fused", "for-loop", 1 / 8)]
    return compare("float32", steps, limits, max(5, repeats // 2))


CASES = [float32, bfloat16, small, ranks, turned, sparse, paths, port]


def main() -> None:
    """Parse the command line, measure, print ratios and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, cores}))
    parser.add_argument("--repeats", type=int, default=15)
    names = [case.__name__ for case in CASES]
    parser.add_argument("--cases", nargs="+", choices=names, default=names)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", type=Path, help="write all ratios to this file")
    options = parser.parse_args()
    ratios: list[Ratio] = []
    for threads in options.threads:
        for case in CASES:
            if case.__name__ in options.cases:
                torch.set_num_threads(threads)
                found = case(options.repeats)
                print("\n".join(ratio.line() for ratio in found), flush=True)
                ratios += found
    if options.json:
        rows = [{**asdict(ratio), "ratio": ratio.value} for ratio in ratios]
        options.json.write_text(json.dumps(rows, indent=1))
    far = [ratio for ratio in ratios if ratio.value > 1.5 * ratio.limit]
    if options.check and far:
        sys.exit("beyond 1.5 times the limit:\n" + "\n".join(r.line() for r in far))


if __name__ == "__main__":
    main()
