# SPDX-License-Identifier: Apache-2.0
"""ReversibleTrainer against the store run of the same layers, bit for bit."""

import pytest
import torch
from helpers.trainer_models import (
    adamw,
    assert_equal,
    build,
    make,
    sm3,
    state,
    steps,
)

OPTIONS = [
    {},
    {"n_microbatches": 2},
    {"n_microbatches": 3},
    {"clip_grad_norm": 0.05},
    {"clip_grad_norm": 0.05, "n_microbatches": 3, "clip_strategy": "host_grads"},
    {"clip_grad_norm": 1e9, "clip_strategy": "host_grads"},
    {"free_accelerator_on_step": True, "clip_grad_norm": 0.05},
]


def name(options):
    return "-".join(f"{key}={value}" for key, value in options.items()) or "plain"


@pytest.mark.parametrize("offload", ["none", "host"])
@pytest.mark.parametrize("options", OPTIONS, ids=name)
@pytest.mark.parametrize("exact", ["sidecar", "grid"])
def test_equals_the_store_run(options, offload, exact):
    options = {**options, "exact": exact}
    store = steps(make("store", **options))
    assert_equal(steps(make("reversible", offload=offload, **options)), store)


@pytest.mark.parametrize("n_prefetch", [0, 1, 2, 9])
@pytest.mark.parametrize("n_async", [0, 3])
def test_equals_with_any_number_of_layers_under_way(n_prefetch, n_async):
    options = {"n_prefetch_layers": n_prefetch, "n_async_layers": n_async}
    found = make("reversible", offload="host", optimizer=adamw, **options)
    assert_equal(steps(found), steps(make("store", optimizer=adamw)))


@pytest.mark.parametrize("optimizer", [sm3, adamw])
def test_equals_one_optimizer_over_all_parameters(optimizer):
    """For optimizers that treat each parameter by itself."""
    layerwise = make("reversible", optimizer=optimizer)
    whole = make("store", built=build(), optimizer=optimizer)
    parameters = [p for layer in whole._layers for p in layer.owned]
    for layer in whole._layers:
        layer.optimizer = None
    whole._layers[-1].owned = parameters
    whole._layers[-1].optimizer = optimizer(parameters)
    for trainer in (layerwise, whole):
        steps(trainer, rates=(None,))
    for one, other in zip(layerwise._layers, whole._layers, strict=True):
        for a, b in zip(one.parameters, other.parameters, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("offload", ["none", "host"])
def test_without_exactness_it_is_close(offload):
    found = steps(make("reversible", exact="none", offload=offload))
    expected = steps(make("store", exact="none"))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_untied_layers_and_layers_without_weights():
    for built in (lambda: build(tied=False),):
        found = steps(make("reversible", built=built()))
        assert_equal(found, steps(make("store", built=built())))


def test_steps_go_on_from_the_other_trainers_slots():
    ahead = make("store")
    steps(ahead)
    behind = make("reversible", offload="host")
    for mine, theirs in zip(behind._layers, ahead._layers, strict=True):
        mine.module.load_state_dict(theirs.module.state_dict())
    behind.slots = ahead.slots
    assert_equal(state(behind), state(ahead))
    assert_equal(steps(behind), steps(ahead))


def test_one_training_run_is_not_another():
    """The comparison can fail: another seed gives other weights."""
    one, other = make("reversible"), make("reversible")
    one.one_step((torch.zeros(2, 2).long(), torch.ones(2, 2) > 0, *both()), rng=1)
    other.one_step((torch.zeros(2, 2).long(), torch.ones(2, 2) > 0, *both()), rng=2)
    with pytest.raises(AssertionError):
        assert_equal(state(one), state(other))


def both():
    return torch.zeros(2, 2).long(), torch.ones(2, 2)
