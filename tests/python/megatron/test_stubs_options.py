# SPDX-License-Identifier: Apache-2.0
"""Less usual options of a Megatron, on the stand-ins."""

from __future__ import annotations

import pytest
import torch
from helpers import megatron_options as options
from helpers import megatron_ranks as ranks
from helpers.megatron_pools import StubPools
from helpers.megatron_ranks import Case

_ALL = ("weights", "evaluation", "later", "lines", "calls")


@pytest.mark.parametrize("generation", "bcd")
def test_data_parallelism_of_torch(stubs: StubPools, generation: str) -> None:
    case = Case(1, 3, None, None, (("DDP_impl", "torch"),))
    for size in (1, 2):
        pool = stubs(generation, size)
        assert pool.run(ranks.compare, generation, [case], _ALL) == [[]] * size


@pytest.mark.parametrize("generation", "cd")
def test_gradients_outside_of_buffers(stubs: StubPools, generation: str) -> None:
    case = Case(2, 3, None, None, (("use_contiguous_buffers_in_local_ddp", False),))
    pool = stubs(generation, 2)
    assert pool.run(ranks.compare, generation, [case], _ALL) == [[], []]


@pytest.mark.parametrize("generation", "b")
def test_buffers_do_not_keep_stale_gradients(stubs: StubPools, generation: str) -> None:
    # Megatron v2.5 clears buffers or gradients; the plug clears both.
    pool = stubs(generation, 1)
    buffers = Case(1, 3, None, None, (("use_contiguous_buffers_in_ddp", True),))
    found = pool.run(options.weights, generation, buffers, True)[0]
    wanted = pool.run(options.weights, generation, Case(1, 3), False)[0]
    stale = pool.run(options.weights, generation, buffers, False)[0]
    assert all(map(torch.equal, found, wanted))
    assert not all(map(torch.equal, stale, wanted))


@pytest.mark.parametrize("generation", "d")
def test_other_data_than_losses_is_collected(stubs: StubPools, generation: str) -> None:
    for size in (1, 2):
        pool = stubs(generation, size)
        case = Case(size, 3)
        bare = pool.run(options.collected, case, False)
        plugged = pool.run(options.collected, case, True)
        assert [lines for _, lines in bare] == [lines for _, lines in plugged]
        (wanted, at), (found, when) = bare[-1][0], plugged[-1][0]
        assert at == when == 7 and len(found) == 3
        assert all(map(torch.equal, wanted, found))
        assert all(got == [] for got, _ in plugged[:-1])


@pytest.mark.parametrize("generation", "bcd")
def test_timers_of_all_levels(stubs: StubPools, generation: str) -> None:
    more = (("log_timers_to_tensorboard", True),)
    if generation == "d":
        more += (("timing_log_level", 2),)
    case = Case(2, 3, None, None, more)
    pool = stubs(generation, 2)
    assert pool.run(ranks.compare, generation, [case], _ALL) == [[], []]


@pytest.mark.parametrize("generation", "abcd")
def test_forwards_and_backwards_are_timed(stubs: StubPools, generation: str) -> None:
    more = (("timing_log_level", 2),) if generation == "d" else ()
    pool = stubs(generation, 2)
    for names in pool.run(
        options.timers, generation, Case(2, 3, None, None, more), True
    ):
        assert {"forward-compute", "backward-compute", "optimizer"} <= names


@pytest.mark.parametrize("generation", "abcd")
def test_messages_are_timed(stubs: StubPools, generation: str) -> None:
    more = (("timing_log_level", 2),) if generation == "d" else ()
    pool = stubs(generation, 2)
    case = Case(2, 3, None, None, more)
    for plugged in (False, True):
        first, last = pool.run(options.timers, generation, case, plugged)
        assert "backward-recv" in first or "forward-send-backward-recv" in first
        assert "forward-recv" in last or "backward-send-forward-recv" in last


@pytest.mark.parametrize(
    "kind", ["gpipe", pytest.param("1f1b", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("generation", "abcd")
def test_a_kind_that_megatron_would_not_choose(
    stubs: StubPools, generation: str, kind: str
) -> None:
    pool = stubs(generation, 2)
    bare = pool.run(options.weights, generation, Case(2, 3), False)
    run = options.gpipe if kind == "gpipe" else options.one_f_one_b
    plugged = pool.run(run, generation, Case(2, 3))
    for one, other in zip(bare, plugged, strict=True):
        assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("generation", "abcd")
def test_the_number_of_microbatches_may_change(
    stubs: StubPools, generation: str
) -> None:
    cases = [Case(1, 2), Case(2, 2)]
    if generation != "a":
        cases.append(Case(2, 2, 2))
    for case in cases:
        pool = stubs(generation, case.stages)
        bare = pool.run(options.growing, generation, case, False)
        plugged = pool.run(options.growing, generation, case, True)
        for (one, lines), (other, others) in zip(bare, plugged, strict=True):
            assert lines == others
            assert all(map(torch.equal, one, other))
