# SPDX-License-Identifier: Apache-2.0
"""Delta mode over Gloo processes: the rule, and what surrounds a step."""

import numpy as np
import pytest
import torch
from helpers import adasum_delta_ranks
from helpers.processes import run_ranks
from reference.adasum_oracle import adasum

from torch_sm3 import _ops


@pytest.fixture(scope="module", params=[1, 2, 3])
def ranks(request):
    """Results of everything, by rank; one set of processes per world size."""
    return run_ranks(request.param, adasum_delta_ranks.everything, timeout=400)


def real(tensor):
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def combine(leaves, **options):
    """Combine float32 or float64 changes, by the pure ops."""
    stack = torch.stack([real(leaf) for leaf in leaves])
    rows = stack.reshape(len(leaves), stack[0].numel())
    size = [rows.shape[1]]
    c = _ops.adasum_coefficients(_ops.adasum_gram(rows, size), **options)
    total = _ops.adasum_combine(rows, c, size).view(stack.shape[1:])
    return torch.view_as_complex(total) if leaves[0].is_complex() else total


def numbers(tensor):
    return real(tensor).double().numpy().ravel().astype(np.longdouble)


def assert_rule(ranks, steps_of, **options):
    """The end of each step is round(start + combined changes) on every rank.

    Bit for bit with the library's own combination, and by the oracle within the
    rounding of changes, sum and result.
    """
    world = len(ranks)
    everyone = [steps_of(rank) for rank in ranks]
    assert len(everyone[0]) > 0
    for step in range(len(everyone[0])):
        starts, _, ends = everyone[0][step]
        for other in everyone[1:]:
            assert all(map(torch.equal, other[step][0], starts))
            assert all(map(torch.equal, other[step][2], ends))
        for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
            leaves = [rank[step][1][index] for rank in everyone]
            if world == 1 and options.get("scale", 1.0) == 1.0:
                continue
            change = combine(leaves, **options)
            assert torch.equal(end, rounded_sum(start, change))
            if not options and start.numel():
                assert_is_oracle(start, leaves, end)


def rounded_sum(start, change):
    """Return start + change in the dtype of start, rounded once."""
    wide = real(start).double() + real(change).double()
    if start.dtype not in (torch.float16, torch.bfloat16):
        return start + change
    # Of the numbers around it the nearest: a cast from float64 would round twice.
    near = wide.to(start.dtype)
    around = [
        near,
        *(
            torch.nextafter(near, torch.full_like(near, s))
            for s in (torch.inf, -torch.inf)
        ),
    ]
    errors = torch.stack([(x.double() - wide).abs() for x in around])
    return torch.stack(around).gather(0, errors.argmin(0, keepdim=True))[0]


def assert_is_oracle(start, leaves, end):
    """Within the rounding of the changes, of their combination, and of the sum."""
    want = numbers(start) + adasum([numbers(leaf) for leaf in leaves])
    unit = torch.finfo(end.dtype).eps
    largest = max(1.0, float(np.abs(numbers(start)).max()))
    np.testing.assert_allclose(numbers(end), want, rtol=unit, atol=4 * 2**-24 * largest)


@pytest.mark.parametrize("kind", list(adasum_delta_ranks.KINDS))
def test_every_optimizer_obeys_the_rule(ranks, kind):
    assert_rule(ranks, lambda rank: rank["rule"][kind])


def test_something_has_moved_and_differs_between_ranks(ranks):
    for kind in adasum_delta_ranks.KINDS:
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
    names = [name for name, _ in adasum_delta_ranks.make_net().named_parameters()]
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
    initial = adasum_delta_ranks.make_net().parameters()
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


def assert_merged(kind, key, before, after):
    """One key of one parameter: what all ranks held, and what they hold now."""
    first = next(b for b in before if b is not None)
    rows = [torch.zeros_like(first) if b is None else b for b in before]
    rows = torch.stack(rows).double()
    if key.startswith("accumulator") or key in ("step", "exp_avg_sq", "square_avg"):
        assert torch.equal(after, rows.amax(0).to(after.dtype)), (kind, key)
    else:
        assert key in ("momentum_buffer", "exp_avg"), (kind, key)
        want = rows.mean(0).to(after.dtype)
        torch.testing.assert_close(after, want, rtol=0, atol=0)


def decoded(state):
    """Return what a quantised buffer stands for."""
    codes, scales = state["momentum_buffer"], state["momentum_scale"]
    return (
        codes.double()
        * scales.double().repeat_interleave(256, -1)[..., : codes.shape[-1]]
    )


def test_consolidated_state_is_equal_and_merged_by_key(ranks):
    for kind, (_, after, said) in ranks[0]["consolidation"].items():
        assert said == [True, len(ranks) == 1, True, len(ranks) == 1]
        everyone = [rank["consolidation"][kind][0] for rank in ranks]
        for index, merged in enumerate(after):
            before = [states[index] for states in everyone]
            for rank in ranks[1:]:
                other = rank["consolidation"][kind][1][index]
                assert other.keys() == merged.keys()
                assert all(torch.equal(other[k], merged[k]) for k in merged)
            assert merged.keys() == set().union(*before)
            if "momentum_scale" in merged:
                mean = sum(decoded(state) for state in before) / len(before)
                # Half a code; the largest of a block of 256 is 127 codes.
                half = float(mean.abs().max()) / 127 / 2 * 1.001
                assert (decoded(merged) - mean).abs().max() <= half
                assert len(ranks) == 1 or merged["momentum_buffer"].abs().max() == 127
                keys = merged.keys() - {"momentum_buffer", "momentum_scale"}
            else:
                keys = merged.keys()
            for key in keys:
                values = [state.get(key) for state in before]
                assert_merged(kind, key, values, merged[key])


def test_consolidation_reaches_state_that_a_rank_lacks(ranks):
    lacking = [rank["consolidation"]["Adam"][0][3] for rank in ranks[1:]]
    assert all(not state for state in lacking)
    for rank in ranks:
        assert float(rank["consolidation"]["Adam"][1][3]["step"]) == 3.0


def test_keys_without_a_rule_are_listed(ranks):
    world = len(ranks)
    for number, rank in enumerate(ranks):
        refused, kept, averaged = rank["merge_rules"]
        (kind, message), before, after = refused
        assert kind == "ValueError" and "['mu_product']" in message
        assert torch.equal(before[0]["exp_avg"], after[0]["exp_avg"])
        (kind, _), before, after = kept
        assert kind == "nothing"
        assert torch.equal(after[0]["mu_product"], before[0]["mu_product"])
        assert float(after[0]["step"]) == world
        (kind, _), before, after = averaged
        assert kind == "nothing" and float(after[0]["step"]) == number + 1
        products = [r["merge_rules"][2][1][0]["mu_product"].double() for r in ranks]
        assert torch.equal(after[0]["mu_product"], (sum(products) / world).float())


def test_adasum_row_10_resumed_delta_mode_has_the_bits_of_undisturbed_training(ranks):
    for rank in ranks:
        for kind, (straight, resumed, steps) in rank["resume"].items():
            assert all(map(torch.equal, straight, resumed))
            assert steps == {"SM3 int8": 20, "SM3": 20, "Adam": 25}[kind]


def test_adasum_row_20_replicas_of_delta_mode_are_equal_after_100_steps(ranks):
    for rank in ranks:
        for kind, (straight, _, _) in rank["resume"].items():
            assert all(map(torch.equal, straight, ranks[0]["resume"][kind][0]))


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
