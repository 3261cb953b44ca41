# SPDX-License-Identifier: Apache-2.0
"""The operators: opcheck, tracing, TorchScript, and bad input that writes nothing."""

from __future__ import annotations

import io

import pytest
import torch

from torch_sm3 import _ops

ops = torch.ops.torch_sm3
SHAPES = [(3, 4), (5,), (2, 3, 4), (), (64, 300)]


def int8_scales(param):
    return torch.zeros(*param.shape[:-1], -(-param.shape[-1] // 256))


def arguments(
    shapes, momentum=None, dtype=torch.float32, kahan=False, device="cpu", covers=()
):
    """Return the lists of one update; ``momentum`` is the dtype of the buffers."""
    params = [torch.randn(s, device=device).to(dtype) for s in shapes]
    grads = [torch.randn(s, device=device).to(dtype) for s in shapes]
    accumulators = [a for p in params for a in _ops.sm3_accumulators(p, covers)]
    buffers, scales = [], []
    if momentum is not None:
        buffers = [torch.zeros_like(p, dtype=momentum) for p in params]
    if momentum == torch.int8:
        scales = [int8_scales(p) for p in params]
    compensations = [torch.zeros_like(p) for p in params] if kahan else []
    steps = [torch.zeros((), dtype=torch.int64, device=device) for _ in params]
    return params, grads, accumulators, buffers, scales, compensations, steps


KINDS = {
    "plain": ({}, {}),
    "momentum": ({"momentum": torch.float32}, {"momentum": 0.9}),
    "int8": ({"momentum": torch.int8}, {"momentum": 0.9}),
    "bfloat16": ({"dtype": torch.bfloat16}, {"weight_decay": 0.1}),
    "kahan": ({"dtype": torch.bfloat16, "kahan": True}, {}),
    "stochastic": ({"dtype": torch.bfloat16}, {"stochastic_rounding": True, "seed": 3}),
    "one": ({}, {"variant": "I", "beta2": 0.9}),
    "trax": ({}, {"compat": "trax", "maximize": True}),
    "float64": ({"dtype": torch.float64}, {"eps": 1e-8}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_opcheck_update(kind) -> None:
    made, options = KINDS[kind]
    shapes = SHAPES[:1] + SHAPES[4:] if kind == "int8" else SHAPES
    tensors = arguments(shapes, **made)
    torch.library.opcheck(ops.sm3_update_.default, tensors, {"lr": 0.1, **options})


def test_opcheck_update_with_tensors_for_numbers() -> None:
    numbers = {
        "lr": torch.tensor(0.1),
        "grad_scale": torch.tensor(2.0),
        "found_inf": torch.zeros(1),
        "skipped": torch.zeros((), dtype=torch.int64),
    }
    torch.library.opcheck(ops.sm3_update_.tensor_lr, arguments(SHAPES), numbers)


def sparse_arguments(dtype=torch.float32, kahan=False):
    param = torch.randn(6, 4).to(dtype)
    indices, values = torch.tensor([[1, 4]]), torch.randn(2, 4).to(dtype)
    step = torch.zeros((), dtype=torch.int64)
    compensations = [torch.zeros_like(param)] if kahan else []
    accumulators = _ops.sm3_accumulators(param)
    return param, indices, values, accumulators, compensations, step


def test_opcheck_of_the_other_operators() -> None:
    for kahan in (False, True):
        tensors = sparse_arguments(torch.bfloat16, kahan)
        torch.library.opcheck(ops.sm3_sparse_update_.default, tensors, {"lr": 0.1})
    torch.library.opcheck(
        ops.sm3_sparse_update_.tensor_lr, sparse_arguments(), {"lr": torch.tensor(0.1)}
    )
    for shape in [(3, 4), (5,), (2, 2), (1, 7, 3)]:
        for dtype in (torch.float32, torch.bfloat16):
            grad = torch.randn(shape).to(dtype)
            torch.library.opcheck(ops.sm3_accumulators.default, (grad,))
            torch.library.opcheck(ops.sm3_maxima.default, ([grad, grad],))
    heads = [3, 2, 3, 4, 2, 0b011, 0b101]
    grad = torch.randn(6, 4)
    torch.library.opcheck(ops.sm3_accumulators.default, (grad, heads))
    torch.library.opcheck(
        ops.sm3_maxima.default, ([grad], heads), {"grad_scale": torch.tensor(4.0)}
    )
    torch.library.opcheck(ops.sm3_nonfinite_.default, ([grad], torch.zeros(())))


def test_compiles_without_a_graph_break() -> None:
    def step(p, g, a, b, s, lr):
        ops.sm3_update_([p], [g], [a, b], [], [], [], [s], lr=lr)
        return p * 2

    params, grads, (a, b), _, _, _, steps = arguments([(6, 5)])
    flat = [params[0], grads[0], a, b, steps[0]]
    for lr in (0.1, torch.tensor(0.1)):
        ours, expected = [t.clone() for t in flat], [t.clone() for t in flat]
        eager = step(*expected, lr)
        torch.compiler.reset()
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(*ours, lr), eager)
        assert all(torch.equal(x, y) for x, y in zip(ours, expected, strict=True))


def test_exports() -> None:
    class Step(torch.nn.Module):
        def forward(self, p, g, a, b, s):
            ops.sm3_update_([p], [g], [a, b], [], [], [], [s], lr=0.1)
            return p + 0

    params, grads, (a, b), _, _, _, steps = arguments([(6, 5)])
    flat = [params[0], grads[0], a, b, steps[0]]
    exported = torch.export.export(Step(), tuple(t.clone() for t in flat))
    ours, expected = [t.clone() for t in flat], [t.clone() for t in flat]
    assert torch.equal(exported.module()(*ours), Step()(*expected))
    assert all(torch.equal(x, y) for x, y in zip(ours, expected, strict=True))


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
                    [],
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


def test_versions_rise_and_skipped_steps_change_nothing() -> None:
    tensors = arguments([(3, 4), (5,)], momentum=torch.float32)
    written = [t for i in (0, 2, 3, 6) for t in tensors[i]]
    versions = [t._version for t in written]
    ops.sm3_update_(*tensors, lr=0.1, momentum=0.9)
    assert all(t._version > v for t, v in zip(written, versions, strict=True))
    copies = [t.clone() for t in written]
    skipped = torch.zeros((), dtype=torch.int64)
    for found in (torch.ones(()), torch.full((1,), 2.0, dtype=torch.float64)):
        ops.sm3_update_(
            *tensors, lr=0.1, momentum=0.9, found_inf=found, skipped=skipped
        )
    assert skipped == 2
    assert all(torch.equal(t, c) for t, c in zip(written, copies, strict=True))


def test_nonfinite_is_found_wherever_it_is() -> None:
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        for bad in (float("nan"), float("inf"), -float("inf")):
            grads = [torch.randn(7).to(dtype), torch.randn(40, 50).to(dtype).t()]
            found = torch.zeros(1)
            ops.sm3_nonfinite_(grads, found)
            assert found == 0
            grads[1][49, 3] = bad
            ops.sm3_nonfinite_(grads, found)
            assert found == 1


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
    (spoil(0, 0, torch.ones(3, 1).expand(3, 4)), RuntimeError, "'params'"),
    (spoil(1, 0, torch.ones(4, 3)), ValueError, "'grads'"),
    (spoil(1, 0, torch.ones(3, 4, dtype=torch.float64)), ValueError, "'grads'"),
    (spoil(1, None, []), ValueError, "expected 2 tensors, but got 0"),
    (spoil(2, 0, torch.zeros(4)), ValueError, "'accumulators'"),
    (spoil(2, 0, torch.zeros(3).double()), ValueError, "'accumulators'"),
    (spoil(2, 0, torch.zeros(6)[::2]), ValueError, "'accumulators'"),
    (spoil(2, None, [torch.zeros(3)]), ValueError, "'accumulators'"),
    (spoil(3, None, []), ValueError, "'momentum_buffers'"),
    (spoil(3, 1, torch.zeros(6)), ValueError, "'momentum_buffers'"),
    (spoil(3, 1, torch.zeros(5, dtype=torch.int8)), ValueError, "'momentum_scales'"),
    (spoil(4, None, [torch.zeros(3, 1)]), ValueError, "'momentum_scales'"),
    (spoil(4, None, [torch.zeros(3, 1)] * 2), ValueError, "'momentum_scales'"),
    (spoil(5, None, [torch.zeros(3, 4)] * 2), ValueError, "'compensations'"),
    (spoil(5, None, [torch.zeros(0)]), ValueError, "'compensations'"),
    (spoil(6, 1, torch.zeros(())), ValueError, "'steps'"),
]


@pytest.mark.parametrize("case", range(len(BAD)))
def test_bad_input_names_the_argument_and_writes_nothing(case) -> None:
    change, error, text = BAD[case]
    tensors = arguments([(3, 4), (5,)], momentum=torch.float32)
    copies = [[t.clone() for t in group] for group in tensors]
    with pytest.raises(error, match=text):
        ops.sm3_update_(*change(tensors), lr=0.1, momentum=0.9)
    for group, before in zip(tensors, copies, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(group, before, strict=True))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("lr", -1.0),
        ("lr", float("inf")),
        ("lr", torch.zeros(2)),
        ("momentum", 1.0),
        ("beta2", 0.0),
        ("eps", -1.0),
        ("weight_decay", float("nan")),
        ("variant", "III"),
        ("compat", "other"),
        ("seed", -1),
        ("covers", [2, 3]),
        ("covers", [1, 2, 1, 1]),
        ("covers", [1, 3, 0]),
        ("covers", [1, 3, 1, 2]),
        ("covers", [1, 3, 1, 1, 7]),
        ("global_index", [0]),
        ("global_index", [0, 0, 1, 5]),
        ("grad_scale", torch.zeros(2)),
        ("found_inf", torch.zeros(0)),
        ("skipped", torch.zeros(())),
    ],
)
def test_bad_options_are_refused(option, value) -> None:
    tensors = arguments([(3,)])
    with pytest.raises(ValueError, match=f"'{option}'"):
        ops.sm3_update_(*tensors, **{"lr": 0.1, option: value})


def test_trax_forgets_nothing() -> None:
    with pytest.raises(ValueError, match="'beta2'"):
        ops.sm3_update_(*arguments([(3,)]), lr=0.1, compat="trax", beta2=0.9)


@pytest.mark.parametrize(
    ("position", "value", "text"),
    [
        (1, torch.tensor([[1, 6]]), "'indices'"),
        (1, torch.tensor([[-1, 2]]), "'indices'"),
        (1, torch.tensor([1, 2]), "'indices'"),
        (1, torch.tensor([[1.0, 2.0]]), "'indices'"),
        (2, torch.zeros(3, 4), "'values'"),
    ],
)
def test_bad_sparse_input_writes_nothing(position, value, text) -> None:
    tensors = list(sparse_arguments())
    before = tensors[0].clone()
    tensors[position] = value
    with pytest.raises(ValueError, match=text):
        ops.sm3_sparse_update_(*tensors, lr=0.1)
    assert torch.equal(tensors[0], before)


def test_meta_checks_as_the_cpu_does() -> None:
    params = [torch.empty(3, 4, device="meta")]
    accumulators = _ops.sm3_accumulators(params[0])
    assert [tuple(a.shape) for a in accumulators] == [(3,), (4,)]
    steps = [torch.zeros((), dtype=torch.int64, device="meta")]
    lists = (params, params, accumulators, [], [], [], steps)
    ops.sm3_update_(*lists, lr=0.1)
    ops.sm3_update_(*lists, lr=torch.empty((), device="meta"))
    with pytest.raises(ValueError, match="'accumulators'"):
        ops.sm3_update_(*spoil(2, None, accumulators[:1])(lists), lr=0.1)
    assert [t.device.type for t in ops.sm3_maxima(params)] == ["meta", "meta"]
