# SPDX-License-Identifier: Apache-2.0
"""Trace a step of four sleeping ranks over Gloo; draw docs/figures/pipeline_trace.svg.

A stage sleeps 20 ms for each of F, I and W, stage 2 half as long again.
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from torch_sm3.pipeline import PipelineRunner, Stage, plan, plot
from torch_sm3.pipeline.trace import Trace

RANKS, MICROBATCHES, STEPS = 4, 8, 3
SECONDS, SLOW, FACTOR = 0.02, 2, 1.5


class Pause(torch.autograd.Function):
    """Pass a tensor on; sleep on the way and on the way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: float, back: float) -> torch.Tensor:
        """Sleep and return a copy."""
        ctx.back = back
        time.sleep(there)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Sleep and return the gradient."""
        time.sleep(ctx.back)
        return gradient, None, None


class Sleeper(nn.Module):
    """Take the same time for forward, input gradient and weight gradient."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(64))
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a linear layer's output; its weight waits for W by itself."""
        weight = Pause.apply(self.weight, 0.0, self.seconds)
        return nn.functional.linear(Pause.apply(x, self.seconds, self.seconds), weight)


def step(rank: int, port: int, path: str) -> None:
    """Run some steps as one rank; rank 0 writes the trace of the last."""
    torch.set_num_threads(1)
    import faulthandler

    faulthandler.dump_traceback_later(14, exit=True)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    module = Sleeper(SECONDS * (FACTOR if rank == SLOW else 1))
    runner = PipelineRunner(
        [Stage(module, index=rank)],
        plan("zb_h1", RANKS, MICROBATCHES),
        loss_fn=nn.functional.mse_loss,
        trace=True,
    )
    batch = torch.zeros(4 * MICROBATCHES, 64)
    for _ in range(STEPS):
        runner.step(batch, target=torch.zeros_like(batch))
    runner.save_trace(path)
    text = str(runner.report())
    print(text if rank == 0 else "", end="")
    runner.close()
    dist.destroy_process_group()


def main() -> None:
    """Draw the trace."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        mp.spawn(step, (port, str(path)), nprocs=RANKS)
        chart = plot(Trace.load(path), width=1000, memory=True)
    target = Path(__file__).with_name("pipeline_trace.svg")
    target.write_text(chart.svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
