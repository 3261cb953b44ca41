# SPDX-License-Identifier: Apache-2.0
"""Random numbers that depend on the stage and the microbatch, not on the schedule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from torch_sm3 import _ops


def seed_of(seed: int, step: int, stage: int, microbatch: int, evaluation: bool) -> int:
    """Return the seed of one forward.

    Args:
        seed: of the run.
        step: number of the step.
        stage: number of the stage.
        microbatch: number of the microbatch.
        evaluation: whether it belongs to an eval.
    """
    wrapped = seed % (1 << 63)
    made = _ops.pipeline_machine_class().seed_of(
        wrapped, step, stage, microbatch, evaluation
    )
    return int(made)


def devices_of(modules: Iterable[torch.nn.Module]) -> list[torch.device]:
    """Return the CUDA devices that hold parameters or buffers of modules."""
    return sorted(
        {
            tensor.device
            for module in modules
            for tensor in (*module.parameters(), *module.buffers())
            if tensor.is_cuda
        },
        key=str,
    )


class Surroundings:
    """What forwards change besides their results: generators and buffers.

    Args:
        stages: whose buffers.
        devices: CUDA devices besides the CPU.
    """

    def __init__(
        self, stages: Iterable[torch.nn.Module], devices: list[torch.device]
    ) -> None:
        self._devices = devices
        self._cpu = torch.default_generator.get_state()
        self._cuda = [torch.cuda.get_rng_state(device) for device in devices]
        buffers = {b for module in stages for b in module.buffers()}
        self._buffers = [(b, b.detach().clone()) for b in buffers]

    @torch.no_grad()
    def restore(self) -> None:
        """Make them what they were."""
        torch.default_generator.set_state(self._cpu)
        for device, state in zip(self._devices, self._cuda, strict=True):
            torch.cuda.set_rng_state(state, device)
        for buffer, before in self._buffers:
            buffer.copy_(before)


@contextmanager
def seeded(number: int, devices: list[torch.device]) -> Iterator[None]:
    """Run with seeded generators; those of the caller are as before afterwards.

    Args:
        number: the seed.
        devices: CUDA devices besides the CPU.
    """
    with kept(devices):
        torch.default_generator.manual_seed(number)
        for device in devices:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(number)
        yield


@contextmanager
def kept(devices: list[torch.device]) -> Iterator[None]:
    """Give the caller's generators back as they were.

    Args:
        devices: CUDA devices besides the CPU.
    """
    state = torch.default_generator.get_state()
    states = [torch.cuda.get_rng_state(device) for device in devices]
    try:
        yield
    finally:
        torch.default_generator.set_state(state)
        for device, own in zip(devices, states, strict=True):
            torch.cuda.set_rng_state(own, device)
