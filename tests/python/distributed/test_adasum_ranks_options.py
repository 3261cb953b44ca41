# SPDX-License-Identifier: Apache-2.0
"""Options of Adasum over Gloo processes: algorithms, nodes, wires, checks, metrics."""

import pytest
import torch
from helpers import adasum_ranks_options as ranks
from helpers.adasum_expect import assert_adasum, assert_same, sides
from reference import adasum_oracle

ALGORITHMS = ["auto", "pair", "gather", "gram", "two_level", "vhdd"]


def possible(name, size):
    """Whether the specification lets these ranks run an algorithm."""
    return {
        "pair": size == 2,
        "two_level": size in (4, 6, 8),
        "vhdd": size & (size - 1) == 0,
    }.get(name, True)


def test_adasum_row_6_algorithm_by_name_is_obeyed_or_refused(pool):
    results = pool.run(ranks.algorithms, ALGORITHMS)
    leaves = [rank["leaves"] for rank in results]
    for name in ALGORITHMS:
        failures = [failure for rank in results for failure in rank[name][0]]
        if not possible(name, pool.size):
            for error, text, _ in failures:
                assert error == "ValueError" and f"algorithm {name!r}" in text
                assert f"got {pool.size}" in text and "(argument 'algorithm')" in text
            continue
        assert all(error == "nothing" for error, *_ in failures), failures
        after = [rank[name][1] for rank in results]
        if name in ("two_level", "vhdd") and pool.size > 1:
            assert_within(after, leaves, 3e-7)
        else:
            assert_adasum([r[:-1] for r in after], [leaf[:-1] for leaf in leaves])
            # The operators do not look for such layers.
            assert_adasum(
                [r[-1:] for r in after], [leaf[-1:] for leaf in leaves], bits=False
            )


def assert_within(after, before, tolerance, **options):
    """Compare with the oracle by the norm of each layer; all ranks bit for bit."""
    for result in after[1:]:
        assert_same(result, after[0])
    for layer, value in enumerate(after[0]):
        if value.numel() == 0:
            continue
        rows = [rank[layer].double().flatten().numpy() for rank in before]
        want = adasum_oracle.combine(rows, **options).vector
        error = value.double().flatten().numpy() - want
        assert (error @ error) ** 0.5 <= tolerance * (want @ want) ** 0.5


def test_adasum_row_6_choice_is_visible(pool):
    for named, small, large in pool.run(ranks.choices):
        assert named == "gather"
        if pool.size > 1:
            assert small == ("pair" if pool.size == 2 else "gather")
            assert large == "gram" if pool.size > 2 else large in ("pair", "gram")


@pytest.mark.parametrize("inner", ["mean", "adasum"])
@pytest.mark.parametrize("node_size", [1, 2, 3])
def test_adasum_row_6_nodes_are_obeyed(pool, node_size, inner):
    if pool.size <= node_size:
        pytest.skip("one node")
    results = pool.run(ranks.hook, {"node_size": node_size, "inner": inner})
    whole, rest = divmod(pool.size, node_size)
    nodes = [node_size] * whole + [rest] * (rest > 0)
    for step in range(3):
        before, after = sides([rank[step] for rank in results])
        if inner == "mean" and rest == 0 and node_size > 1:
            # The node mean is one more rounding.
            assert_within(after, before, 3e-7, nodes=nodes, inner=inner)
        else:
            assert_adasum(after, before, bits=False, nodes=nodes, inner=inner)


@pytest.mark.parametrize("wire", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("algorithm", ["gather", "gram"])
def test_sixteen_bits_on_the_wire(pool, wire, algorithm):
    options = {"wire_dtype": wire, "algorithm": algorithm}
    results = pool.run(ranks.hook, options)
    # Leaves and result are rounded once each: of p leaves the errors may add up.
    unit = 2.0**-11 if wire == torch.float16 else 2.0**-8
    for step in range(3):
        before, after = sides([rank[step] for rank in results])
        if pool.size == 1:
            assert_same(after[0], before[0])
        assert_within(after, before, 4 * pool.size * unit)


def test_dots_in_float32(pool):
    results = pool.run(ranks.hook, {"accumulate_dtype": torch.float32})
    for step in range(3):
        before, after = sides([rank[step] for rank in results])
        assert_within(after, before, 1e-5)


def test_results_of_float16_in_float32(pool):
    before, after = sides(pool.run(ranks.wide_results))
    for result in after:
        assert all(t.dtype == torch.float32 and t.isfinite().all() for t in result)
    wide = [[t.float() for t in leaves] for leaves in before]
    assert_adasum(after, wide)


@pytest.mark.parametrize("how", ["mode", "warm-up", "excluded"])
def test_adasum_row_9_means_of_uneven_inputs_divide_by_all_ranks(pools, how):
    for size in (2, 3):
        results = pools(size).run(ranks.mean_under_join, how)
        for step in range(2):
            before, after = sides([rank[step] for rank in results if step < len(rank)])
            for result in after:
                for value, *leaves in zip(result, *before, strict=True):
                    want = torch.stack(leaves).double().sum(0) / size
                    torch.testing.assert_close(
                        value.double(), want, rtol=1e-5, atol=1e-5
                    )


@pytest.mark.parametrize("mode", ["tree", "psum"])
def test_adasum_row_27_shards_use_the_dots_of_the_whole(pools, mode):
    results = pools(4).run(ranks.shards, mode)
    whole = torch.stack([results[0][0], results[2][0]]).double().numpy()
    want = adasum_oracle.combine(whole, mode).vector.astype("f8")
    part = [torch.from_numpy(want[:20_000]), torch.from_numpy(want[20_000:])]
    copy = adasum_oracle.combine(whole[:, :77], mode).vector.astype("f8")
    for rank, (_, found, overlapping) in enumerate(results):
        expected = torch.cat([part[rank % 2], torch.from_numpy(copy)])
        torch.testing.assert_close(found.double(), expected, rtol=1.3e-7, atol=1e-8)
        assert overlapping[0] == "ValueError"
        assert "(argument 'shard_group')" in overlapping[1]
        assert torch.equal(found, results[rank ^ 2][1])


@pytest.mark.parametrize("algorithm", ["gather", "gram"])
@pytest.mark.parametrize("size", [2, 3])
def test_adasum_row_20_a_flipped_bit_is_found_in_its_step(pools, size, algorithm):
    for names, (_, text, _) in pools(size).run(ranks.flipped_bit, algorithm):
        assert names == ["nothing", "RuntimeError", "RuntimeError"]
        assert f"rank {size - 1}" in text and "bucket 0" in text
        assert "in layer '2.bias'" in text


@pytest.mark.parametrize("size", [2, 3])
def test_adasum_row_20_a_parameter_that_drifts_is_found(pools, size):
    for names, (_, text, _) in pools(size).run(ranks.flipped_parameter):
        assert names == ["nothing", "RuntimeError"]
        assert f"[{size - 1}]" in text and "2.weight" in text and "2.bias" not in text


def test_adasum_row_3_multiplier_tells_the_learning_rate(pool):
    for found in pool.run(ranks.multipliers):
        for layer, measured, _ in found.values():
            assert layer.multiplier == pytest.approx(measured, rel=1e-6)
        assert found["orthogonal"][0].multiplier == pytest.approx(pool.size)
        assert found["identical"][0].multiplier == pytest.approx(1)
        assert (found["random"][2] > 0) == (pool.size > 1)
