# SPDX-License-Identifier: Apache-2.0
"""Evaluations, checkpoints, exits and fine-tuning, on the stand-ins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers import megatron_loops as loops
from helpers.megatron_pools import StubPools
from helpers.megatron_ranks import differing

_ALL = ("exited", "weights", "lines", "done", "samples", "from")


def _trained(
    stubs: StubPools,
    generation: str,
    size: int = 1,
    late: int | None = None,
    signal: bool = False,
    **options: Any,
) -> list[dict[str, Any]]:
    """Train without the plug and with it; return the latter's answers."""
    pool = stubs(generation, size)
    bare, plugged = (
        pool.run(loops.trained, generation, with_plug, options, late, signal)
        for with_plug in (False, True)
    )
    for one, other in zip(bare, plugged, strict=True):
        assert differing(one, other, *_ALL) == []
    return plugged


def _done(answers: list[dict[str, Any]]) -> list[str]:
    return [e for e in answers[0]["done"] if "before the start" not in e]


@pytest.mark.parametrize("generation", "abcd")
def test_evaluations_and_checkpoints_at_their_intervals(
    stubs: StubPools, generation: str, tmp_path: Path
) -> None:
    answers = _trained(
        stubs,
        generation,
        train_iters=5,
        eval_interval=2,
        do_valid=True,
        save=str(tmp_path),
        save_interval=3,
    )
    assert _done(answers) == [
        "evaluate_and_print_results: iteration 2",
        "save_checkpoint_and_time: 3",
        "evaluate_and_print_results: iteration 4",
    ]
    assert answers[0]["samples"] == (20, 16)
    assert sum("validation loss at" in line for line in answers[0]["lines"]) == 2


@pytest.mark.parametrize("generation", "abcd")
def test_an_exit_by_interval(stubs: StubPools, generation: str, tmp_path: Path) -> None:
    ends = "print_datetime: exiting program at iteration 2"
    options: dict[str, Any] = {"train_iters": 5, "exit_interval": 2}
    answers = _trained(stubs, generation, **options)
    assert answers[0]["exited"] and _done(answers) == [ends]
    options["save"] = str(tmp_path)
    saves = "save_checkpoint_and_time: 2"
    assert _done(_trained(stubs, generation, **options)) == [saves, ends]
    # What was just saved is not saved again.
    answers = _trained(stubs, generation, **options, save_interval=2)
    assert _done(answers) == [saves, ends]


@pytest.mark.parametrize("generation", "abcd")
def test_an_exit_by_minutes_of_any_rank(
    stubs: StubPools, generation: str, tmp_path: Path
) -> None:
    options = {"train_iters": 3, "exit_duration_in_mins": 100, "save": str(tmp_path)}
    assert not _trained(stubs, generation, 2, **options)[0]["exited"]
    for answer in _trained(stubs, generation, 2, late=1, **options):
        assert answer["exited"]
        assert [e.split(":")[0] for e in answer["done"]] == [
            "print_datetime",
            "save_checkpoint_and_time",
            "print_datetime",
        ]
        assert "exiting program after minutes" in answer["done"][-1]


@pytest.mark.parametrize("generation", "cd")
def test_an_exit_by_signal(stubs: StubPools, generation: str, tmp_path: Path) -> None:
    options = {"exit_signal_handler": True, "save": str(tmp_path)}
    assert not _trained(stubs, generation, **options)[0]["exited"]
    answers = _trained(stubs, generation, signal=True, **options)
    assert answers[0]["exited"] and _done(answers) == [
        "save_checkpoint_and_time: 1",
        "print_datetime: exiting program after receiving",
    ]


@pytest.mark.parametrize("generation", "abcd")
def test_a_cluster_is_asked_whether_to_resume_elsewhere(
    stubs: StubPools, generation: str
) -> None:
    options = {"adlr_autoresume": True, "adlr_autoresume_interval": 2}
    answers = _trained(stubs, generation, train_iters=5, **options)
    asked = "check_adlr_autoresume_termination"
    assert _done(answers) == [f"{asked}: 2", f"{asked}: 4"]


@pytest.mark.parametrize("generation", "abcd")
def test_a_checkpoint_is_resumed(
    stubs: StubPools, generation: str, tmp_path: Path
) -> None:
    pool = stubs(generation, 2)
    whole = pool.run(loops.trained, generation, True, {"train_iters": 4})
    save = {"train_iters": 2, "save": str(tmp_path), "save_interval": 2}
    pool.run(loops.trained, generation, True, save)
    for plugged in (False, True):
        load = {"train_iters": 4, "load": str(tmp_path)}
        resumed = pool.run(loops.trained, generation, plugged, load)
        for one, other in zip(whole, resumed, strict=True):
            assert other["from"] == 2
            assert differing(one, other, "weights") == []
        assert resumed[-1]["lines"] == whole[-1]["lines"][2:]


def _tuned(
    stubs: StubPools, generation: str, size: int = 1, stages: int = 1, **options: Any
) -> list[dict[str, Any]]:
    """Fine-tune without the plug and with it; return the latter's answers."""
    pool = stubs(generation, size)
    bare, plugged = (
        pool.run(loops.tuned, generation, with_plug, stages, options)
        for with_plug in (False, True)
    )
    for one, other in zip(bare, plugged, strict=True):
        names = "error", "seen", "ended", "done", "lines", "weights"
        assert differing(one, other, *names) == []
    return plugged


@pytest.mark.parametrize("generation", "abcd")
def test_fine_tuning_by_epochs(
    stubs: StubPools, generation: str, tmp_path: Path
) -> None:
    options = {"epochs": 2, "eval_interval": 4, "save": str(tmp_path)}
    answer = _tuned(stubs, generation, **options)[0]
    assert answer["ended"] == [0, 1] and answer["error"] == ""
    assert answer["done"] == [
        "save_checkpoint: 3",
        "evaluate_and_print_results: iteration 4",
        "save_checkpoint: 6",
    ]
    # Three batches of each epoch, in another order, and two of the evaluation.
    first, second = answer["seen"][:3], [answer["seen"][3], *answer["seen"][6:]]
    for epoch in (first, second):
        assert sorted(n for batch in epoch for n in batch) == list(range(6))
    assert first != second
    assert len(answer["lines"]) == 6 + 3


@pytest.mark.parametrize("generation", "abcd")
def test_fine_tuning_goes_on_where_it_ended(
    stubs: StubPools, generation: str, tmp_path: Path
) -> None:
    whole = _tuned(stubs, generation, epochs=2)[0]
    pool = stubs(generation, 1)
    save = {"epochs": 1, "save": str(tmp_path), "lr_decay_iters": 8}
    pool.run(loops.tuned, generation, True, 1, save)
    rest = _tuned(stubs, generation, epochs=2, load=str(tmp_path))[0]
    assert rest["seen"] == whole["seen"][3:] and rest["ended"] == [1]
    assert differing(whole, rest, "weights") == []
    # In the middle of an epoch.
    save = {"epochs": 2, "save": str(tmp_path), "save_interval": 4, "exit_interval": 4}
    pool.run(loops.stopped, generation, save)
    rest = _tuned(stubs, generation, epochs=2, load=str(tmp_path))[0]
    assert rest["seen"] == whole["seen"][4:] and rest["ended"] == [1]
    assert differing(whole, rest, "weights") == []


@pytest.mark.parametrize("generation", "abcd")
def test_fine_tuning_with_a_pipeline(stubs: StubPools, generation: str) -> None:
    answers = _tuned(stubs, generation, 2, 2, epochs=1)
    assert [a["ended"] for a in answers] == [[0], [0]]
    assert answers[0]["seen"] == answers[1]["seen"]


@pytest.mark.parametrize("generation", "bcd")
def test_fine_tuning_refuses_two_microbatches(
    stubs: StubPools, generation: str
) -> None:
    answer = _tuned(stubs, generation, epochs=1, microbatches=2)[0]
    assert answer["error"].startswith(
        "finetuning with gradient accumulation doesn't currently work"
    )
    assert answer["seen"] == []
