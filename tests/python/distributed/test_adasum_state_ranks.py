# SPDX-License-Identifier: Apache-2.0
"""States over several ranks: excluded layers, warm-up, checks, calls, groups."""

import numpy as np
import pytest
import torch
from helpers import adasum_state_ranks as ranks
from reference.adasum_oracle import adasum


def rows(tensors):
    return [
        (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t)
        .double()
        .flatten()
        .numpy()
        for t in tensors
    ]


def close(found, tensors, mode="tree", tolerance=1e-6):
    leaves = rows(tensors)
    want = adasum(leaves) if mode == "tree" else sum(leaves) / len(leaves)
    (got,) = rows([found])
    scale = float(max([np.abs(row).max(initial=0) for row in leaves], default=0))
    np.testing.assert_allclose(got, want.astype(float), atol=tolerance * (scale or 1))


def close_layers(found, local, means):
    for name, gradient in found.items():
        mode = "mean" if name in means else "tree"
        close(gradient, [layers[name] for layers in local], mode)


@pytest.mark.parametrize("world", [2, 3])
def test_excluded_layers_and_warm_up_get_the_mean(pools, world):
    results = pools(world).run(ranks.excluded_and_warm_up)
    local = [result["local"] for result in results]
    everything = set(local[0])
    for result in results:
        for key in ("names", "parameters", "mixed", "predicate"):
            close_layers(result[key], local, {"0.bias", "2.weight"})
        for step, found in enumerate(result["steps"]):
            close_layers(found, local, everything if step < 2 else ())
        close_layers(result["resumed"][0], local, everything)
        close_layers(result["resumed"][1], local, ())


@pytest.mark.parametrize(("world", "every"), [(2, 1), (3, 1), (2, 3)])
def test_full_check_names_ranks_and_parameters(pools, world, every):
    by_rank = pools(world).run(ranks.parameters_that_drift, every)
    for rank, errors in enumerate(by_rank):
        # Found in the next step that is checked.
        assert len(errors) == every + 1
        assert errors[:-1] == [("nothing", "")] * every
        name, text = errors[-1]
        assert name == "RuntimeError"
        assert f"ranks [{world - 1}] than on rank 0 in 2.weight [rank {rank} of" in text


@pytest.mark.parametrize("world", [1, 2])
def test_python_reducer_of_ddp(pools, world):
    results = pools(world).run(ranks.python_reducer)
    local = [result[0] for result in results]
    for _, found, layers in results:
        assert layers == [4, 4]
        for gradients in found:
            close_layers(gradients, local, ())


def test_sparse_gradients_are_refused_by_name(pools):
    for name, text in pools(2).run(ranks.sparse_gradients):
        assert name == "NotImplementedError"
        assert "of embedding.weight" in text and "sparse=False" in text


@pytest.mark.parametrize("world", [1, 2, 3])
def test_calls_with_all_kinds_of_tensors(pools, world):
    results = pools(world).run(ranks.calls)
    for key in results[0]:
        if key == "wide":
            continue
        for result in results:
            before = [r[key][0] for r in results]
            after = result[key][1]
            if isinstance(after, torch.Tensor):
                before, after = [[b] for b in before], [after]
            for i, found in enumerate(after):
                half = found.dtype == torch.float16
                close(found, [b[i] for b in before], tolerance=1e-3 if half else 1e-6)
    # A sum that float16 does not hold.
    narrow = [result["wide"][0] for result in results]
    for result in results:
        close(result["wide"][1], narrow)


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_with_other_options_meet_and_go_on(pools, world):
    for (name, text), x in pools(world).run(ranks.disagreeing_options):
        assert name == "RuntimeError" and "psum" in text
        assert x.tolist() == [(1.0 + world) / 2] * 3


@pytest.mark.parametrize("world", [2, 3, 4])
def test_groups_do_not_depend_on_those_made_before(pools, world):
    for first, second in pools(world).run(ranks.groups_of_unlike_histories):
        assert first.tolist() == [1.0] * 3
        assert second.tolist() == [float(world)] * 3


@pytest.mark.parametrize("world", [1, 2, 3])
def test_changes_follow_the_options_of_their_parameters(pools, world):
    by_rank = pools(world).run(ranks.changes_of_parameters)
    names = ["0.weight", "0.bias", "2.weight", "2.bias"]
    for found in by_rank:
        # Only advance() counts; the first step is warm-up.
        assert found["steps"] == [0, 1]
        assert found["layers"] == names
        assert found["swapped"].tolist() == [[[rank, 7]] for rank in range(world)]
        for step, results in enumerate(found["results"]):
            for i, result in enumerate(results):
                mean = step == 0 or names[i] == "0.bias"
                leaves = [rank["leaves"][i] for rank in by_rank]
                close(result, leaves, "mean" if mean else "tree")
