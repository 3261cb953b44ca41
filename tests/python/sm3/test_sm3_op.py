# SPDX-License-Identifier: Apache-2.0
"""The operators: opcheck, tracing, TorchScript, and bad input that writes nothing."""

from __future__ import annotations

import io

import pytest
import torch

from torch_sm3 import _ops

sm3_update_ = torch.ops.torch_sm3.sm3_update_


def arguments(shapes, momentum=0.0, dtype=torch.float32, device="cpu"):
    params = [torch.randn(s, device=device).to(dtype) for s in shapes]
    grads = [torch.randn(s, device=device).to(dtype) for s in shapes]
    accumulators = [a for p in params for a in _ops.sm3_accumulators(p)]
    momenta = [torch.zeros_like(p) for p in params] if momentum else []
    steps = [torch.zeros((), dtype=torch.int64) for _ in params]
    return params, grads, accumulators, momenta, steps


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(momentum, dtype) -> None:
    tensors = arguments([(3, 4), (5,), (2, 3, 4), ()], momentum, dtype)
    torch.library.opcheck(sm3_update_, tensors, {"lr": 0.1, "momentum": momentum})
    for shape in [(3, 4), (5,), (2, 2), (1, 7, 3)]:
        torch.library.opcheck(
            torch.ops.torch_sm3.sm3_accumulators, (torch.randn(shape).to(dtype),)
        )


def test_compiles_without_a_graph_break() -> None:
    def step(p, g, a, b, s):
        sm3_update_([p], [g], [a, b], [], [s], lr=0.1)
        return p * 2

    tensors = arguments([(6, 5)])
    flat = [t for group in tensors for t in group]
    expected = [t.clone() for t in flat]
    eager = step(*expected)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(*flat)
    assert torch.equal(compiled, eager)
    assert all(torch.equal(a, b) for a, b in zip(flat, expected, strict=True))


@pytest.mark.skipif(not hasattr(torch.jit, "script"), reason="no TorchScript")
def test_scripted_loop_saved_and_continued() -> None:
    class Learner(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4, 3))
            self.register_buffer("rows", torch.zeros(4))
            self.register_buffer("columns", torch.zeros(3))
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            loss = torch.mm(x, self.weight).square().sum()
            grad = torch.autograd.grad([loss], [self.weight])[0]
            assert grad is not None
            with torch.no_grad():
                torch.ops.torch_sm3.sm3_update_(
                    [self.weight],
                    [grad],
                    [self.rows, self.columns],
                    [],
                    [self.count],
                    lr=0.1,
                )
            return loss.detach()

    scripted = torch.jit.script(Learner())
    x = torch.randn(2, 4)
    losses = [scripted(x).item() for _ in range(3)]
    file = io.BytesIO()
    torch.jit.save(scripted, file)
    file.seek(0)
    loaded = torch.jit.load(file)
    assert torch.equal(loaded(x), scripted(x))
    assert torch.equal(loaded.weight, scripted.weight)
    assert loaded.count == 4 and losses[2] < losses[0]


def spoil(position, index, value):
    def change(tensors):
        groups = [list(group) for group in tensors]
        if index is None:
            groups[position] = value
        else:
            groups[position][index] = value
        return groups

    return change


BAD = [
    (spoil(0, 0, torch.ones(3, 4, dtype=torch.int32)), ValueError, "'params'"),
    (spoil(1, 0, torch.ones(4, 3)), ValueError, "'grads'"),
    (spoil(1, 0, torch.ones(3, 4, dtype=torch.float64)), ValueError, "'grads'"),
    (spoil(1, None, []), ValueError, "expected 2 tensors, but got 0"),
    (spoil(2, 0, torch.zeros(4)), ValueError, "'accumulators'"),
    (spoil(2, 0, torch.zeros(3).double()), ValueError, "'accumulators'"),
    (spoil(2, None, [torch.zeros(3)]), ValueError, "'accumulators'"),
    (spoil(3, None, []), ValueError, "'momentum_buffers'"),
    (spoil(3, 1, torch.zeros(6)), ValueError, "'momentum_buffers'"),
    (spoil(4, 1, torch.zeros(())), ValueError, "'steps'"),
]


@pytest.mark.parametrize("case", range(len(BAD)))
def test_bad_input_names_the_argument_and_writes_nothing(case) -> None:
    change, error, text = BAD[case]
    tensors = arguments([(3, 4), (5,)], momentum=0.9)
    copies = [[t.clone() for t in group] for group in tensors]
    with pytest.raises(error, match=text):
        sm3_update_(*change(tensors), lr=0.1, momentum=0.9)
    for group, before in zip(tensors, copies, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(group, before, strict=True))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("lr", -1.0),
        ("lr", float("inf")),
        ("momentum", 1.0),
        ("beta2", 0.0),
        ("eps", -1.0),
        ("weight_decay", float("nan")),
    ],
)
def test_bad_hyperparameters_are_refused(option, value) -> None:
    tensors = arguments([(3,)])
    with pytest.raises(ValueError, match=f"'{option}'"):
        sm3_update_(*tensors, **{"lr": 0.1, option: value})


def test_meta_checks_as_the_cpu_does() -> None:
    params = [torch.empty(3, 4, device="meta")]
    accumulators = _ops.sm3_accumulators(params[0])
    assert [tuple(a.shape) for a in accumulators] == [(3,), (4,)]
    steps = [torch.zeros((), dtype=torch.int64, device="meta")]
    sm3_update_(params, params, accumulators, [], steps, lr=0.1)
    with pytest.raises(ValueError, match="'accumulators'"):
        sm3_update_(params, params, accumulators[:1], [], steps, lr=0.1)
