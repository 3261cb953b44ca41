# SPDX-License-Identifier: Apache-2.0
"""Runs of one script under each instruction set of the CPU kernels."""

from __future__ import annotations

import os
import subprocess
import sys


def outputs(script: str) -> set[str]:
    """Return the different texts that ``script`` prints: one, if all are equal."""
    return {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "TORCH_SM3_CPU_CAPABILITY": name},
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        ).stdout
        for name in ("scalar", "avx2", "avx512")
    }
