# SPDX-License-Identifier: Apache-2.0
"""Processes whose memory is capped, and whether they stayed below the cap."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

OUT_OF_MEMORY = re.compile(
    r"can't allocate memory|MemoryError|bad_alloc|could not create|out of memory"
)


def limit(size: int, device: str = "cpu") -> None:
    """Let this process have so many bytes beyond what it holds now.

    On CPU it is data (``RLIMIT_DATA``: heap, private mappings, stacks), beyond what
    Python and torch took; on CUDA what torch's allocator may take in all.
    """
    if torch.device(device).type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(size / total)
        return
    match = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match, "/proc/self/status has no VmData"
    cap = 1024 * int(match.group(1)) + size
    resource.setrlimit(resource.RLIMIT_DATA, (cap, cap))


def in_process(script: str, **options: Any) -> dict[str, Any] | None:
    """Run a script in a fresh process; return None where it runs out of memory.

    Args:
        script: the file; its last line of output is JSON.
        **options: its command line.

    Raises:
        SystemExit: if it fails for another reason.
    """
    env = {
        **os.environ,
        # Each large block a mapping of its own, and one heap: else what fits depends
        # on holes between freed blocks.
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_ARENA_MAX": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # for deterministic algorithms
    }
    command = [sys.executable, script]
    command += [f"--{name}={value}" for name, value in options.items()]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if done.returncode == 0:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found
    # A signal ends a process whose library does not check what malloc returns.
    if done.returncode > 0 and not OUT_OF_MEMORY.search(done.stderr):
        raise SystemExit(f"{' '.join(command)}: {done.stderr}")
    return None
