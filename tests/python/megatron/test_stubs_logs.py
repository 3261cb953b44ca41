# SPDX-License-Identifier: Apache-2.0
"""Log lines and scalars of the plug against texts, and against the stand-ins'."""

from __future__ import annotations

import math
from typing import Any

import pytest
from helpers import megatron_logs as logs
from helpers.megatron_logs import Step
from helpers.megatron_pools import StubPools
from helpers.megatron_ranks import PLUG

NAN = float("nan")


def _line(
    generation: str,
    iteration: int,
    losses: str,
    skipped: int = 0,
    nan: int = 0,
    last_skipped: bool = False,
) -> str:
    """Return the text that a line must have."""
    norms = " grad norm: 1.250 | num zeros: 3.0 | params norm: 2.500 |"
    if last_skipped:
        norms = " params norm: 2.500 |"
    if generation == "a":
        norms = ""
    return (
        f" iteration        {iteration}/       8 |"
        f" consumed samples: {4 * iteration:12d} |"
        " elapsed time per iteration (ms): * | learning rate: 1.000E-02 |"
        f" global batch size:     4 |{losses} loss scale: 4096.0 |{norms}"
        f" number of skipped iterations:   {skipped} |"
        f" number of nan iterations:   {nan} |"
    )


def _logged(
    stubs: StubPools,
    generation: str,
    strict: bool | None,
    steps: list[Step],
    **options: Any,
) -> Any:
    pool = stubs(generation, 1)
    return pool.run(logs.logged, generation, strict, steps, options)[0]


@pytest.mark.parametrize("generation", "abcd")
def test_averages_since_the_last_line(stubs: StubPools, generation: str) -> None:
    steps = [Step({"lm loss": x}) for x in (1.0, 2.0, 4.0, 5.0)]
    lines, _ = _logged(stubs, generation, False, steps, log_interval=2)
    assert lines == [
        _line(generation, 2, " lm loss: 1.500000E+00 |"),
        _line(generation, 4, " lm loss: 4.500000E+00 |"),
    ]


@pytest.mark.parametrize("generation", "abcd")
def test_a_skipped_step_counts_and_adds_nothing(
    stubs: StubPools, generation: str
) -> None:
    steps = [Step({"lm loss": 1.0}), Step({"lm loss": 9.0}, 1), Step({"lm loss": 2.0})]
    lines, _ = _logged(stubs, generation, False, steps, log_interval=3)
    assert lines == [_line(generation, 3, " lm loss: 1.500000E+00 |", skipped=1)]
    # Only skipped ones: there is no average.
    only = [Step({"lm loss": NAN}, 1)]
    lines, _ = _logged(stubs, generation, False, only)
    wanted = _line(generation, 1, "", skipped=1, nan=1, last_skipped=True)
    assert lines == [wanted]


@pytest.mark.parametrize("generation", "abcd")
def test_a_loss_that_is_not_a_number_is_seen(stubs: StubPools, generation: str) -> None:
    steps = [Step({"lm loss": NAN, "other": 1.0})]
    lines, _ = _logged(stubs, generation, False, steps)
    losses = f" lm loss: {NAN:.6E} | other: 1.000000E+00 |"
    assert lines == [_line(generation, 1, losses, nan=1)]
    strict, _ = _logged(stubs, generation, True, steps)
    assert strict == [_line(generation, 1, " other: 1.000000E+00 |")]


@pytest.mark.parametrize("generation", "abcd")
def test_averages_that_are_not_positive_are_seen(
    stubs: StubPools, generation: str
) -> None:
    steps = [Step({"zero": 0.0, "below": -2.0})]
    lines, _ = _logged(stubs, generation, False, steps)
    losses = " zero: 0.000000E+00 | below: -2.000000E+00 |"
    assert lines == [_line(generation, 1, losses)]
    strict, _ = _logged(stubs, generation, True, steps)
    assert strict == [_line(generation, 1, "")]


@pytest.mark.parametrize("generation", "abcd")
def test_a_strict_log_is_that_of_megatron(stubs: StubPools, generation: str) -> None:
    steps = [
        Step({"lm loss": 1.0, "other": -1.0}),
        Step({"lm loss": NAN, "other": 0.0}, 1),
        Step({"lm loss": NAN, "other": 3.0}),
        Step({"lm loss": 2.0, "other": math.inf}),
        Step({"lm loss": 2.0, "other": 1.0}),
        Step({"lm loss": 2.0, "other": 1.0}, 1),
    ]
    for interval in (1, 2, 3):
        bare, plugged = (
            _logged(stubs, generation, strict, steps, log_interval=interval)
            for strict in (None, True)
        )
        # NaN is not equal to itself.
        assert repr(bare) == repr(plugged)
        assert len(bare[0]) == 6 // interval


@pytest.mark.parametrize("generation", "abcd")
def test_scalars(stubs: StubPools, generation: str) -> None:
    _, scalars = _logged(stubs, generation, False, [Step({"lm loss": 1.5})])
    values = {
        "learning-rate": 0.01,
        "batch-size": 4.0,
        "lm loss": 1.5,
        "loss-scale": 4096.0,
    }
    if generation in "cd":
        values["world-size"] = 1.0
    if generation != "a":
        values |= {"grad-norm": 1.25, "num-zeros": 3.0, "params-norm": 2.5}
    wanted = [(name, value, 1) for name, value in values.items()]
    wanted += [(f"{name} vs samples", value, 4) for name, value in values.items()]
    assert sorted(scalars) == sorted(wanted)
    assert [s[0] for s in scalars[::2]] == list(values)


@pytest.mark.parametrize("generation", "bcd")
def test_scalars_that_are_not_asked_for(stubs: StubPools, generation: str) -> None:
    off = {
        f"log_{name}_to_tensorboard": False
        for name in ("learning_rate", "batch_size", "loss_scale")
    }
    steps = [Step({"lm loss": x}) for x in (1.0, 2.0, 3.0)]
    options = {**off, "tensorboard_log_interval": 2}
    _, scalars = _logged(stubs, generation, False, steps, **options)
    assert {s[2] for s in scalars} == {2, 8}
    names = {s[0] for s in scalars if s[2] == 2}
    extra = {"world-size"} if generation in "cd" else set()
    assert names == {"lm loss", "grad-norm", "num-zeros", "params-norm"} | extra


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("generation", "abcd")
def test_an_overflow_skips_a_step(stubs: StubPools, generation: str, size: int) -> None:
    pool = stubs(generation, size)
    bare = pool.run(logs.overflows, generation, False)
    plugged = pool.run(logs.overflows, generation, True)
    assert PLUG["optimizer"] is None
    for (lines, weights, rate), (others, found, other) in zip(
        bare, plugged, strict=True
    ):
        assert lines == others and rate == other
        assert all((a == b).all() for a, b in zip(weights, found, strict=True))
    skipped = ["number of skipped iterations:   1 |" in line for line in plugged[-1][0]]
    assert skipped[0] and not skipped[-1]
    assert "learning rate: 1.000E-02" in plugged[-1][0][0]
