# SPDX-License-Identifier: Apache-2.0
"""Costs for the oracles of time and memory of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Costs:
    """Hold costs; of stages, ranks and routes a number or a list, of links p x p."""

    forward: Any = 1.0
    input: Any = 1.0
    weight: Any = 1.0
    recompute: Any = 0.0
    backward: Any = None  # recompute + input + weight
    pair: Any = None  # of the stage that runs F; None is unfused
    reduce: Any = 0.0
    optimizer: Any = 0.0
    tie: Any = 0.0
    activation: Any = 0.0
    released: Any = 0.0
    shared: Any = 0.0
    boundary: Any = 0.0
    transient: Any = 0.0
    static: Any = 0.0
    route_bytes: Any = 0.0
    latency: Any = 0.0
    bandwidth: Any = 0.0  # 0 is without limit
    serial_links: bool = False
    optimizer_waits: bool = False
    speed: Any = 1.0
    jitter: float = 0.0
    seed: int = 0


def per(value: Any, *indices: int) -> Any:
    """Return the value of one item."""
    for index in indices:
        value = value[index] if isinstance(value, list | tuple) else value
    return value


def jitter_of(costs: Costs, op: str, stage: int, microbatch: int) -> float:
    """Return the factor of one compute action: splitmix64 of what names it."""

    def mix(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    name = ("FBIW".index(op) << 48) + (stage << 32) + microbatch
    return 1 + costs.jitter * ((mix((costs.seed + mix(name)) % 2**64) >> 11) / 2**53)
