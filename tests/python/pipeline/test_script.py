# SPDX-License-Identifier: Apache-2.0
"""The schedule class inside TorchScript."""

from __future__ import annotations

import io

import pytest
import torch

from torch_sm3.pipeline import plan


class Counter(torch.nn.Module):
    """Hold a schedule and plan another."""

    def __init__(self) -> None:
        super().__init__()
        self.schedule = torch.classes.torch_sm3.PipelineSchedule("1f1b", 2, 1, 3)

    def forward(self, rank: int) -> tuple[str, int]:
        forwards = 0
        for op, _stage, _microbatch, _route, _paired in self.schedule.actions(rank):
            if op == "F":
                forwards += 1
        return self.schedule.lower().text(), forwards


@torch.jit.script
def replan(kind: str, ranks: int, m: int) -> str:
    made = torch.classes.torch_sm3.PipelineSchedule(kind, ranks, 1, m)
    return made.text()


@torch.jit.script
def weigh(kind: str, ranks: int, m: int, forward: float) -> tuple[str, float, float]:
    made = torch.classes.torch_sm3.PipelineSchedule(kind, ranks, 1, m)
    costs: dict[str, list[float]] = {"F": [forward], "activation_bytes": [8.0]}
    limits: list[float] = []
    rule, _, _, _, peaks, _ = made.verify("rendezvous", 1, costs, limits, False)
    makespan, _, _, _, _, _, _ = made.simulate(costs, "rendezvous", 1, False)
    return rule, peaks[0], makespan


def test_a_scripted_function_verifies_and_simulates() -> None:
    # 2 warm-up forwards and the one before the first backward; (m + p - 1)(F + B).
    assert weigh("1f1b", 3, 5, 4.0) == ("none", 24.0, 7 * 6.0)


def test_a_scripted_module_keeps_its_schedule_through_save_and_load() -> None:
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(Counter()), file)
    file.seek(0)
    loaded = torch.jit.load(file)
    schedule = plan("1f1b", 2, 3)
    for rank in (0, 1):
        assert loaded(rank) == (schedule.lower().text, 3)


def test_a_scripted_function_plans() -> None:
    assert replan("gpipe", 2, 4) == plan("gpipe", 2, 4).text
    with pytest.raises(Exception, match="expected kind in"):
        replan("gpip", 2, 4)


def test_the_class_names_its_arguments() -> None:
    made = torch.classes.torch_sm3.PipelineSchedule(
        kind="forward", ranks=2, chunks=2, microbatches=1
    )
    assert made.stages() == 4 and made.placement() == [0, 1, 0, 1]
    assert made.text() == plan("forward", 2, 1, chunks=2).text
    with pytest.raises(ValueError, match=r"a rank from 0 to 1, but got 2"):
        made.actions(2)
