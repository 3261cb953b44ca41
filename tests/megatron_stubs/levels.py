# SPDX-License-Identifier: Apache-2.0
"""Timers that run up to a level, and are read by all ranks together."""

from __future__ import annotations

import torch
from megatron_stubs.support import Timer


class DummyTimer:
    def start(self, barrier=False):
        pass

    def stop(self, barrier=False):
        pass

    def elapsed(self, reset=True, barrier=False):
        raise RuntimeError("elapsed should not be called on a dummy timer")


class Timers:
    def __init__(self, log_level, log_option):
        self._log_level, self._log_option = log_level, log_option
        self._timers, self._log_levels = {}, {}
        self._dummy_timer = DummyTimer()

    def __call__(self, name, log_level=None):
        if name in self._timers:
            assert log_level in (None, self._log_levels[name]), f"level of {name}"
            return self._timers[name]
        log_level = 2 if log_level is None else log_level
        if log_level > self._log_level:
            return self._dummy_timer
        self._log_levels[name] = log_level
        return self._timers.setdefault(name, Timer())

    def _longest(self, names, reset, normalizer):
        known = [self._timers.get(name) for name in names]
        times = torch.tensor([t.elapsed(reset) if t else 0.0 for t in known])
        torch.distributed.all_reduce(times, op=torch.distributed.ReduceOp.MAX)
        pairs = zip(names, (times / normalizer).tolist(), strict=True)
        return {name: time for name, time in pairs if time > 0.0}

    def log(self, names, rank=None, normalizer=1.0, reset=True, barrier=False):
        self._longest(names, reset, normalizer)

    def write(
        self, names, writer, iteration, normalizer=1.0, reset=False, barrier=False
    ):
        for name, time in self._longest(names, reset, normalizer).items():
            if writer is not None:
                writer.add_scalar(name + "-time", time, iteration)
