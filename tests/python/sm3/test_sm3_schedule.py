# SPDX-License-Identifier: Apache-2.0
"""WarmupConstantLR against its closed form."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from torch_sm3 import SM3, WarmupConstantLR


def expected(t: int, w: int, power: float, total: int | None, fraction: float) -> float:
    """Return the factor of step ``t``, written from the formula."""
    warm = 1.0 if w == 0 else min(1.0, (t / w) ** power)
    if total is None:
        return warm
    cool = round(fraction * total)
    if t > total:
        return 0.0
    return warm * (1.0 if t <= total - cool else (total - t + 1) / cool)


def rates(scheduler, optimizer, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize(
    ("w", "power", "total", "fraction"),
    [
        (0, 2.0, None, 0.0),
        (5, 2.0, None, 0.0),
        (5, 1.0, 12, 0.0),
        (4, 0.5, 20, 0.3),
        (10, 2.0, 20, 0.5),
        (0, 2.0, 7, 0.9),
        (1, 2.0, 1, 0.0),
    ],
)
def test_rates_of_the_closed_form(w, power, total, fraction) -> None:
    optimizer = SM3([torch.nn.Parameter(torch.zeros(2))], lr=0.3)
    scheduler = WarmupConstantLR(
        optimizer, w, power=power, total_steps=total, cooldown_fraction=fraction
    )
    found = rates(scheduler, optimizer, 24)
    wanted = [0.3 * expected(t, w, power, total, fraction) for t in range(1, 25)]
    assert found == pytest.approx(wanted, rel=1e-15, abs=0)
    if total is not None:
        assert all(rate > 0 for rate in found[:total]), "no step at rate 0"


def test_groups_keep_their_base_rates_and_tensors_are_filled() -> None:
    a, b = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    lr = torch.tensor(0.5)
    optimizer = SM3([{"params": [a], "lr": lr}, {"params": [b], "lr": 2.0}])
    scheduler = WarmupConstantLR(optimizer, 2)
    assert optimizer.param_groups[0]["lr"] is lr and lr == 0.125
    assert optimizer.param_groups[1]["lr"] == 0.5
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] is lr and lr == 0.5
    assert optimizer.param_groups[1]["lr"] == 2.0


def test_a_resumed_run_has_the_same_rates() -> None:
    def make():
        optimizer = SM3([torch.nn.Parameter(torch.zeros(2))], lr=0.3)
        scheduler = WarmupConstantLR(
            optimizer, 7, total_steps=20, cooldown_fraction=0.2
        )
        return optimizer, scheduler

    optimizer, scheduler = make()
    whole = rates(scheduler, optimizer, 20)
    optimizer, scheduler = make()
    first = rates(scheduler, optimizer, 9)
    saved = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
    optimizer, scheduler = make()
    scheduler.load_state_dict(saved[1])
    optimizer.load_state_dict(saved[0])
    assert first + rates(scheduler, optimizer, 11) == whole
    # And by last_epoch, as torch's schedulers can.
    optimizer = SM3([torch.nn.Parameter(torch.zeros(2))])
    optimizer.load_state_dict(saved[0])
    scheduler = WarmupConstantLR(
        optimizer, 7, total_steps=20, cooldown_fraction=0.2, last_epoch=8
    )
    assert rates(scheduler, optimizer, 11) == whole[9:]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"warmup_steps": -1}, "'warmup_steps'"),
        ({"warmup_steps": 1, "power": 0.0}, "'power'"),
        ({"warmup_steps": 1, "power": -2.0}, "'power'"),
        ({"warmup_steps": 1, "power": math.nan}, "'power'"),
        ({"warmup_steps": 1, "cooldown_fraction": 0.1}, "'total_steps'"),
        (
            {"warmup_steps": 1, "total_steps": 9, "cooldown_fraction": 1.0},
            "'cooldown_fraction'",
        ),
        (
            {"warmup_steps": 1, "total_steps": 9, "cooldown_fraction": -0.1},
            "'cooldown_fraction'",
        ),
        ({"warmup_steps": 10, "total_steps": 9}, "'total_steps'"),
        (
            {"warmup_steps": 6, "total_steps": 10, "cooldown_fraction": 0.5},
            "6 warm-up . 5 cool-down",
        ),
    ],
    ids=str,
)
def test_bad_arguments_are_named(arguments, text) -> None:
    optimizer = SM3([torch.nn.Parameter(torch.zeros(2))])
    with pytest.raises(ValueError, match=text):
        WarmupConstantLR(optimizer, **arguments)
    assert optimizer.param_groups[0]["lr"] == 0.1
