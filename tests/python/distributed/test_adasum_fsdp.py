# SPDX-License-Identifier: Apache-2.0
"""Adasum between replicas that FSDP2 shards, against the tree of whole parameters."""

import numpy as np
import pytest
import torch
from helpers import adasum_fsdp_ranks as ranks
from reference.adasum_oracle import adasum

# Two replicas of two shards.
WORLD = 4


def expected(by_rank, name, mode="tree"):
    """The leaf of a replica is the mean over its shards; the tree is over replicas."""
    local = [gradients[name].double().flatten().numpy() for gradients in by_rank]
    leaves = [(local[k] + local[k + 1]) / 2 for k in range(0, len(local), 2)]
    return adasum(leaves) if mode == "tree" else sum(leaves) / len(leaves)


def close(found, want, tolerance=2e-6):
    got = found.double().flatten().numpy()
    scale = np.abs(want).max()
    np.testing.assert_allclose(got, want.astype(float), atol=tolerance * float(scale))


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("whole", {}),
        ("parts", {"algorithm": "gram"}),
        ("odd", {}),
        ("columns", {"check": "hash"}),
        ("whole", {"exclude": ["0.bias"], "check": "full"}),
    ],
)
def test_adasum_row_23_sharded_gradients_are_the_tree_of_whole_parameters(
    pools, model, options
):
    results = pools(WORLD).run(ranks.one_step, model, options)
    local = [result[0] for result in results]
    for _, (first, second), steps, multipliers in results:
        assert steps == 2
        assert sorted(first) == sorted(second) == sorted(local[0])
        # All shards see the whole parameter.
        assert multipliers == results[0][3]
        for name, found in first.items():
            mode = "mean" if name in options.get("exclude", ()) else "tree"
            close(found, expected(local, name, mode))
            assert torch.equal(found, second[name])
            assert torch.equal(found, results[0][1][0][name])


def test_micro_batches_and_an_old_gradient(pools):
    results = pools(WORLD).run(ranks.micro_steps)
    local = [result[0] for result in results]
    for _, found in results:
        for name, gradient in found.items():
            sums = [{name: a[name] + b[name]} for a, b, _ in local]
            old = expected([c for *_, c in local], name)
            close(gradient, old + expected(sums, name))


def test_reduction_in_bfloat16(pools):
    results = pools(WORLD).run(ranks.half_precision)
    local = [result[0] for result in results]
    for _, found in results:
        for name, gradient in found.items():
            close(gradient, expected(local, name), 2e-2)


def test_unused_parameters_are_told_of(pools):
    for before, after in pools(WORLD).run(ranks.unused_parameters):
        assert before[0] == "RuntimeError"
        assert "set_reduce_scatter_unused_params(True)" in before[1]
        assert after == ("nothing", "")


def test_adasum_row_23_modules_and_states_that_do_not_fit_are_refused(pools):
    for found in pools(WORLD).run(ranks.refusals):
        assert [name for name, _ in found] == [
            "TypeError",
            "TypeError",
            "NotImplementedError",
            "ValueError",
            "ValueError",
            "ValueError",
            "RuntimeError",
        ]
        texts = [text for _, text in found]
        assert "an AdasumState, but got str" in texts[0]
        assert "an FSDPModule, but got Sequential" in texts[1]
        assert "FSDP2" in texts[2] and "FSDP1" in texts[2]
        assert "HSDP" in texts[3] and "argument 'module'" in texts[3]
        assert "shard_group" in texts[4] and "argument 'state'" in texts[4]
        assert "alone with process_group" in texts[5]
        assert "got one after close()" in texts[6]
