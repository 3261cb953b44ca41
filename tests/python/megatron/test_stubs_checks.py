# SPDX-License-Identifier: Apache-2.0
"""Memory, sums of embeddings, references and signatures, on the stand-ins."""

from __future__ import annotations

import pytest
from helpers import megatron_checks as checks
from helpers.megatron_pools import StubPools
from helpers.megatron_ranks import GENERATIONS, Case

_SPLIT = (("encoder_num_layers", 1), ("decoder_num_layers", 3))


@pytest.mark.parametrize("generation", "abcd")
def test_stand_ins_have_the_arguments_of_their_generation(
    stubs: StubPools, generation: str
) -> None:
    assert stubs(generation, 1).run(checks.names_of, generation) == [[]]


@pytest.mark.parametrize("generation", "abcd")
def test_an_evaluation_keeps_nothing(stubs: StubPools, generation: str) -> None:
    cases = [(1, Case(1, 4)), (2, Case(2, 4))]
    if generation != "a":
        cases.append((2, Case(2, 4, 2)))
    for size, case in cases:
        for most, end in stubs(generation, size).run(checks.kept, generation, case):
            # That of the step before may be on its way.
            assert most <= 2
            assert end == 0


@pytest.mark.parametrize("plugged", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("generation", "abcd")
def test_embeddings_are_summed_once_in_each_step(
    stubs: StubPools, generation: str, plugged: bool
) -> None:
    def sums(size: int, case: Case) -> list[tuple[int, int]]:
        return stubs(generation, size).run(checks.sums, generation, case, plugged)

    assert sums(1, Case(1, 2)) == [(0, 0)]
    assert sums(2, Case(2, 3)) == [(3, 0), (3, 0)]
    if generation in "bcd":
        assert sums(2, Case(2, 4, 2)) == [(3, 0), (3, 0)]
    if generation in "cd":
        assert sums(2, Case(2, 3, None, 1)) == [(3, 3), (3, 3)]


@pytest.mark.slow
@pytest.mark.parametrize("generation", "abcd")
def test_embeddings_of_four_ranks_are_summed_once(
    stubs: StubPools, generation: str
) -> None:
    pool = stubs(generation, 4)
    found = pool.run(checks.sums, generation, Case(4, 3), True)
    assert found == [(3, 0), (0, 0), (0, 0), (3, 0)]
    if generation in "cd":
        split = Case(4, 3, None, 1, _SPLIT)
        found = pool.run(checks.sums, generation, split, True)
        assert found == [(3, 3), (3, 3), (0, 0), (3, 0)]


@pytest.mark.parametrize("generation", "abcd")
def test_restore_puts_the_same_objects_back(stubs: StubPools, generation: str) -> None:
    found = stubs(generation, 1).run(checks.references, generation)[0]
    names = {"megatron.training.train_step", "tasks.finetune_utils.train_step"}
    if generation != "a":
        names.add("megatron.training.get_forward_backward_func")
        names.add("megatron.schedules.get_forward_backward_func")
    assert names <= set(found["changed"])
    assert found["text"].startswith(f"megatron: generation {GENERATIONS[generation]}\n")
    assert found["late"] == []
    assert found["later"] == [("late_script", "step")]
    assert "expected no installation" in found["twice"]
    assert found["restored"] == found["after an error"] == []


@pytest.mark.parametrize("how", ["renamed", "reordered", "removed", "required"])
@pytest.mark.parametrize("generation", "abcd")
def test_other_arguments_are_refused(
    stubs: StubPools, generation: str, how: str
) -> None:
    words = {
        "renamed": "missing: forward_step_func; new: step_of_the_user",
        "reordered": "reordered, there it is (forward_step_func, data_iterator,",
        "removed": "missing: data_iterator",
        "required": "new: microbatch_group",
    }
    for name in ("train_step", "forward_backward_no_pipelining"):
        pool = stubs(generation, 1)
        error, changed = pool.run(checks.refusals, generation, name, how)[0]
        assert f".{name}(" in error and words[how] in error
        assert "nearest is generation " in error
        assert changed == []


@pytest.mark.parametrize("generation", "abcd")
def test_further_optional_arguments_are_accepted(
    stubs: StubPools, generation: str
) -> None:
    for name in ("train_step", "forward_backward_no_pipelining"):
        pool = stubs(generation, 1)
        found = pool.run(checks.refusals, generation, name, "optional")[0]
        assert found == ("", [])
