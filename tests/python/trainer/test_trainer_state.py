# SPDX-License-Identifier: Apache-2.0
"""Slots, state dicts, stats and log messages."""

import copy
import logging
import pickle

import pytest
import torch
from helpers.trainer_models import (
    adamw,
    assert_equal,
    batch,
    build,
    make,
    sm3,
    state,
    steps,
    tensors,
)
from torch import nn

import torch_sm3
from torch_sm3.reversible import DriftMonitor, ReversibleSequence
from torch_sm3.trainer import ReversibleTrainer, Trainer

KINDS = ["reversible", "store"]


@pytest.mark.parametrize("offload", ["none", "host"])
@pytest.mark.parametrize("optimizer", [sm3, adamw])
@pytest.mark.parametrize("taken", [0, 2])
def test_assigning_slots_to_themselves_changes_nothing(optimizer, offload, taken):
    made = [
        make("reversible", built=build(), optimizer=optimizer, offload=offload)
        for _ in range(2)
    ]
    for trainer in made:
        steps(trainer, taken)
    made[0].slots = made[0].slots
    assert_equal(state(made[0]), state(made[1]))
    before = made[0].slots
    assert_equal(steps(made[0]), steps(made[1]))
    # An earlier copy comes back, also that of a time before the first step.
    made[0].slots = before
    assert_equal(tensors(made[0].slots), tensors(before))


def test_slots_are_nested_as_the_blocks_are():
    made = make("reversible", built=build())
    steps(made, 1)
    slots = made.slots
    # Two blocks of a standard and some reversible layers, then the loss.
    assert [len(item) for item in slots] == [2, 2, 1]
    (embed, first), (between, second), loss = slots
    assert [len(layer) for layer in first] == [10, 2, 0, 10]
    assert len(embed) == 3 and len(between) == 2 and len(second) == 2
    assert set(loss[0]) == {"step", "accumulator_0", "momentum_buffer"}
    # A copy: training on does not change it.
    before = [t.clone() for t in tensors(slots)]
    steps(made, 1)
    assert_equal(tensors(slots), before)
    assert made.slots[2][0]["step"] == 2


@pytest.mark.parametrize(
    "spoil",
    [
        lambda slots: slots[:-1],
        lambda slots: [*slots[:-1], None],
        lambda slots: [slots[0], slots[1], slots[2] * 2],
        lambda slots: [[slots[0][0], slots[0][1][1:]], *slots[1:]],
        lambda slots: [*slots[:-1], [3]],
        lambda slots: [*slots[:-1], [{"accumulator_0": torch.ones(2)}]],
        lambda slots: {},
    ],
)
def test_slots_of_another_structure_are_refused(spoil):
    made = make("reversible", built=build())
    steps(made, 1)
    before = state(made)
    with pytest.raises(ValueError, match=r"ReversibleTrainer: expected .*'slots'"):
        made.slots = spoil(made.slots)
    assert_equal(state(made), before)


@pytest.mark.parametrize("offload", ["none", "host"])
def test_state_dicts_continue_a_run(offload):
    def scaled():
        return make(
            "reversible",
            built=build(seed=3),
            offload=offload,
            grad_scaler=torch.amp.GradScaler("cpu", init_scale=8.0),
        )

    one, other = scaled(), scaled()
    steps(one)
    saved = pickle.loads(pickle.dumps(one.state_dict()))
    other.load_state_dict(saved)
    assert_equal(state(other), state(one))
    assert_equal(steps(other), steps(one))
    saved["layers"] = saved["layers"][:-1]
    with pytest.raises(ValueError, match=r"expected \d+ layers, but got \d+"):
        other.load_state_dict(saved)


def test_attributes():
    blocks, loss = build()
    made = make("reversible", built=(blocks, loss))
    assert made.loss_layer is loss and made.all_layers[-1] is loss
    assert made.all_layers[1] is blocks[0][1][0]
    assert made.optimizer_fn is sm3
    # Swap has no weights; the standard layers of a block are one layer.
    assert len(made.all_layers) == 9 and len(made.optimizers) == 8


@pytest.mark.parametrize("kind", KINDS)
def test_stats_are_named_by_layer(kind):
    made = make(kind, built=build(), optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
    parameters = [list(layer.owned) for layer in made._layers]
    before = [p.detach().clone() for p in parameters[0]]
    _, stats = made.one_step(batch(0), rng=0, learning_rate=0.0)
    keys = {"gradients_l2", "weights_l2", "learning_rate"}
    # Layer 3 is Swap: it is counted, and has no entry.
    layers = [i for i in range(9) if i != 3]
    expected = {f"layer{i}/{key}" for i in layers for key in keys}
    assert set(stats) == expected | {"layer8/loss", "loss"}
    norm = torch.cat([p.flatten() for p in before]).norm()
    torch.testing.assert_close(stats["layer0/weights_l2"], norm)
    assert all(
        isinstance(stats[f"layer{i}/gradients_l2"], torch.Tensor) for i in layers
    )


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_norms_are_those_before_clipping(kind):
    free = make(kind, built=build())
    clipped = make(kind, built=build(), clip_grad_norm=1e-3)
    found = [t.one_step(batch(0), rng=0)[1] for t in (free, clipped)]
    for key in found[0]:
        if key.endswith("gradients_l2"):
            assert torch.equal(found[0][key], found[1][key])


def test_monitored_layers_report_drift():
    blocks, loss = build()
    reports = []
    for standard, reversible in blocks:
        monitor = DriftMonitor(on_report=reports.append)
        reversible[:] = [ReversibleSequence(*reversible, monitor=monitor)]
        assert standard
    found = []
    for kind in KINDS:
        made = make(kind, built=copy.deepcopy((blocks, loss)))
        found.append(made.one_step(batch(0), rng=0)[1])
    assert found[0].keys() == found[1].keys()
    drift = {k: float(v) for k, v in found[0].items() if k.endswith("drift")}
    assert drift == {f"layer{i}/drift": 0.0 for i in (1, 2, 4, 6, 7)}
    rough = make("reversible", built=(blocks, loss), exact="none")
    _, stats = rough.one_step(batch(0), rng=0)
    assert 0 < max(float(v) for k, v in stats.items() if k.endswith("drift")) < 1e-4


def messages(caplog):
    found = [(r.levelno, r.getMessage()) for r in caplog.records]
    caplog.clear()
    return found


def test_log_messages(caplog):
    caplog.set_level(logging.DEBUG, "torch_sm3.trainer")
    made = make("reversible", built=build(), n_steps_per_log=3)
    caplog.clear()
    made.one_step(batch(0), rng=0, step=1)
    found = messages(caplog)
    assert (logging.DEBUG, "step 1: inputs (4, 3) int64, (4, 3) bool, (4, 3) int64, "
            "(4, 3) float32") in found  # fmt: skip
    info = [text for level, text in found if level == logging.INFO]
    for phase, count in (("forward", 8), ("loss", 1), ("backward", 8)):
        assert sum(f": {phase}, layer" in text for text in info) == count
    assert all("host memory" in text and text.endswith(" MB") for text in info)
    debug = "\n".join(text for level, text in found if level == logging.DEBUG)
    for word in ("options {'lr'", "slot 0", "weight", "buffer", "layer0/gradients_l2"):
        assert word in debug
    made.one_step(batch(0), rng=0, step=3)
    found = messages(caplog)
    assert [level for level, _ in found] == [logging.DEBUG]
    made.one_step(batch(0), rng=0, step=4)
    found = messages(caplog)
    assert any(level == logging.INFO for level, _ in found)
    assert any("slot 0" in text for _, text in found)
    caplog.set_level(logging.WARNING, "torch_sm3.trainer")
    made.one_step(batch(0), rng=0, step=1)
    assert messages(caplog) == []


def test_errors_of_construction():
    blocks, loss = build()
    bad = [
        (TypeError, "pair of lists of modules, but got .. .arg", {"blocks": [[]]}),
        (TypeError, "pair of lists of modules, but got .Linear, list",
         {"blocks": [(nn.Linear(1, 1), [])]}),
        (TypeError, "block 0 to hold modules, but got int", {"blocks": [([3], [])]}),
        (TypeError, "to hold reversible blocks, but got Linear",
         {"blocks": [([], [nn.Linear(1, 1)])]}),
        (TypeError, "expected a module, but got function", {"loss_layer": steps}),
        (TypeError, "expected an optimizer, but got list", {"optimizer_fn": list}),
        (TypeError, "that a reversible layer takes, but got mosk",
         {"side": {"mosk": -1}}),
        (ValueError, "-1 for the last item, but got 2", {"side": {"mask": 2}}),
        (ValueError, "'none', 'host', but got 'disk'", {"offload": "disk"}),
        (ValueError, "but got 'gird' .argument 'exact'", {"exact": "gird"}),
        (ValueError, "but got 'once' .argument 'clip_strategy'",
         {"clip_strategy": "once"}),
        (ValueError, "but got 0 .argument 'n_microbatches'", {"n_microbatches": 0}),
        (ValueError, "but got -1 .argument 'n_async_layers'", {"n_async_layers": -1}),
        (ValueError, "but got -1 .argument 'n_prefetch", {"n_prefetch_layers": -1}),
        (ValueError, "but got 0 .argument 'n_steps_per_log", {"n_steps_per_log": 0}),
        (ValueError, "> 0, but got 0 .argument 'clip_grad", {"clip_grad_norm": 0}),
        (ValueError, "> 0, but got nan", {"clip_grad_norm": float("nan")}),
        (RuntimeError, "weights of layer 0 on cpu, but got 'layers.0.weight' on meta",
         {"blocks": [([nn.Linear(2, 2, device="meta")], [])], "device": "cpu",
          "side": None}),
    ]  # fmt: skip
    for error, text, options in bad:
        arguments = {"blocks": blocks, "loss_layer": loss, "optimizer_fn": sm3}
        arguments = {**arguments, "side": {"mask": -3, "memory": -4}, **options}
        with pytest.raises(error, match=text):
            ReversibleTrainer(**arguments)


@pytest.mark.parametrize("kind", KINDS)
def test_errors_of_a_step(kind):
    made = make(kind, built=build(), batch_is_global=False)
    before = state(made)
    good = batch(0)
    bad = [
        (TypeError, "tuple of tensors, but got int", {"batch": (good[0], 3)}),
        (TypeError, "tuple of tensors, but got dict", {"batch": {"x": good[0]}}),
        (TypeError, "but got an empty one", {"batch": ()}),
        (ValueError, ">= 0, but got -1 .argument 'step'", {"step": -1}),
        (ValueError, ">= 0, but got -0.1 .*'learning_rate'", {"learning_rate": -0.1}),
        (ValueError, "but got nan .*'learning_rate'", {"learning_rate": float("nan")}),
        (TypeError, "at least 1 stack items|expected|argument", {"batch": good[:1]}),
    ]
    for error, text, options in bad:
        with pytest.raises((error, ValueError), match=text):
            made.one_step(**{"batch": good, "rng": 0, **options})
    assert_equal(state(made), before)
    split = make(kind, built=build(), n_microbatches=2)
    with pytest.raises(ValueError, match="tensors of equally many examples to split"):
        split.one_step((good[0], *[t[:2] for t in good[1:]]))


class Rows(nn.Module):
    def forward(self, x):
        return x


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_must_be_a_scalar(kind):
    cls = ReversibleTrainer if kind == "reversible" else Trainer.from_blocks
    made = cls([([nn.Linear(2, 2)], [])], Rows(), sm3)
    with pytest.raises(ValueError, match=r"floating scalar, but got .*\(3, 2\)"):
        made.one_step(torch.ones(3, 2))
    whole = nn.Linear(2, 2)
    plain = Trainer(whole, torch_sm3.SM3(whole.parameters()))
    with pytest.raises(ValueError, match="floating scalar"):
        plain.one_step(torch.ones(3, 2))
