# SPDX-License-Identifier: Apache-2.0
"""Adasum of CUDA tensors: over Gloo with ranks that share a GPU, and over NCCL."""

import pytest
import torch
from helpers import adasum_ranks_cuda as ranks
from helpers.adasum_expect import assert_adasum, sides

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device"
)

OPTIONS = [{}, {"algorithm": "gram"}, {"mode": "psum"}, {"scratch_bytes": 1 << 20}]


def nccl_of(pools, size):
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} CUDA devices")
    return pools(size)


def assert_iterations(results, options):
    # Bits of CUDA may differ from those of the CPU, the bound of an element not.
    rule = {"mode": options["mode"]} if "mode" in options else {}
    for step in range(3):
        before, after = sides([rank[step] for rank in results])
        assert_adasum(after, before, bits=False, **rule)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_hook_over_gloo(pools, size, options):
    assert_iterations(pools(size).run(ranks.hook, "cuda", "gloo", options), options)


@pytest.mark.parametrize("size", [2, 3])
def test_all_reduce_over_gloo(pools, size):
    before, after = sides(pools(size).run(ranks.all_reduce, "cuda", "gloo"))
    assert_adasum(after, before, bits=False)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_hook_over_nccl(pools, size, options):
    results = nccl_of(pools, size).run(ranks.hook, "cuda", "nccl", options)
    assert_iterations(results, options)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_reduce_over_nccl(pools, size):
    results = nccl_of(pools, size).run(ranks.all_reduce, "cuda", "nccl")
    before, after = sides(results)
    assert_adasum(after, before, bits=False)


@pytest.mark.parametrize("size", [2, 3])
def test_adasum_row_2_ranks_of_one_machine_are_not_averaged(pools, size):
    results = pools(size).run(ranks.orthogonal)
    for rank in results:
        assert rank == list(range(1, size + 1))
