# SPDX-License-Identifier: Apache-2.0
"""State and checkpoints of delta mode over Gloo processes."""

import pytest
import torch
from helpers import adasum_delta_ranks


@pytest.fixture(params=[1, 2, 3])
def ranks(request):
    """Results of everything, by rank; one set of processes per world size."""
    return adasum_delta_ranks.results(request.param)


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


def test_quantised_tensors_are_merged_by_what_they_stand_for(ranks):
    if ranks[0]["quantised_tensors"] is None:
        pytest.skip("torchao is not installed")
    everyone = [rank["quantised_tensors"] for rank in ranks]
    for key in ("exp_avg", "exp_avg_sq"):
        rows = torch.stack([before[key] for before, _ in everyone])
        wanted = rows.mean(0) if key == "exp_avg" else rows.amax(0)
        for _, after in everyone:
            assert torch.equal(after[key], everyone[0][1][key])
            # Its codes lie 1 % of the largest of a block apart at most.
            largest = float(wanted.abs().max())
            torch.testing.assert_close(
                after[key], wanted, rtol=0.0, atol=0.02 * largest
            )


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


def test_states_of_other_kinds_are_refused_on_all_ranks(ranks):
    last = len(ranks) - 1
    said = ("float32 [3]", "float64 [4]", "a number", "but got list")
    for rank in ranks:
        for (kind, message), what in zip(rank["unlike_states"], said, strict=True):
            if last == 0:
                assert kind == "nothing"
                continue
            assert kind == "RuntimeError" and what in message
            assert what == "but got list" or f"on rank {last} and" in message


def test_adasum_row_10_resumed_delta_mode_has_the_bits_of_undisturbed_training(ranks):
    for rank in ranks:
        for kind, (straight, resumed, steps) in rank["resume"].items():
            assert all(map(torch.equal, straight, resumed))
            assert steps == {"SM3 int8": 20, "SM3": 20, "Adam": 25}[kind]


def test_adasum_row_20_replicas_of_delta_mode_are_equal_after_100_steps(ranks):
    for rank in ranks:
        for kind, (straight, _, _) in rank["resume"].items():
            assert all(map(torch.equal, straight, ranks[0]["resume"][kind][0]))
