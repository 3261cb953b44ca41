# SPDX-License-Identifier: Apache-2.0
"""What the state of SM3 costs, and the warning where it costs too much."""

from __future__ import annotations

import pytest
import torch
from helpers.sm3_models import small_model, train

from torch_sm3 import SM3


def test_state_bytes_predicts_and_counts() -> None:
    cases = [
        (torch.float32, {"momentum": 0.9}),
        (torch.bfloat16, {"momentum": 0.9, "kahan": True}),
        (torch.float32, {}),
        (torch.float64, {"momentum": 0.9, "momentum_dtype": torch.float32}),
        (torch.float32, {"momentum": 0.5, "momentum_dtype": torch.int8}),
    ]
    for dtype, options in cases:
        model = torch.nn.Sequential(small_model(dtype), torch.nn.Linear(4, 1300))
        model.to(dtype)
        optimizer = SM3(model.parameters(), **options)
        predicted = optimizer.state_bytes(detail=True)
        assert not optimizer.state, "a prediction allocates nothing"
        train(model, optimizer, 1)
        counted = sum(
            t.numel() * t.element_size()
            for state in optimizer.state_dict()["state"].values()
            for t in state.values()
        )
        assert optimizer.state_bytes(detail=True) == predicted
        assert optimizer.state_bytes() == counted == sum(predicted.values())
        kinds = ["accumulator", "momentum", "scale", "compensation", "step"]
        assert list(predicted) == kinds


@pytest.mark.parametrize(
    ("shape", "floats"), [((11008, 4096), 15104), ((512, 512, 3, 3), 1030)]
)
def test_state_bytes_of_known_layers(shape, floats) -> None:
    weight = torch.nn.Parameter(torch.empty(shape, device="meta"))
    assert SM3([weight]).state_bytes(detail=True)["accumulator"] == 4 * floats


def test_flattened_models_are_warned_of_once() -> None:
    long = torch.nn.Parameter(torch.zeros(2**20, device="meta"))
    flat = torch.nn.Parameter(torch.zeros(8))
    flat._is_flat_param = True
    zero3 = torch.nn.Parameter(torch.zeros(8))
    zero3.ds_id = 0
    for param in (long, flat, zero3):
        optimizer = SM3([param, torch.nn.Parameter(torch.zeros(2**21, device="meta"))])
        with pytest.warns(UserWarning, match=r"FSDP2(.|\n)*set_shape_hint") as caught:
            optimizer.init_state()
            optimizer.init_state()
        assert len(caught) == 1


def test_hinted_and_ordinary_parameters_are_not_warned_of(recwarn) -> None:
    long = torch.nn.Parameter(torch.zeros(2**20, device="meta"))
    optimizer = SM3([long, torch.nn.Parameter(torch.zeros(2**20, 1, device="meta"))])
    optimizer.set_shape_hint(long, (1024, 1024))
    optimizer.init_state()
    assert not recwarn.list
