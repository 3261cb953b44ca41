# SPDX-License-Identifier: Apache-2.0
"""Timers with levels."""

from megatron_stubs.levels import DummyTimer, Timers
