# SPDX-License-Identifier: Apache-2.0
"""SM3 on a GPU, where there is one: the bits of the CPU, graphs, no waiting.

Without a GPU the kernels run on the host, in ``tests/cpp/test_sm3_*_on_host.cpp``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.sm3_models import equal, parameters, snapshot

import torch_sm3
from torch_sm3 import SM3

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and torch_sm3.BUILD_INFO["cuda"]),
    reason="needs a GPU and a library built with CUDA",
)
SHAPES = [(), (0,), (7,), (2100,), (2, 2), (70, 300), (64, 512), (24, 6, 3, 3)]


def copies(params: list[torch.Tensor], device: str) -> list[torch.Tensor]:
    """Return parameters and gradients of the same bits on a device."""
    result = []
    for param in params:
        copy = param.detach().to(device, copy=True).requires_grad_()
        copy.grad = param.grad.to(device, copy=True)
        result.append(copy)
    return result


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9, "weight_decay": 0.1},
        {"variant": "I", "beta2": 0.9},
        {"compat": "trax", "momentum": 0.5, "weight_decay": 0.1},
        {"compat": "enealor", "beta2": 0.9, "maximize": True},
        {"momentum": 0.9, "momentum_dtype": torch.int8},
        {"dtype": torch.bfloat16, "stochastic_rounding": True, "momentum": 0.9},
        {"dtype": torch.bfloat16, "kahan": True},
        {"dtype": torch.float64, "momentum": 0.9},
    ],
    ids=str,
)
def test_a_gpu_has_the_bits_of_the_cpu(options: dict[str, Any]) -> None:
    options = dict(options)
    torch.manual_seed(0)
    made = parameters(*SHAPES, dtype=options.pop("dtype", torch.float32))
    here, there = copies(made, "cpu"), copies(made, DEVICE)
    one, other = SM3(here, fused=True, **options), SM3(there, fused=True, **options)
    for _ in range(3):
        one.step()
        other.step()
    moved = [tensor.cpu() for tensor in snapshot(other)]
    assert equal([tensor.cpu() for tensor in snapshot(one)], moved)


def test_sm3_row_24_a_graph_reads_the_learning_rate_at_each_replay() -> None:
    torch.manual_seed(0)
    made = parameters(*SHAPES)
    here, there = copies(made, "cpu"), copies(made, DEVICE)
    rate = torch.tensor(0.1, device=DEVICE)
    captured = SM3(there, lr=rate, momentum=0.9, fused=True, capturable=True)
    captured.init_state()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.step()
    eager = SM3(here, lr=0.1, momentum=0.9)
    for value in (0.1, 0.01, 0.3):
        rate.fill_(value)
        graph.replay()
        eager.param_groups[0]["lr"] = value
        eager.step()
    assert equal(snapshot(eager)[: len(here)], [p.detach().cpu() for p in there])
    assert int(captured.state[there[0]]["step"]) == 3


def test_no_step_waits_for_the_gpu() -> None:
    there = copies(parameters(*SHAPES), DEVICE)
    optimizer = SM3(there, lr=torch.tensor(0.1, device=DEVICE), fused=True)
    optimizer.step()
    optimizer.grad_scale = torch.tensor(2.0, device=DEVICE)
    optimizer.found_inf = torch.tensor(0.0, device=DEVICE)
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_ten_thousand_tensors_are_at_most_eight_launches() -> None:
    there = copies(parameters(*([(4, 20), (30,)] * 5000)), DEVICE)
    optimizer = SM3(there, fused=True)
    optimizer.step()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        optimizer.step()
        torch.cuda.synchronize()
    kernels = [
        event
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    assert 2 <= len(kernels) <= 8
