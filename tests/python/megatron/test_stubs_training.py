# SPDX-License-Identifier: Apache-2.0
"""Trainings of the stand-ins with the plug and without it, bit for bit."""

from __future__ import annotations

import pytest
from helpers import megatron_options as options
from helpers import megatron_ranks as ranks
from helpers.megatron_pools import StubPools
from helpers.megatron_ranks import Case

ALL = ("weights", "evaluation", "later", "lines", "calls")
# With as many microbatches as stages, Megatron interleaves all forwards first.
NO_CALLS = ALL[:-1]


def _numbers(stages: int) -> list[int]:
    wanted = {1, stages - 1, stages, stages + 1, 2 * stages + 1}
    return sorted(wanted - {0})


def _equal(
    stubs: StubPools, generation: str, size: int, cases: list[Case], names: tuple = ALL
) -> None:
    pool = stubs(generation, size)
    answers = pool.run(ranks.compare, generation, cases, names, timeout=300.0)
    assert answers == [[]] * size


@pytest.mark.parametrize("generation", "abcd")
def test_one_and_two_ranks_train_as_without_the_plug(
    stubs: StubPools, generation: str
) -> None:
    _equal(stubs, generation, 1, [Case(1, 3)])
    _equal(stubs, generation, 2, [Case(1, 2), Case(2, 1), Case(2, 3)])


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("generation", "abcd")
def test_every_number_of_stages_replicas_and_microbatches(
    stubs: StubPools, generation: str, size: int
) -> None:
    stages = [p for p in (1, 2, 4) if size // p in (1, 2)]
    cases = [Case(p, m) for p in stages for m in _numbers(p)]
    _equal(stubs, generation, size, cases)


@pytest.mark.parametrize("generation", "bcd")
def test_two_ranks_interleave_as_without_the_plug(
    stubs: StubPools, generation: str
) -> None:
    _equal(stubs, generation, 2, [Case(2, 4, 2)])
    _equal(stubs, generation, 2, [Case(2, 2, 2)], NO_CALLS)


@pytest.mark.slow
@pytest.mark.parametrize("generation", "bcd")
def test_four_ranks_interleave_as_without_the_plug(
    stubs: StubPools, generation: str
) -> None:
    more = (("num_layers", 8),)
    _equal(stubs, generation, 4, [Case(4, 8, 2, None, more), Case(2, 4, 2)])
    _equal(stubs, generation, 4, [Case(4, 4, 2, None, more), Case(2, 2, 2)], NO_CALLS)
    # A single chunk of each rank.
    _equal(stubs, generation, 4, [Case(4, 8, 1)])
    _equal(stubs, generation, 4, [Case(4, 4, 1)], NO_CALLS)


@pytest.mark.parametrize("generation", "bcd")
def test_chunks_take_any_number_of_microbatches(
    stubs: StubPools, generation: str
) -> None:
    for m in (1, 3, 5):
        whole = stubs(generation, 1).run(options.by_name, generation, Case(1, m))[0]
        parts = stubs(generation, 2).run(options.by_name, generation, Case(2, m, 2))
        assert options.apart(whole, parts) < 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("generation", "bcd")
def test_chunks_of_four_ranks_take_any_number_of_microbatches(
    stubs: StubPools, generation: str
) -> None:
    for m in _numbers(4):
        whole = stubs(generation, 1).run(options.by_name, generation, Case(1, m))[0]
        parts = stubs(generation, 4).run(options.by_name, generation, Case(4, m, 1))
        assert options.apart(whole, parts) < 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("split", [1, 2, 3])
@pytest.mark.parametrize("generation", "cd")
def test_an_encoder_and_a_decoder_are_split_anywhere(
    stubs: StubPools, generation: str, split: int
) -> None:
    more = (("encoder_num_layers", split), ("decoder_num_layers", 4 - split))
    cases = [Case(4, m, None, split, more) for m in _numbers(4)]
    _equal(stubs, generation, 4, cases)
    whole = stubs(generation, 1).run(
        options.by_name, generation, Case(1, 5)._replace(split=split, more=more)
    )[0]
    parts = stubs(generation, 4).run(options.by_name, generation, cases[3])
    assert cases[3].microbatches == 5
    assert options.apart(whole, parts) < 2e-6


@pytest.mark.parametrize("generation", "cd")
def test_an_encoder_and_a_decoder_on_two_ranks(
    stubs: StubPools, generation: str
) -> None:
    _equal(stubs, generation, 1, [Case(1, 2, None, 1)])
    _equal(stubs, generation, 2, [Case(2, 3, None, 1)])


@pytest.mark.parametrize("generation", "abcd")
def test_fp16_with_a_pipeline(stubs: StubPools, generation: str) -> None:
    _equal(stubs, generation, 2, [Case(2, 3, None, None, (("fp16", True),))])


@pytest.mark.slow
@pytest.mark.parametrize("generation", "bcd")
def test_half_precision_with_a_pipeline(stubs: StubPools, generation: str) -> None:
    fp16, bf16 = (("fp16", True),), (("bf16", True),)
    # Buffers of gradients in fp32.
    in_fp32 = (("accumulate_allreduce_grads_in_fp32", True),)
    cases = [Case(2, 3, None, None, bf16), Case(2, 4, 2, None, fp16)]
    if generation in "cd":
        cases.append(Case(2, 3, None, None, fp16 + in_fp32))
        cases.append(Case(2, 3, None, 1, fp16))
    _equal(stubs, generation, 2, cases)
