# SPDX-License-Identifier: Apache-2.0
"""Bytes that a call allocates, by torch's allocator and by the kernel."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import torch_sm3  # noqa: F401  loads the operators


@dataclass(frozen=True)
class Bytes:
    """What a call allocated.

    Attributes:
        live: bytes that it left allocated.
        peak: most bytes that it had allocated at once, above those at its start.
    """

    live: int
    peak: int


def bytes_of(call: Callable[[], object], device: str = "cpu") -> Bytes:
    """Return the bytes that a call allocates, its result released.

    They are exact on CPU; on CUDA they are allocated, not reserved, bytes.
    """
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        return Bytes(torch.cuda.memory_allocated() - before, peak - before)
    ops = torch.ops.torch_sm3
    ops._memory_meter_start()
    try:
        call()
    finally:
        live, peak = ops._memory_meter_stop()
    return Bytes(live, peak)


def resident(name: str) -> int:
    """Return ``VmRSS`` or its peak ``VmHWM`` in bytes."""
    text = Path("/proc/self/status").read_text()
    match = re.search(rf"{name}:\s+(\d+) kB", text)
    assert match, f"/proc/self/status has no {name}"
    return 1024 * int(match.group(1))


def resident_peak(call: Callable[[], object]) -> int:
    """Return the bytes by which the resident memory rose at most during a call."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from now
    before = resident("VmRSS")
    call()
    return max(0, resident("VmHWM") - before)
