# SPDX-License-Identifier: Apache-2.0
"""The hook of Adasum under the modes of DDP, over Gloo processes."""

import pytest
import torch
from helpers import adasum_ranks_ddp as ranks
from helpers.adasum_expect import assert_adasum, assert_same, sides


def test_every_switch_of_ddp_in_every_iteration(pool):
    results = pool.run(ranks.switches)
    runs = [run for _, by_switch in results for run in by_switch.values()]
    for step in range(4):
        before = [local[step] for local, _ in results]
        assert_adasum([run[step] for run in runs], before)


def test_mode_and_scale_of_the_state(pool):
    results = pool.run(ranks.modes)
    for mode, scale in results[0]:
        before, after = sides([rank[mode, scale] for rank in results])
        if mode in ("tree", "psum"):
            assert_adasum(after, before, mode=mode, scale=scale)
            continue
        # The backend adds in an order of its own.
        factor = scale / (pool.size if mode == "mean" else 1)
        for result in after:
            assert_same(result, after[0])
        for value, *leaves in zip(after[0], *before, strict=True):
            want = factor * torch.stack(leaves).double().sum(0)
            torch.testing.assert_close(value.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["tree", "psum"])
def test_adasum_row_14_equal_inputs_give_equal_bits_while_buckets_are_rebuilt(
    pool, mode
):
    results = pool.run(ranks.bucket_sizes, mode, [0.05])
    # Iteration 0 has one bucket per dtype, 1 rebuilds them, 2 uses the new ones.
    after = [i for runs in results for i in runs[0.05]]
    assert len(after) == 3 * pool.size
    options = {} if mode == "tree" else {"mode": mode}
    assert_adasum(after, [runs[0.0][0] for runs in results], **options)


@pytest.mark.parametrize("mode", ["tree", "psum"])
def test_adasum_row_19_bucket_size_changes_no_bit(pool, mode):
    caps = [0.05, 1, 25, 1000]
    results = pool.run(ranks.bucket_sizes, mode, caps)
    after = [i for runs in results for cap in caps for i in runs[cap]]
    assert len(after) == 12 * pool.size
    for result in after:
        assert_same(result, after[0])


def test_adasum_row_4_accumulated_micro_batches_are_summed_first(pool):
    results = pool.run(ranks.accumulation)
    for name in results[0]:
        before, after = sides([rank[name] for rank in results])
        assert_adasum(after, before)
    for rank in results:
        for a, b in zip(rank["no_sync"][1], rank["one batch"][1], strict=True):
            # Sums of four batches round otherwise than a batch of four.
            assert (a - b).norm() <= 1e-5 * b.norm()


def test_parameters_that_are_unused_on_some_ranks_or_on_all(pool):
    results = pool.run(ranks.unused)
    for step in range(len(results[0])):
        before, after = sides([rank[step] for rank in results])
        assert_adasum(after, before)
        assert after[0][-1] is None


def test_adasum_row_16_static_graph_with_an_output_that_the_loss_ignores(pool):
    before, after = sides(pool.run(ranks.ignored_output))
    assert_adasum(after, before)
    assert after[0][-1] is None


@pytest.mark.parametrize("divide", [True, False])
@pytest.mark.parametrize("mode", ["tree", "psum"])
def test_adasum_row_9_uneven_inputs(pool, mode, divide):
    results = pool.run(ranks.uneven, mode, divide)
    options = {} if mode == "tree" else {"mode": mode}
    for step in range(3):
        going = [rank[step] for rank in results if step < len(rank)]
        before, after = sides(going)
        gone = [[None] * len(before[0])] * (len(results) - len(going))
        if mode == "tree":
            # The tree over the ranks that go on, each in its place.
            by_rank = [r[step][0] if step < len(r) else gone[0] for r in results]
        else:
            by_rank = before + gone
        assert_adasum(after, by_rank, **options)


def test_adasum_row_15_identical_gradients_are_not_divided(pool):
    before, after = sides(pool.run(ranks.identical))
    for result in after:
        if pool.size & (pool.size - 1) == 0:
            assert_same(result, before[0])
            continue
        for a, b in zip(result, before[0], strict=True):
            # The sum of three or more weights rounds once more.
            assert ((a - b).abs() <= 2.0**-23 * b.abs()).all()


def test_adasum_row_25_odd_layouts_and_a_zero_gradient_on_one_rank(pool):
    results = pool.run(ranks.special_layers)
    for name in results[0]:
        before, after = sides([rank[name] for rank in results])
        assert_adasum(after, before)


def test_complex_gradients_are_pairs_of_reals(pool):
    before, after = sides(pool.run(ranks.complex_weight))
    assert_adasum(after, before)
