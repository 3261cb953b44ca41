# SPDX-License-Identifier: Apache-2.0
"""adasum_all_reduce over Gloo processes: every layout, every refusal."""

import pytest
import torch
from helpers import adasum_ranks_all_reduce as ranks
from helpers.adasum_expect import assert_adasum


def test_adasum_row_1_any_world_size_and_any_layout(pool):
    results = pool.run(ranks.lists)
    before = [rank.pop("before") for rank in results]
    after = [result for rank in results for result in rank.values()]
    assert len(after) == 5 * pool.size
    assert_adasum(after, before)


@pytest.mark.parametrize(
    "options", [{"mode": "psum"}, {"mode": "psum", "scale": 0.3}, {"scale": -4.0}]
)
def test_options(pool, options):
    before, after = zip(*pool.run(ranks.by_options, options), strict=True)
    assert_adasum(after, before, **options)


@pytest.mark.parametrize("options", [{"mode": "mean"}, {"mode": "sum", "scale": 0.5}])
def test_plain_modes_by_the_backend(pool, options):
    before, after = zip(*pool.run(ranks.by_options, options), strict=True)
    factor = options.get("scale", 1.0 / pool.size)
    for result in after:
        for value, *leaves in zip(result, *before, strict=True):
            want = factor * torch.stack(leaves).double().sum(0)
            torch.testing.assert_close(value.double(), want, rtol=1e-6, atol=1e-5)


def test_adasum_row_2_orthogonal_gradients_of_one_machine_give_the_sum(pool):
    for result in pool.run(ranks.orthogonal):
        want = torch.arange(1.0, pool.size + 1).repeat_interleave(20_000)
        assert torch.equal(result, want)


def test_adasum_row_12_float16_near_its_maximum(pools):
    for values in pools(4).run(ranks.identical, torch.float16, [6e4, -65504.0, 6e-8]):
        assert values == [True] * 3


def test_adasum_row_24_ten_elements_of_four_ranks(pools):
    before, after = zip(*pools(4).run(ranks.small_pieces), strict=True)
    assert_adasum(after, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adasum_row_26_identical_leaves_of_any_size_stay_what_they_are(pool, dtype):
    for values in pool.run(ranks.identical, dtype, [1e-16, 1e-18, 1e20, 3e38, 1e-38]):
        assert values == [True] * 5


def test_adasum_row_17_large_messages_both_ways_at_once(pool):
    assert all(all(rank) for rank in pool.run(ranks.large_messages))


REFUSALS = {
    "sparse": ("NotImplementedError", "sparse=False"),
    "integer": ("TypeError", "got Long"),
    "bool": ("TypeError", "got Bool"),
    "float8": ("TypeError", "got Float8_e4m3fn"),
    "complex32": ("TypeError", "got ComplexHalf"),
    "quantized": ("TypeError", "got QInt8"),
    "overlap": ("ValueError", "share memory"),
    "expanded": ("ValueError", "share memory"),
    "none": ("ValueError", "at least one tensor"),
}


def test_refusals_come_before_the_first_message(pool):
    for found in pool.run(ranks.refused):
        for name, (error, text) in REFUSALS.items():
            assert found[name][0] == error, (name, found[name])
            assert text in found[name][1], (name, found[name])


def test_sparse_gradient_under_ddp(pool):
    for name, text, _ in pool.run(ranks.embedding):
        assert name == "NotImplementedError" and "sparse=False" in text


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_disagree_all_raise(pools, size):
    for rank, (failures, good) in enumerate(pools(size).run(ranks.disagree)):
        for name, text, _ in failures:
            assert name == "RuntimeError"
            assert "expected the same call on all ranks" in text
            assert "on rank 1" in text and f"[rank {rank} of {size}" in text
        assert good.tolist() == [(1.0 + size) / 2] * 3
