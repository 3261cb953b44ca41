# SPDX-License-Identifier: Apache-2.0
"""Delta mode over Gloo processes: the rule, and what surrounds a step."""

import pytest
import torch
from helpers import adasum_delta_ranks
from helpers.adasum_delta_expect import assert_is_oracle, assert_rule, combine
from helpers.adasum_delta_twins import KINDS, make_net
from helpers.processes import run_ranks


@pytest.fixture(params=[1, 2, 3])
def ranks(request):
    """Results of everything, by rank; one set of processes per world size."""
    return adasum_delta_ranks.results(request.param)


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_optimizer_obeys_the_rule(ranks, kind):
    assert_rule(ranks, lambda rank: rank["rule"][kind])


def test_something_has_moved_and_differs_between_ranks(ranks):
    for kind in KINDS:
        start, changes, end = ranks[0]["rule"][kind][0]
        assert not any(map(torch.equal, start, end))
        for other in ranks[1:]:
            assert not all(map(torch.equal, other["rule"][kind][0][1], changes))


def test_mode_and_scale_of_the_state(ranks):
    for mode, scale in ranks[0]["modes"]:
        steps = [rank["modes"][mode, scale] for rank in ranks]
        if mode in ("tree", "psum"):
            assert_rule(steps, lambda rank: rank, mode=mode, scale=scale)
            continue
        # The backend's all-reduce has an order of additions of its own.
        for number, (start, _, end) in enumerate(steps[0]):
            for index, (x, y) in enumerate(zip(start, end, strict=True)):
                total = sum(rank[number][1][index].double() for rank in steps)
                change = scale * total / (len(ranks) if mode == "mean" else 1)
                torch.testing.assert_close(y.double(), x + change, rtol=0, atol=2e-6)


def test_options_of_the_state_apply_to_changes(ranks):
    everyone = [rank["options_of_the_state"][0] for rank in ranks]
    world = len(ranks)
    for number, (starts, _, ends) in enumerate(everyone[0]):
        for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
            leaves = [steps[number][1][index] for steps in everyone]
            assert all(torch.equal(steps[number][2][index], end) for steps in everyone)
            if number == 0 or index == 1:
                change = sum(leaf.double() for leaf in leaves) / world
                expected = start.double() + change
                torch.testing.assert_close(end.double(), expected, rtol=0, atol=1e-6)
            elif world > 1:
                assert torch.equal(end, start + combine(leaves))
    names = [name for name, _ in make_net().named_parameters()]
    for rank in ranks:
        _, layers, steps, (kind, message) = rank["options_of_the_state"]
        assert steps == 2 and layers == (sorted(names) if world > 1 else [])
        assert kind == ("RuntimeError" if world > 1 else "nothing"), message
        assert world == 1 or "0.weight" in message


def test_every_dtype_is_rounded_once(ranks):
    assert_rule(ranks, lambda rank: rank["dtypes"][0])
    assert all(rank["dtypes"][1] for rank in ranks)


def test_combine_every_combines_the_changes_of_all_its_steps(ranks):
    assert_rule(ranks, lambda rank: rank["windows"])


def test_whole_runs_closures(ranks):
    assert_rule(ranks, lambda rank: rank["closures"][0])
    for rank in ranks:
        first, second = rank["closures"][1]
        assert second < first


def test_horovod_delta_optimizer(ranks):
    for rank in ranks:
        ((start, _, end),) = rank["convolutions"]
        for index, (x, y) in enumerate(zip(start, end, strict=True)):
            leaves = [other["convolutions"][0][1][index] for other in ranks]
            assert_is_oracle(x, leaves, y)
            assert torch.equal(y, ranks[0]["convolutions"][0][2][index])


def test_adasum_row_4_accumulated_micro_batches_before_a_step_in_delta_mode(ranks):
    for rank in ranks:
        (apart, steps), (together, _) = rank["accumulation"]
        assert steps == 1
        for one, other in zip(apart, together, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
        assert all(map(torch.equal, apart, ranks[0]["accumulation"][0][0]))


def test_missing_and_frozen_parameters_are_absent_leaves(ranks):
    assert_rule(ranks, lambda rank: rank["missing_gradients"])
    for start, _, end in ranks[0]["missing_gradients"]:
        assert torch.equal(start[1], end[1])
    world = len(ranks)
    moved = [not torch.equal(s[0], e[0]) for s, _, e in ranks[0]["missing_gradients"]]
    assert moved == [world > 1] * 3


def test_adasum_row_7_scaled_losses_with_an_infinity_on_one_rank(ranks):
    for rank in ranks:
        for key, (scales, moved, same, params) in rank["scaling"].items():
            assert scales == [1024.0, 512.0, 512.0, 1024.0]
            assert moved == [True, False, True, True]
            # Scales of 2^k leave no trace: the bits of unscaled steps.
            assert same
            assert all(torch.isfinite(p).all() for p in params)
            assert all(map(torch.equal, params, ranks[0]["scaling"][key][3]))


def test_without_the_scaler_ranks_skip_together_but_scales_part(ranks):
    answers = [rank["scales_without_the_scaler"] for rank in ranks]
    assert all(skipped for skipped, _ in answers)
    assert [scale for _, scale in answers] == [1024.0] * (len(ranks) - 1) + [512.0]


def test_schedules_hooks_and_groups(ranks):
    assert_rule(ranks, lambda rank: rank["around"][0])
    for rank in ranks:
        _, calls, rates, gone, text = rank["around"]
        assert calls == ["before", "inner before", "inner after", "after"] * 2
        assert rates == [0.05] and gone
        assert text.startswith("AdasumOptimizer (combine_every=1, whole=False) of SGD")


def test_start_values_are_compared_or_copied(ranks):
    last = len(ranks) - 1
    for rank in ranks:
        answers = rank["start_values"]
        for key, name in (
            ("at construction", "4.weight"),
            ("new group", "parameter 0 of group 1"),
        ):
            kind, message = answers[key]
            if last == 0:
                assert kind == "nothing"
                continue
            assert kind == "RuntimeError"
            who = f"rank {last}" if key == "at construction" or last == 1 else "ranks 1"
            assert f"got another {name} on {who}" in message
            assert "broadcast=True" in message
        kind, message = answers["shapes"]
        assert kind == ("nothing" if last == 0 else "RuntimeError")
        assert last == 0 or f"others on rank {last} (3) than on rank 0 (2)" in message
        first = ranks[0]["start_values"]["repaired"]
        assert all(map(torch.equal, answers["repaired"], first))
    initial = make_net().parameters()
    if last:
        repaired = ranks[last]["start_values"]["repaired"]
        assert all(map(torch.equal, initial, repaired))


def test_a_step_that_changes_its_groups_must_be_whole(ranks):
    for rank in ranks:
        (kind, message), untouched, count = rank["group_values"]
        if len(ranks) == 1:
            assert kind == "nothing"
        else:
            assert kind == "RuntimeError" and untouched
            assert "got another 'count' in group 0" in message
            assert "whole=True" in message
        assert count == 1


def test_a_failure_in_one_ranks_step_is_an_error_on_all(ranks):
    if len(ranks) == 1:
        pytest.skip("one rank fails alone")
    *others, last = [rank["local_failure"] for rank in ranks]
    for whole in (False, True):
        kind, message = last[whole][0]
        assert kind == "RuntimeError" and message == "out of luck"
        for answer in others:
            (kind, message), taken, *_ = answer[whole]
            assert kind == "DistBackendError", message
            # Told, not timed out: the timeout is 20 s.
            assert taken < 15
        _, _, start, after, again = last[whole]
        for answer in others:
            assert all(map(torch.equal, answer[whole][3], after))
            assert all(map(torch.equal, answer[whole][4], again))
        # What stood in the buckets before has been combined on every rank.
        moved = [not torch.equal(a, b) for a, b in zip(start, after, strict=True)]
        assert moved == [not whole, not whole, False, False, False]
        assert not any(map(torch.equal, after, again))


def test_one_rank_has_the_bits_of_the_wrapped_optimizer(ranks):
    for rank in ranks:
        assert all(rank["one_rank_has_the_bits_of_the_wrapped_optimizer"].values())


@pytest.mark.parametrize("how", ["killed", "silent"])
def test_a_lost_rank_is_an_error_on_the_others(how):
    function = adasum_delta_ranks.lose_a_peer
    *others, _ = run_ranks(3, function, how, timeout=120, may_die=(2,))
    for (kind, message), (again, _), (closing, _), taken, untouched in others:
        assert kind == again == "DistBackendError"
        assert "AdasumOptimizer.step" in message
        assert closing == "nothing"
        # The timeout of the state is 4 s.
        assert taken < 60
        assert untouched
