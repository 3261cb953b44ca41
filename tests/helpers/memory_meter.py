# SPDX-License-Identifier: Apache-2.0
"""Exact bytes of torch's CPU memory over a block of code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch_sm3 import _ops


@dataclass
class Bytes:
    """What a meter read when its block ended.

    Attributes:
        live: bytes that are alive now minus those that were alive at the start.
        peak: most bytes that were alive at once, above those at the start.
    """

    live: int = 0
    peak: int = 0


@contextmanager
def memory_meter() -> Iterator[Bytes]:
    """Fill the yielded ``Bytes`` at the end of the block.

    The allocator knows sizes from the first meter of a process on: memory that is
    older counts neither when it is there nor when it is released.
    """
    read = Bytes()
    _ops.memory_meter_start()
    try:
        yield read
    finally:
        read.live, read.peak = _ops.memory_meter_stop()
