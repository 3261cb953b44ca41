# SPDX-License-Identifier: Apache-2.0
"""One call of one block without autograd nodes, against the store run."""

from __future__ import annotations

import gc
import math

import pytest
import torch
from helpers.memory_meter import memory_meter
from helpers.reversible_models import (
    ADDITIVE,
    BLOCKS,
    assert_close,
    assert_equal,
    blocks_of,
    loss_of,
    mlp,
    streams_of,
)
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from torch_sm3.reversible import (
    AdditiveCoupling,
    AffineCoupling,
    ConcatenatePair,
    DriftMonitor,
    HalfResidual,
    LayerRun,
    MomentumCoupling,
    ReversibleSequence,
    Select,
    Split,
    Swap,
)

CASES = [("sidecar", kind) for kind in BLOCKS] + [("grid", kind) for kind in ADDITIVE]


def by_layers(blocks, stack, side=None, twice=False, seed=0, **options):
    """Go through blocks layer by layer; return outputs and all gradients."""
    side = side or {}
    torch.manual_seed(seed)
    runs = [
        LayerRun(block, name=f"block {i}", **options) for i, block in enumerate(blocks)
    ]
    items = runs[0].enter(stack, blocks)
    aux = []
    for run in runs:
        items = run.forward(items, side)
        aux.append([leaf for leaf in tree_leaves(run.aux) if _is_float(leaf)])
    outputs = items
    leaves = [y.detach().requires_grad_() if _is_float(y) else y for y in outputs]
    aux = [[leaf.requires_grad_() for leaf in leaves] for leaves in aux]
    loss = loss_of([*leaves, *(leaf for found in aux for leaf in found)])
    loss.backward()
    for _ in range(1 + twice):
        stack, grads = outputs, [getattr(y, "grad", None) for y in leaves]
        side_grads, param_grads = {}, {}
        for run, found in zip(reversed(runs), reversed(aux), strict=True):
            aux_grads = [leaf.grad for leaf in found]
            back = run.reverse_and_grad(stack, grads, aux_grads, side_grads)
            stack, grads, side_grads, more = back
            for key, grad in more.items():
                known = param_grads.get(key)
                param_grads[key] = grad if known is None else known + grad
    return outputs, stack, grads, side_grads, param_grads


def _is_float(item):
    return isinstance(item, Tensor) and item.is_floating_point()


def by_store(blocks, stack, side=None, seed=0, **options):
    """Outputs and gradients of the store run."""
    seq = ReversibleSequence(*blocks, plan="store", engine="node", **options)
    torch.manual_seed(seed)
    result = seq(*stack, **(side or {}))
    aux = ()
    if len(result) == 2 and isinstance(result[0], tuple):
        result, aux = result
    loss_of([*result, *(a for a in tree_leaves(aux) if _is_float(a))]).backward()
    grads = {p: p.grad for p in seq.parameters()}
    for p in seq.parameters():
        p.grad = None
    inputs = []
    for item in stack:
        inputs.append(getattr(item, "grad", None))
        if isinstance(item, Tensor):
            item.grad = None
    return result, inputs, grads


@pytest.mark.parametrize(("exact", "kind"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exact_modes_equal_the_store_run(exact, kind, dtype):
    blocks = [block.to(dtype) for block in blocks_of(kind, 6, dropout=0.2)]
    stack = streams_of(ReversibleSequence(*blocks), dtype=dtype)
    for seed in range(2):  # the first call learns, the second knows
        outputs, inputs, grads, _, params = by_layers(
            blocks, stack, twice=True, exact=exact, seed=seed
        )
        want, want_inputs, want_params = by_store(blocks, stack, exact=exact, seed=seed)
        assert_equal([y.detach() for y in outputs], [y.detach() for y in want])
        assert_equal(grads, want_inputs)
        assert params.keys() == want_params.keys()
        assert_equal([params[p] for p in want_params], list(want_params.values()))
        if exact == "sidecar":
            assert_equal(inputs, [x.detach() for x in stack])


@pytest.mark.parametrize("kind", BLOCKS)
def test_without_exactness_it_is_near(kind):
    blocks = [block.double() for block in blocks_of(kind, 4, dropout=0.2)]
    stack = streams_of(ReversibleSequence(*blocks), dtype=torch.double)
    outputs, inputs, grads, _, params = by_layers(blocks, stack)
    want, want_inputs, want_params = by_store(blocks, stack)
    assert_equal([y.detach() for y in outputs], [y.detach() for y in want])
    assert_close(grads, want_inputs, 1e-10)
    assert_close(inputs, [x.detach() for x in stack], 1e-10)
    assert_close([params[p] for p in want_params], list(want_params.values()), 1e-10)


class Attend(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = mlp(dropout=0.2)

    def forward(self, x, memory, mask=None, *, scale=1.0):
        value = self.inner(x + memory["deep"][0])
        return value * scale if mask is None else value.masked_fill(mask, 0)


@pytest.mark.parametrize("exact", ["grid", "sidecar"])
def test_gradients_of_side_context(exact):
    memory, other = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)
    mask = torch.rand(4, 8) < 0.3
    side = {"memory": {"deep": [memory], "other": other}, "mask": mask, "scale": 0.5}
    blocks = [AdditiveCoupling(Attend(), Attend()) for _ in range(4)]
    stack = streams_of(ReversibleSequence(*blocks))
    _, _, grads, side_grads, params = by_layers(blocks, stack, side, exact=exact)
    _, expected, want_params = by_store(blocks, stack, side, exact=exact)
    assert_equal(grads, expected)
    assert_equal([params[p] for p in want_params], list(want_params.values()))
    assert list(side_grads) == [id(memory)]
    assert_equal([side_grads[id(memory)]], [memory.grad])


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        h = torch.tanh(self.linear(x))
        return h, {"norm": h.square().mean(-1), "best": h.argmax(-1)}, (None, h + 1)


def test_gradients_of_aux_outputs():
    blocks = []
    for _ in range(3):
        blocks += [HalfResidual(Routed(), has_aux=True), Swap()]
    stack = streams_of(ReversibleSequence(*blocks))
    _, _, grads, _, params = by_layers(blocks, stack, exact="sidecar")
    _, want, want_params = by_store(blocks, stack, exact="sidecar")
    assert_equal(grads, want)
    assert_equal([params[p] for p in want_params], list(want_params.values()))


def small():
    return nn.Linear(8, 16)


def test_both_halves_of_an_aux_output():
    block = AffineCoupling(small(), small(), with_logdet=True)
    x = [torch.randn(4, 8, requires_grad=True) for _ in range(2)]
    run = LayerRun(block, exact="sidecar")
    y = run.forward(x, {})
    ones = torch.ones(4)
    assert [a.shape for a in run.aux] == [ones.shape] * 2
    back = run.reverse_and_grad(y, [None, None], [ones, ones])
    _, logdet = block(*x)
    torch.testing.assert_close(run.joined_aux, logdet.detach())
    logdet.sum().backward()
    assert_close(back.input_grads, [x[0].grad, x[1].grad], 1e-5)
    assert_close(
        [back.param_grads[p] for p in block.parameters()],
        [p.grad for p in block.parameters()],
        1e-5,
    )


def test_every_utility():
    blocks = [
        AdditiveCoupling(mlp(), mlp()),
        ConcatenatePair(),
        Split(-1),
        AdditiveCoupling(mlp(), mlp()),
        Select([1, 0, 2, 1]),
    ]
    stack = streams_of(ReversibleSequence(*blocks))
    outputs, inputs, grads, _, params = by_layers(blocks, stack, exact="sidecar")
    want, want_inputs, want_params = by_store(blocks, stack, exact="sidecar")
    assert_equal([y.detach() for y in outputs], [y.detach() for y in want])
    assert_equal(grads, want_inputs)
    assert_equal(inputs, [x.detach() for x in stack])
    assert_equal([params[p] for p in want_params], list(want_params.values()))


def test_items_of_other_types_pass():
    run = LayerRun(HalfResidual(mlp()))
    x, count = torch.randn(2, 8), torch.arange(3)
    y = run.forward([x, x, count, None, "text"], {})
    assert y[2] is count and y[3:] == [None, "text"]
    back = run.reverse_and_grad(y, [torch.ones_like(x), None, None, None, None])
    assert back.inputs[2] is count and back.input_grads[2:] == [None] * 3
    assert back.input_grads[1] is not None


def test_outputs_without_gradients():
    block = AdditiveCoupling(mlp(), mlp())
    run = LayerRun(block)
    x = torch.randn(2, 8)
    y = run.forward([x, x], {})
    back = run.reverse_and_grad(y, [None, None])
    assert back.input_grads == [None, None] and back.param_grads == {}
    for a in back.inputs:
        torch.testing.assert_close(a, x)
    back = run.reverse_and_grad(y, [torch.ones_like(x), None])
    assert {*back.param_grads} == {*block.F.parameters()}


def test_a_new_forward_forgets_the_last_one():
    block, x = AdditiveCoupling(mlp(), mlp()), torch.randn(2, 8)
    run = LayerRun(block, exact="sidecar")
    for _ in range(3):
        y = run.forward([x, 2 * x], {})
    back = run.reverse_and_grad(y, [torch.ones_like(x)] * 2)
    assert_equal(back.inputs, [x, 2 * x])


def test_kept_bytes_and_release():
    x = torch.randn(64, 64)
    kept = {}
    for exact in ("none", "grid", "sidecar"):
        run = LayerRun(AdditiveCoupling(mlp(64), mlp(64)), exact=exact)
        y = run.forward(run.enter([x, x], [run.block]), {"unknown": x})
        kept[exact] = run.kept_bytes
        back = run.reverse_and_grad(y, [x, x])
        assert len(back.param_grads) == len(list(run.block.parameters()))
    assert kept["none"] == kept["grid"] == 0
    assert 0 < 8 * kept["sidecar"] <= 3.25 * 2 * x.numel()
    run.release()
    assert run.kept_bytes == 0


def test_a_tensor_from_elsewhere_is_refused():
    scale = torch.ones((), requires_grad=True)

    class Closure(nn.Module):
        def forward(self, x):
            return x * scale

    run, x = LayerRun(HalfResidual(Closure()), name="layer 7"), torch.randn(2)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"layer 7 .*from elsewhere"):
            run.forward([x, x], {})


def test_the_monitor_of_a_run():
    run = LayerRun(
        AdditiveCoupling(mlp(), mlp()), monitor=DriftMonitor(max_rel=math.inf)
    )
    x = torch.randn(2, 8)
    y = run.forward([x, x], {})
    for _ in range(2):
        run.reverse_and_grad(y, [x, x])
        assert len(run.drift) == 2


def test_overflow_is_counted_and_raised():
    class Large(nn.Module):
        def forward(self, x):
            return 1e9 * x

    x = torch.randn(64, 8)
    run = LayerRun(AdditiveCoupling(Large(), Large()), exact="grid")
    stack = run.enter([x, x], [run.block])
    y = run.forward(stack, {})
    assert_equal(run.reverse_and_grad(y, [x, x]).inputs, stack)
    run = LayerRun(run.block, exact="grid", overflow="raise", name="layer 3")
    with pytest.raises(OverflowError, match="layer 3"):
        run.forward(stack, {})


def test_weights_may_change_once_a_layer_is_reversed():
    """As a trainer does: the layer's update before the next layer is reversed."""
    blocks = blocks_of("additive", 3)
    stack = [x.detach() for x in streams_of(ReversibleSequence(*blocks))]
    runs = [LayerRun(block, exact="sidecar") for block in blocks]
    items = stack
    for run in runs:
        items = run.forward(items, {})
    grads = [torch.ones_like(x) for x in items]
    for run in reversed(runs):
        items, grads, _, params = run.reverse_and_grad(items, grads)
        with torch.no_grad():
            for p, grad in params.items():
                p.sub_(0.1 * grad)
    assert_equal(items, stack)


def test_live_bytes_are_flat():
    block = MomentumCoupling(mlp(dropout=0.3))
    x, lives = torch.randn(64, 8), []
    run = LayerRun(block, exact="sidecar")
    gc.collect()
    gc.disable()
    try:
        for _ in range(6):
            with memory_meter() as meter:
                y = run.forward([x, x], {})
                back = run.reverse_and_grad(y, [x, x])
                del y, back
                run.release()
            lives.append(meter.live)
    finally:
        gc.enable()
    assert lives[1:] == [0] * 5
