# SPDX-License-Identifier: Apache-2.0
"""Memory of ReversibleTrainer against its contract, at depths 8, 32 and 64.

Each depth is a process of its own. What is measured is what the trainer holds between
two steps (weights, slots, buffers) and the allocator's highest reading above that
in a step. It is confirmed by what the kernel saw: the high-water mark of the
process, above its memory before the model was made.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from _meter import bytes_of
from _report import Figure, arguments, finish
from _trainer_layers import make
from torch import Tensor

from torch_sm3.trainer import ReversibleTrainer

LIMIT = 1.10
CONFIRMED = 1.15


def _trainer(depth: int, options: argparse.Namespace) -> ReversibleTrainer:
    trainer: ReversibleTrainer = make(
        ReversibleTrainer,
        options.width,
        depth,
        exact="grid",
        n_microbatches=options.microbatches,
        clip_grad_norm=1.0 if options.clip else None,
    )
    return trainer


def status(field: str) -> int:
    """Return a line of ``/proc/self/status`` in bytes."""
    match = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if match is None:
        raise SystemExit(f"/proc/self/status has no {field}")
    return 1024 * int(match.group(1))


def resident(trainer: ReversibleTrainer) -> int:
    """Return the bytes of weights, buffers and slots."""
    tensors = [t for m in trainer.all_layers for t in m.state_dict().values()]
    slots = [
        value
        for optimizer in trainer.optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]
    return sum(tensor.nbytes for tensor in [*tensors, *slots])


def child(options: argparse.Namespace) -> None:
    """Measure one depth in this process."""
    small = argparse.Namespace(**{**vars(options), "width": 32})
    warm = _trainer(1, small)
    for step in range(2):
        warm.one_step(torch.randn(8, 32), rng=step)
    x = torch.randn(options.tokens, options.width)
    del warm
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # forgets the high-water mark
    before = status("VmRSS")
    trainer = _trainer(options.depth, options)
    for step in range(2):
        trainer.one_step(x, rng=step)
    high = status("VmHWM") - before
    step_bytes = bytes_of(lambda: trainer.one_step(x, rng=2)).peak
    contract = trainer.memory_contract(x)
    if trainer.overflows:
        raise SystemExit(f"streams beyond the grid were kept: {trainer.overflows}")
    found = {
        "measured": resident(trainer) + step_bytes,
        "contract": contract,
        "high_water": high,
    }
    print(json.dumps(found))


def measure(depth: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one depth in a fresh process."""
    command = [sys.executable, __file__, "--depth", str(depth)]
    for key in ("width", "tokens", "microbatches"):
        command += [f"--{key}", str(getattr(options, key))]
    command += ["--clip"] if options.clip else []
    # Freed blocks go back to the kernel at once, so that its reading is not of holes.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--depths", type=int, nargs="+", default=[8, 32, 64])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--clip", action="store_true", help="two backward passes")
    parser.add_argument("--depth", type=int, help=argparse.SUPPRESS)
    arguments(parser)
    options = parser.parse_args()
    if options.quick:
        options.tokens = 1024
    return options


def main() -> None:
    """Measure, print, and write the figures."""
    options = parse()
    if options.depth:
        child(options)
        return
    print(
        f"width {options.width}, {options.tokens} tokens, {options.microbatches} "
        f"microbatches, {'two passes' if options.clip else 'one pass'}"
    )
    figures, measured = [], {}
    for depth in options.depths:
        found = measured[str(depth)] = measure(depth, options)
        bound = sum(found["contract"].values())
        names = {k: v for k, v in found["contract"].items() if v >= 2**19}
        shown = ", ".join(f"{k} {v / 2**20:.0f}" for k, v in names.items())
        print(
            f"depth {depth}: measured {found['measured'] / 2**20:.0f} MiB, "
            f"contract {bound / 2**20:.0f} ({shown})"
        )
        share = found["measured"] / bound
        seen = found["high_water"] / found["measured"]
        figures += [
            Figure(f"depth {depth}: measured / contract", share, LIMIT),
            Figure(
                f"depth {depth}: high water of the process / measured",
                seen,
                CONFIRMED,
                2 - CONFIRMED,
            ),
        ]
    finish(figures, options, {"depths": measured})


if __name__ == "__main__":
    main()
