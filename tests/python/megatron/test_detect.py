# SPDX-License-Identifier: Apache-2.0
"""Generations of Megatron are told by signatures; unknown ones change nothing."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from helpers import megatron_fakes as fakes

from torch_sm3 import megatron
from torch_sm3.megatron._signatures import GENERATIONS, SIGNATURES

STEP = "forward_step_func data_iterator model optimizer lr_scheduler"


def held(package: ModuleType) -> dict[tuple[str, str], object]:
    """Return all functions that modules of a package hold."""
    return {
        (module.__name__, name): value
        for module in list(sys.modules.values())
        if isinstance(module, ModuleType)
        and module.__name__.startswith(package.__name__)
        for name, value in vars(module).items()
        if callable(value)
    }


@pytest.mark.parametrize("generation", GENERATIONS)
def test_every_generation_is_told_by_its_signatures(generation: str) -> None:
    with fakes.package(generation) as package:
        found = megatron.detect(package)
    names = [name for name in SIGNATURES if name not in fakes.TASKS]
    # The first one with equal signatures stands for all of them.
    rows = [
        [fakes.row_of(name, other) for name in names]
        for other in (generation, found.generation)
    ]
    assert rows[0] == rows[1]
    assert GENERATIONS.index(found.generation) <= GENERATIONS.index(generation)
    assert set(found.functions) == {
        name for name, row in zip(names, rows[0], strict=True) if row is not None
    }


@pytest.mark.parametrize("generation", GENERATIONS)
def test_restore_leaves_no_trace(generation: str) -> None:
    with fakes.package(generation) as package:
        before = held(package)
        installation = megatron.install(package, optimizer=None)
        try:
            assert installation.rebound
            during = held(package)
            assert any(during[place] is not before[place] for place in before)
            assert installation.check() == []
            assert f"generation {installation.generation}" in str(installation)
            with pytest.raises(RuntimeError, match="expected no installation"):
                megatron.install(package)
        finally:
            megatron.restore()
        after = held(package)
        assert all(after[place] is before[place] for place in before)
        assert set(after) == set(before)
        megatron.restore()


def test_names_imported_elsewhere_are_rebound_too() -> None:
    script = ModuleType("a_script")
    sys.modules["a_script"] = script
    with fakes.package("B") as package:
        old = sys.modules[f"{package.__name__}.training"].train_step
        script.mine = old
        try:
            with megatron.installed(package, optimizer=None) as installation:
                assert script.mine is not old
                script.later = old
                assert installation.check() == [("a_script", "later")]
            assert script.mine is old
        finally:
            del sys.modules["a_script"]


def test_optional_arguments_at_the_end_are_a_fork() -> None:
    with fakes.package("B", {"train_step": STEP + " more= **rest"}) as package:
        found = megatron.detect(package)
    assert found.generation == "B"
    assert found.functions["train_step"].extra == ("more", "**rest")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (STEP.replace("model", "net"), ["missing: model", "new: net"]),
        ("data_iterator forward_step_func model optimizer lr_scheduler", ["reordered"]),
        (STEP.replace("optimizer ", ""), ["missing: optimizer"]),
        (STEP + " config more", ["new: config, more"]),
    ],
    ids=["renamed", "reordered", "removed", "required"],
)
def test_unknown_signatures_are_refused_and_nothing_changes(
    row: str, words: list[str]
) -> None:
    with fakes.package("B", {"train_step": row}) as package:
        before = held(package)
        with pytest.raises(megatron.MegatronSignatureError) as caught:
            megatron.install(package)
        after = held(package)
    text = str(caught.value)
    assert "others in 1 of" in text
    for word in ["training.train_step(", "nearest is generation", *words]:
        assert word in text, text
    assert all(after[place] is before[place] for place in before)
    with pytest.raises(RuntimeError, match="expected an installation, but got none"):
        megatron.train_step()


def test_a_package_without_schedules_is_none() -> None:
    with pytest.raises(ValueError, match="a Megatron package with pipeline schedules"):
        megatron.install(pytest)
