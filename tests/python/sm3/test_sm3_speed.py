# SPDX-License-Identifier: Apache-2.0
"""The required ratios of benchmarks/sm3_step.py, with room for a noisy machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "sm3_step.py"


@pytest.mark.slow
def test_no_ratio_is_beyond_half_as_much_again_as_its_limit() -> None:
    command = [sys.executable, str(BENCHMARK), "--check", "--repeats", "9"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
