# SPDX-License-Identifier: Apache-2.0
"""Numeric conventions of SM3's known sources, one set per ``compat``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Preset:
    """What differs between the sources; hyper-parameters are not part of it.

    Args:
        eps: added to nu under the root, unless the user gives another.
        outside: added to the root; 0 means that nothing is.
        guard: also u = 0 where nu = 0, whatever eps is.
        keep_larger: with beta2 < 1 an accumulator never decreases.
        rows_only: a sparse gradient reads and writes the rows' accumulator alone.
        decay_first: weight decay is part of the direction, before momentum.
    """

    eps: float = 1e-30
    outside: float = 0.0
    guard: bool = False
    keep_larger: bool = False
    rows_only: bool = False
    decay_first: bool = False


PRESETS: dict[str | None, Preset] = {
    None: Preset(),
    "google": Preset(rows_only=True),
    "optax": Preset(eps=1e-8, guard=True),
    "trax": Preset(eps=0.0, outside=1e-16, guard=True, decay_first=True),
    "enealor": Preset(keep_larger=True, rows_only=True),
}
