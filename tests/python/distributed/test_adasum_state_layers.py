# SPDX-License-Identifier: Apache-2.0
"""Which layers get the mean, how they are called, and plans made for them."""

import gc
import pickle

import pytest
import torch
import torch.distributed as dist

import torch_sm3
from torch_sm3.distributed._names import Layers
from torch_sm3.distributed._options import Options
from torch_sm3.distributed._plans import Plans

OP = "op"


def small(parameter):
    return parameter.ndim < 2


@pytest.fixture
def net():
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))


def excluded(layers, net):
    return [n for n, p in net.named_parameters() if layers.excludes(OP, p)]


def test_exclude_takes_parameters_names_and_predicates(net):
    named = list(net.named_parameters())
    assert excluded(Layers(OP, net[0].bias, named), net) == ["0.bias"]
    assert excluded(Layers(OP, "1.weight", named), net) == ["1.weight"]
    assert excluded(Layers(OP, small), net) == ["0.bias", "1.bias"]
    mixed = [net[0].weight, "1.weight", small]
    assert excluded(Layers(OP, mixed, dict(named)), net) == [n for n, _ in named]
    assert excluded(Layers(OP, None, named), net) == []
    # Two tensors of equal values are two layers.
    assert excluded(Layers(OP, [torch.zeros(4)], named), net) == []


@pytest.mark.parametrize(
    ("error", "text", "exclude", "named"),
    [
        (TypeError, "named_parameters beside names, but got the name 'b'", ["b"], None),
        (TypeError, "parameters, names or predicates, but got int", [3], None),
        (TypeError, "parameters, names or predicates, but got int", 3, None),
        (ValueError, "a name of named_parameters, but got 'b'", "b", []),
        (TypeError, "pairs of name and parameter, as of", (), torch.nn.Linear(1, 1)),
        (TypeError, "pairs of name and parameter, but got", (), [torch.ones(1)]),
    ],
)
def test_what_exclude_and_names_cannot_be(error, text, exclude, named):
    with pytest.raises(error, match=text):
        Layers(OP, exclude, named)


def test_parameters_are_described_by_name_or_shape(net):
    layers = Layers(OP, (), [("w", net[0].weight)])
    assert layers.describe(net[0].weight) == "w"
    assert layers.describe(net[1].bias) == "parameter of shape [2]"
    assert layers.name_of(net[1].bias) is None


def test_names_do_not_keep_parameters_alive():
    weight = torch.nn.Parameter(torch.ones(2))
    layers = Layers(OP, [weight], [("w", weight)])
    assert layers.parameters()[0] is weight and layers.any_excluded
    del weight
    gc.collect()
    assert layers.parameters() == [] and not layers.any_excluded


def test_pickled_layers_keep_names_and_ask_whose_they_are(net):
    named = list(net.named_parameters())
    layers = Layers(OP, [net[0].weight, "1.weight", small], named)
    loaded = pickle.loads(pickle.dumps(layers))
    with pytest.raises(RuntimeError, match="set its named_parameters"):
        loaded.excludes(OP, net[0].weight)
    with pytest.raises(ValueError, match=r"none for \['1.weight'\]"):
        loaded.name(OP, named[:2])
    loaded.name(OP, named)
    assert excluded(loaded, net) == [name for name, _ in named]
    # Predicates alone need no names.
    alone = pickle.loads(pickle.dumps(Layers(OP, small)))
    assert excluded(alone, net) == ["0.bias", "1.bias"]


def test_what_does_not_pickle_says_so(net):
    with pytest.raises(TypeError, match="excluded parameters with names"):
        pickle.dumps(Layers(OP, [net[0].weight]))
    with pytest.raises(TypeError, match="predicates that pickle"):
        pickle.dumps(Layers(OP, lambda p: True))


def test_plans_are_kept_by_parameters(net):
    plans = Plans(Options(), Layers(OP))
    first, second = list(net[0].parameters()), list(net[1].parameters())
    layout = plans.of_bucket(OP, first)
    assert plans.of_bucket(OP, list(first)) is layout
    assert plans.of_bucket(OP, second) is not layout
    assert plans.of_bucket(OP, first[::-1]) is not layout
    assert [id(p) for p in plans.parameters()] == [id(p) for p in first + second]


def test_plans_of_parameters_that_are_gone_are_dropped():
    plans = Plans(Options(), Layers(OP))
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    plans.of_bucket(OP, weights)
    plans.of_bucket(OP, weights[:2])
    del weights[2]
    gc.collect()
    assert len(plans._buckets) == 1
    weights.clear()
    gc.collect()
    assert not plans._buckets and plans.parameters() == []


def test_many_sizes_do_not_fill_the_memory():
    plans = Plans(Options(), Layers(OP))
    for size in range(200):
        plans.of_sizes(OP, [size], [torch.ones(size)])
    assert len(plans._by_size) < 100


def test_state_asks_for_names_after_unpickling(net):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    named = list(net.named_parameters())
    state = torch_sm3.AdasumState(exclude="0.bias", named_parameters=named)
    loaded = pickle.loads(pickle.dumps(state))
    model = torch.nn.parallel.DistributedDataParallel(net)
    model.register_comm_hook(loaded, torch_sm3.adasum_hook)
    with pytest.raises(RuntimeError, match="set its named_parameters"):
        model(torch.ones(1, 3)).sum().backward()
    loaded.named_parameters = named
    assert [name for name, _ in loaded.named_parameters] == [name for name, _ in named]
    model = torch.nn.parallel.DistributedDataParallel(net)
    model.register_comm_hook(loaded, torch_sm3.adasum_hook)
    model(torch.ones(1, 3)).sum().backward()
    state.close()
    loaded.close()
    dist.destroy_process_group()
