# SPDX-License-Identifier: Apache-2.0
"""Time of a clean build, of an edit to one kernel, and of a build with nothing to do.

Configures and compiles in an empty folder, without a compiler cache, the C++ tests
included; then appends a comment to one kernel source and builds again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent


def seconds(*command: str) -> float:
    """Run a command without a compiler cache and return its wall time."""
    environment = {k: v for k, v in os.environ.items() if "COMPILER_LAUNCHER" not in k}
    # A cache may also stand in front of the compiler on PATH.
    environment["CCACHE_DISABLE"] = "1"
    start = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return time.perf_counter() - start


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--jobs", default=os.environ.get("MAX_JOBS", "2"))
    parser.add_argument(
        "--kernel",
        type=Path,
        default=ROOT / "torch_sm3/csrc/sm3/sm3_kernel_avx512.cpp",
        help="the source that is edited (its text is restored)",
    )
    arguments = parser.parse_args()
    times: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
        where = ["-S", str(ROOT), "-B", folder]
        build = ["cmake", "--build", folder, "-j", arguments.jobs]
        # Each step does what the steps before it have left to do.
        configure = ["cmake", "-G", "Ninja", *where, prefix]
        times["configure"] = seconds(*configure)
        times["library"] = seconds(*build)
        times["configure tests"] = seconds("cmake", *where, "-DTORCH_SM3_TESTS=ON")
        times["tests"] = seconds(*build)
        times["nothing to do"] = seconds(*build)
        text = arguments.kernel.read_text()
        try:
            arguments.kernel.write_text(text + "// edited\n")
            times["one kernel edited"] = seconds(*build)
        finally:
            arguments.kernel.write_text(text)
        cuda = "sm3_cuda.cu" in (Path(folder) / "build.ninja").read_text()
    times["clean"] = sum(
        times[name] for name in ("configure", "library", "configure tests", "tests")
    )
    print(
        f"torch {torch.__version__}, {'CPU and CUDA' if cuda else 'CPU'} kernels, "
        f"{arguments.jobs} jobs on {os.cpu_count()} processors, no compiler cache"
    )
    for name, value in times.items():
        print(f"{name:<18} {value:7.1f} s")
    if arguments.json:
        report = {"torch": torch.__version__, "cuda": cuda, "jobs": arguments.jobs}
        arguments.json.write_text(json.dumps({**report, "seconds": times}, indent=2))


if __name__ == "__main__":
    main()
