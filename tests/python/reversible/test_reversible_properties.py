# SPDX-License-Identifier: Apache-2.0
"""Properties of random stacks of random blocks, each from its seed."""

from __future__ import annotations

import pytest
import torch
from helpers.reversible_models import assert_close, assert_equal, loss_of
from helpers.reversible_random import random_case
from torch import Tensor
from torch.utils._pytree import tree_leaves

from torch_sm3.reversible import ReversibleSequence, inverse

CHUNKS, PER_CHUNK = 10, 20


def seeds(chunk):
    return range(chunk * PER_CHUNK, (chunk + 1) * PER_CHUNK)


def outcome(seq, case, seed):
    """Run forward and backward; return outputs and gradients."""
    torch.manual_seed(seed)
    result = seq(*case.stack, **case.side)
    outputs, aux = result if _has_aux(result) else (result, ())
    picked = [outputs[i] for i in case.used]
    if case.uses_aux:
        picked += [leaf for leaf in tree_leaves(aux) if isinstance(leaf, Tensor)]
    loss = loss_of([y.double() if _is_float(y) else y for y in picked])
    leaves = [t for t in tree_leaves([case.stack, case.side]) if isinstance(t, Tensor)]
    leaves += list(seq.parameters())
    wanted = [t for t in leaves if t.requires_grad]
    values = [leaf.detach() for leaf in tree_leaves(aux) if isinstance(leaf, Tensor)]
    if not loss.requires_grad:
        return outputs, values, [None] * len(wanted)
    grads = torch.autograd.grad(loss, wanted, allow_unused=True)
    return outputs, values, list(grads)


def _has_aux(result):
    return len(result) == 2 and isinstance(result[0], tuple)


def _is_float(item):
    return isinstance(item, Tensor) and item.is_floating_point()


def detached(items):
    return [x.detach() if isinstance(x, Tensor) else x for x in items]


def without_zeros(grads, like):
    """Put None where a custom block gave zeros and the plain run nothing."""
    return [
        None if want is None and got is not None and not got.any() else got
        for got, want in zip(grads, like, strict=True)
    ]


@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize("engine", ["node", "graph"])
def test_equal_to_the_plain_run(engine, chunk):
    for seed in seeds(chunk):
        case = random_case(seed, additive=False, dtype=torch.float64)
        plain = ReversibleSequence(*case.blocks, plan="store", engine="graph")
        want = outcome(plain, case, seed)
        plan = case.plan if seed % 2 else "reversible"
        seq = ReversibleSequence(*case.blocks, plan=plan, engine=engine)
        for _ in range(2):  # the first call learns, the second knows
            got = outcome(seq, case, seed)
            assert_equal(detached(got[0]), detached(want[0]))
            assert_equal(got[1], want[1])
            assert_close(without_zeros(got[2], want[2]), want[2], 1e-8)


@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize("engine", ["node", "graph"])
@pytest.mark.parametrize("exact", ["grid", "sidecar"])
def test_exact_modes_equal_the_store_run(engine, exact, chunk):
    for seed in seeds(chunk):
        dtype = [torch.float32, torch.float64, torch.bfloat16][seed % 3]
        if exact == "grid" and dtype == torch.bfloat16:
            dtype = torch.float32
        case = random_case(1000 + seed, exact == "grid", dtype)
        options = {"exact": exact, "engine": engine}
        store = ReversibleSequence(*case.blocks, plan="store", **options)
        want = outcome(store, case, seed)
        plan = case.plan if seed % 2 else "reversible"
        seq = ReversibleSequence(*case.blocks, plan=plan, **options)
        for _ in range(2):
            got = outcome(seq, case, seed)
            assert_equal(detached(got[0]), detached(want[0]))
            assert_equal(got[1], want[1])
            assert_equal(without_zeros(got[2], want[2]), want[2])


@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize("exact", ["none", "grid"])
def test_the_inverse_returns_the_inputs(exact, chunk):
    for seed in seeds(chunk):
        # The sizes of joined parts are not known outside a call.
        case = random_case(2000 + seed, exact == "grid", torch.float32, joins=False)
        seq = ReversibleSequence(*case.blocks, exact=exact).eval()
        with torch.no_grad():
            result = seq(*case.stack, **case.side)
            outputs = result[0] if _has_aux(result) else result
            back = inverse(seq, *outputs, **case.side)
        for a, b in zip(back, case.stack, strict=True):
            if not _is_float(b):
                assert a is b
            elif exact == "none":
                torch.testing.assert_close(a, b.detach(), rtol=1e-3, atol=1e-3)
            else:
                # Items that no block changes are not rounded.
                unit = 2.0**16
                rounded = torch.round(b.detach() * unit) / unit
                assert torch.equal(a, b.detach()) or torch.equal(a, rounded)
