# SPDX-License-Identifier: Apache-2.0
"""Bytes that a call allocates: exact on CPU, of the caching allocator on CUDA."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

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
    """Return the bytes that a call allocates, its result released."""
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
