# SPDX-License-Identifier: Apache-2.0
"""Metrics of a step against an oracle that knows the leaves only."""

import math
import pickle

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers import adasum_state_ranks
from reference import adasum_metrics_oracle as oracle
from reference.adasum_oracle import adasum

import torch_sm3
from torch_sm3 import _ops
from torch_sm3.distributed import AdasumMetrics, LayerMetrics
from torch_sm3.distributed._metrics import layer_metrics, level_metrics, step_metrics

FIELDS = ("cosine_mean", "cosine_min", "orthogonality", "multiplier", "projection")


def same(found: LayerMetrics, leaves, result, rtol=1e-12):
    expected = oracle.layer_metrics(leaves, result)
    assert found.active == expected["active"]
    np.testing.assert_allclose(found.norms, expected["norms"], rtol=rtol)
    for field in FIELDS:
        np.testing.assert_allclose(
            getattr(found, field), float(expected[field]), rtol=rtol, atol=rtol
        )


def metrics_of(stack, sizes, mode="tree", scale=1.0):
    gram = _ops.adasum_gram(stack, sizes)
    c = _ops.adasum_coefficients(gram, mode, scale=scale)
    report = torch.ones(len(sizes), 2, dtype=torch.float64)
    return layer_metrics(gram, c, report), c


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("mode", ["tree", "psum", "mean", "sum"])
def test_metrics_of_random_leaves(ranks, mode):
    sizes = [7, 100, 1]
    stack = torch.randn(ranks, 108, dtype=torch.float64)
    found, c = metrics_of(stack, sizes, mode, scale=0.5)
    start = 0
    for layer, (size, metrics) in enumerate(zip(sizes, found, strict=True)):
        leaves = stack[:, start : start + size].numpy()
        result = sum(c[layer, i].item() * leaves[i] for i in range(ranks))
        same(metrics, leaves, result, rtol=1e-9)
        start += size


def test_metrics_of_what_the_tree_itself_gives():
    leaves = np.random.default_rng(3).normal(size=(6, 50))
    leaves[4] = 0
    (found,), _ = metrics_of(torch.from_numpy(leaves), [50])
    same(found, leaves, adasum(leaves))
    assert found.active == 5


def test_orthogonal_and_identical_leaves():
    (found,), _ = metrics_of(torch.eye(4), [4])
    assert found.orthogonality == pytest.approx(1)
    # The sum is four times the mean: that is the advice on the learning rate.
    assert found.multiplier == pytest.approx(4)
    assert found.cosine_mean == found.cosine_min == 0
    (found,), _ = metrics_of(torch.ones(4, 3), [3])
    assert found.orthogonality == pytest.approx(1 / 4)
    assert found.multiplier == found.projection == pytest.approx(1)
    assert found.cosine_min == pytest.approx(1)


def test_norms_that_are_far_apart():
    a = torch.tensor([[1e-140, 0.0], [1e140, 1e140]], dtype=torch.float64)
    (found,), _ = metrics_of(a, [2])
    assert found.cosine_mean == pytest.approx(math.sqrt(0.5))
    assert found.norms == pytest.approx([1e-140, math.sqrt(2) * 1e140])


def test_fewer_than_two_active_leaves_have_no_cosine():
    (found,), _ = metrics_of(torch.tensor([[0.0, 0.0], [3.0, 4.0]]), [2])
    assert (found.active, found.norms) == (1, (0.0, 5.0))
    assert math.isnan(found.cosine_mean) and math.isnan(found.cosine_min)
    assert found.multiplier == pytest.approx(2)


def test_nan_stays_in_its_layer():
    stack = torch.ones(2, 4)
    stack[1, 0] = float("nan")
    bad, good = metrics_of(stack, [2, 2])[0]
    assert (
        bad.active == 2 and math.isnan(bad.cosine_mean) and math.isnan(bad.multiplier)
    )
    assert good.multiplier == pytest.approx(1)


def test_kappa_and_cancelled_are_passed_on():
    gram = torch.eye(2, dtype=torch.float64)[None]
    report = torch.tensor([[1.5, 2.0]], dtype=torch.float64)
    (found,) = layer_metrics(gram, torch.ones(1, 2, dtype=torch.float64), report)
    assert (found.kappa, found.cancelled) == (1.5, 2)


def test_levels_only():
    found = level_metrics(torch.tensor([[0.5, -1.0], [0.25, 0.0]]))
    assert [layer.cosine_levels for layer in found] == [(0.5, 0.25), (-1.0, 0.0)]
    assert all(math.isnan(layer.multiplier) for layer in found)


def test_messages_of_a_step_are_added():
    gram = torch.eye(2, dtype=torch.float64)[None]
    c = torch.ones(1, 2, dtype=torch.float64)
    one = (gram, c, torch.ones(1, 2).double(), None, [1.0, 0, 0, 0, 0, 2.0], 10, 1)
    none = (None, None, None, None, [0.5] * 6, 5, 2)
    found = step_metrics(7, [(["a"], one), (["b"], none)], {2})
    assert (found.step, found.bytes_sent, found.messages_sent) == (7, 15, 3)
    assert found.seconds["wait"] == 1.5 and found.seconds["return"] == 2.5
    assert list(found.layers) == ["a"]
    assert found.layers["a"].multiplier == pytest.approx(2)


def test_runs_of_ranks_say_nothing_of_the_mean():
    gram = torch.eye(2, dtype=torch.float64)[None]
    c, report = torch.ones(1, 2).double(), torch.ones(1, 2).double()
    outcome = (gram, c, report, None, [0.0] * 6, 0, 0)
    layer = step_metrics(0, [(["a"], outcome)], {4}).layers["a"]
    assert layer.orthogonality == pytest.approx(1) and layer.active == 2
    assert math.isnan(layer.multiplier) and math.isnan(layer.projection)


def test_shown_as_a_table():
    layer = LayerMetrics(2, (1.0, 2.0), 0.5, 0.25, 0.75, 1.5, 1.25, 1.0, 0)
    parameter = torch.nn.Parameter(torch.ones(3, 4))
    seconds = dict.fromkeys(
        ("wait", "exchange", "dots", "coefficients", "combine", "return"), 1e-3
    )
    found = AdasumMetrics(3, {"layer.weight": layer, parameter: layer}, 10, 2, seconds)
    text = repr(found).splitlines()
    assert text[0].startswith("AdasumMetrics of step 3: 10 bytes in 2 messages")
    assert "multipl." in text[1]
    assert text[2].split() == "layer.weight 2 0.5 0.25 0.75 1.5 1.25 1 0".split()
    assert text[3].startswith("  [3, 4]")
    levels = level_metrics(torch.tensor([[0.5], [0.25]]))[0]
    shown = repr(AdasumMetrics(3, {"w": levels}, 0, 0, seconds))
    assert shown.endswith("w     cosines by level: 0.5 0.25")
    kept = pickle.loads(pickle.dumps(found.without_parameters()))
    assert list(kept.layers) == ["layer.weight", "1: [3, 4]"]


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_asked_for_too_early_or_not_at_all(one_rank):
    state = torch_sm3.AdasumState()
    torch_sm3.adasum_all_reduce(torch.ones(2), state=state)
    with pytest.raises(RuntimeError, match="metrics=True, but got False"):
        state.metrics()
    state.close()
    state = torch_sm3.AdasumState(metrics=True)
    with pytest.raises(RuntimeError, match="got none yet"):
        state.metrics()
    state.close()


def test_every_second_step_and_after_close(one_rank):
    state = torch_sm3.AdasumState(metrics=2)
    seen = []
    for _ in range(5):
        torch_sm3.adasum_all_reduce(torch.ones(2), state=state)
        seen.append(state.metrics().step)
    assert seen == [0, 0, 2, 2, 4]
    assert state.metrics() is state.metrics()
    torch_sm3.adasum_all_reduce(torch.ones(2), state=state)
    torch_sm3.adasum_all_reduce(torch.ones(2), state=state)
    state.close()
    assert state.metrics().step == 6
    assert pickle.loads(pickle.dumps(state)).metrics().step == 6


@pytest.mark.parametrize("world", [2, 3])
def test_metrics_of_a_model_in_training(pools, world):
    for by_rank in pools(world).run(adasum_state_ranks.metrics_of_training):
        leaves, results, found, sent = by_rank
        assert list(found.layers) == list(leaves)
        for name, layer in found.layers.items():
            same(layer, leaves[name], results[name], rtol=1e-5)
            assert 1 <= layer.kappa < 100 and layer.cancelled == 0
        assert found.bytes_sent >= sent and found.messages_sent >= world - 1
        assert found.step == 2
        assert all(seconds >= 0 for seconds in found.seconds.values())
        assert found.seconds["exchange"] > 0


@pytest.mark.parametrize("algorithm", ["gather", "gram"])
def test_metrics_of_algorithms_that_know_all_leaves(pools, algorithm):
    options = {"algorithm": algorithm}
    results = pools(3).run(adasum_state_ranks.metrics_by_algorithm, options)
    leaves = [leaf.numpy() for leaf, *_ in results]
    for _, result, used, layer in results:
        assert used == algorithm
        same(layer, leaves, result.numpy(), rtol=1e-6)


def test_metrics_of_nodes_are_those_of_their_means(pools):
    options = {"node_size": 2}
    results = pools(4).run(adasum_state_ranks.metrics_by_algorithm, options)
    leaves = [leaf.double().numpy() for leaf, *_ in results]
    means = [(leaves[0] + leaves[1]) / 2, (leaves[2] + leaves[3]) / 2]
    for _, result, _, layer in results:
        same(layer, means, result.numpy(), rtol=1e-6)


def test_metrics_of_two_levels_and_of_halves(pools):
    results = pools(4).run(
        adasum_state_ranks.metrics_by_algorithm, {"algorithm": "two_level"}
    )
    leaves = [leaf.double().numpy() for leaf, *_ in results]
    runs = [adasum(leaves[:2]), adasum(leaves[2:])]
    for _, result, used, layer in results:
        assert used == "two_level"
        expected = oracle.layer_metrics(runs, result.numpy())
        assert layer.cosine_mean == pytest.approx(float(expected["cosine_mean"]))
        assert layer.orthogonality == pytest.approx(float(expected["orthogonality"]))
        assert math.isnan(layer.multiplier)
    results = pools(4).run(
        adasum_state_ranks.metrics_by_algorithm, {"algorithm": "vhdd"}
    )
    pairs = [oracle.layer_metrics(leaves[k : k + 2], leaves[0]) for k in (0, 2)]
    top = float(oracle.layer_metrics(runs, leaves[0])["cosine_mean"])
    for rank, (_, _, _, layer) in enumerate(results):
        own = float(pairs[rank // 2]["cosine_mean"])
        assert layer.cosine_levels == pytest.approx((own, top), rel=1e-4)


def test_one_node_of_all_ranks_is_warned_of(pools):
    for found in pools(2).run(adasum_state_ranks.warnings_of_nodes):
        ((text, file),) = found
        assert "all 2 ranks into one node" in text
        # At the line that asked for it.
        assert file.endswith("adasum_state_ranks.py")
