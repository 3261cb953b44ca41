# SPDX-License-Identifier: Apache-2.0
"""What an Adasum can be asked for, and what is wrong with what was asked."""

from __future__ import annotations

import math

_MODES = ("tree", "psum", "mean", "sum")


def check_options(op: str, mode: str, scale: float) -> None:
    """Refuse an unknown mode and a scale that is not finite."""
    if mode not in _MODES:
        raise ValueError(
            f"{op}: expected 'tree', 'psum', 'mean' or 'sum', but got {mode!r} "
            "(argument 'mode')"
        )
    if not math.isfinite(scale):
        raise ValueError(
            f"{op}: expected a finite number, but got {scale} (argument 'scale')"
        )
