# SPDX-License-Identifier: Apache-2.0
"""Adasum over Gloo processes, as a DDP hook and as an all-reduce."""

import numpy as np
import pytest
import torch
from helpers import adasum_ranks
from helpers.processes import run_ranks
from reference.adasum_oracle import adasum

from torch_sm3 import _ops


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def ranks(request):
    """Results of everything, by rank; one set of processes per world size."""
    return run_ranks(request.param, adasum_ranks.everything, timeout=400)


def combine(leaves, **options):
    stack = torch.stack([leaf.flatten() for leaf in leaves])
    size = [stack.shape[1]]
    c = _ops.adasum_coefficients(_ops.adasum_gram(stack, size), **options)
    return _ops.adasum_combine(stack, c, size).view(leaves[0].shape)


def assert_equal_lists(a, b):
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert (x is None and y is None) or torch.equal(x, y)


def assert_is_oracle(result, leaves, dtype=torch.float32):
    rows = [leaf.double().numpy().ravel() for leaf in leaves]
    np.testing.assert_allclose(
        result.double().numpy().ravel(),
        adasum(rows).astype("f8"),
        rtol=torch.finfo(dtype).eps,
        atol=1e-12,
    )


def test_hook_equals_the_oracle_in_every_mode_of_ddp(ranks):
    local = [rank["ddp_options"][0] for rank in ranks]
    first = ranks[0]["ddp_options"][1]["{}"][0]
    for index, result in enumerate(first):
        leaves = [grads[index] for grads in local]
        assert_is_oracle(result, leaves)
        assert torch.equal(result, combine(leaves))
    for rank in ranks:
        for iterations in rank["ddp_options"][1].values():
            assert_equal_lists(iterations[0], first)


def test_adasum_row_14_equal_inputs_give_equal_bits_while_buckets_are_rebuilt(ranks):
    for rank in ranks:
        for iterations in rank["ddp_options"][1].values():
            for result in iterations[1:]:
                assert_equal_lists(result, iterations[0])


def test_adasum_row_16_static_graph_with_an_output_that_the_loss_ignores(ranks):
    for rank in ranks:
        for index, result in enumerate(rank["ignored_output"][1]):
            leaves = [other["ignored_output"][0][index] for other in ranks]
            assert (result is None) == (leaves[0] is None)
            if result is not None:
                assert torch.equal(result, combine(leaves))


def test_adasum_row_19_bucket_size_changes_no_bit(ranks):
    sizes = [key for key in ranks[0]["ddp_options"][1] if "bucket_cap_mb" in key]
    assert len(sizes) >= 4
    for rank in ranks:
        runs = rank["ddp_options"][1]
        for size in sizes:
            assert_equal_lists(runs[size][3], runs["{}"][3])


def test_adasum_row_4_accumulated_micro_batches_are_summed_first(ranks):
    for index, result in enumerate(ranks[0]["accumulation"][1]):
        leaves = [rank["accumulation"][0][index] for rank in ranks]
        assert torch.equal(result, combine(leaves))
    for rank in ranks:
        assert_equal_lists(rank["accumulation"][1], ranks[0]["accumulation"][1])


def test_unused_parameters_are_absent_leaves(ranks):
    for rank in ranks:
        for index, result in enumerate(rank["unused"][1]):
            leaves = [other["unused"][0][index] for other in ranks]
            if all(leaf is None for leaf in leaves):
                assert result is None
                continue
            zero = torch.zeros_like(result)
            leaves = [zero if leaf is None else leaf for leaf in leaves]
            assert torch.equal(result, combine(leaves))


def test_options_of_the_state(ranks):
    local = [rank["options_of_state"][0] for rank in ranks]
    for key, result in ranks[0]["options_of_state"][1].items():
        mode, scale = key
        for rank in ranks:
            assert_equal_lists(rank["options_of_state"][1][key], result)
        for index, value in enumerate(result):
            leaves = [grads[index] for grads in local]
            if mode == "fp16":
                leaves = [leaf.half() for leaf in leaves]
                assert torch.equal(value, combine(leaves).float())
            elif mode in ("mean", "sum"):
                want = combine(leaves, mode=mode)
                torch.testing.assert_close(value, want, rtol=1e-5, atol=1e-5)
            else:
                assert torch.equal(value, combine(leaves, mode=mode, scale=scale))


def test_adasum_row_10_resumed_training_has_the_bits_of_undisturbed_training(ranks):
    want = ranks[0]["resume"][0]
    for rank in ranks:
        for end in rank["resume"][1:]:
            assert_equal_lists(end, want)


def test_adasum_row_20_replicas_are_equal_after_100_steps(ranks):
    for rank in ranks:
        assert_equal_lists(rank["resume"][0], ranks[0]["resume"][0])


def test_adasum_row_22_worker_needs_no_python(ranks):
    assert all(rank["held_lock"] for rank in ranks)


def test_adasum_row_24_all_reduce_of_odd_sizes_strides_and_dtypes(ranks):
    leaves = zip(*(rank["all_reduce"][0] for rank in ranks), strict=True)
    want = [combine(list(leaf)) for leaf in leaves]
    for rank in ranks:
        for result in rank["all_reduce"][1].values():
            assert_equal_lists(result, want)


def test_life_of_a_state(ranks):
    world = len(ranks)
    for number, rank in enumerate(ranks):
        same, messages, value = rank["life_of_a_state"]
        assert same
        assert "got one after close()" in messages[0]
        if number in (0, world - 1):
            assert "rebind(process_group)" in messages[1]
            assert value == (1.0 + world) / 2
        else:
            assert f"contains rank {number}" in value


def test_adasum_row_17_large_messages_both_ways_at_once(ranks):
    assert all(all(rank["windows"]) for rank in ranks)
