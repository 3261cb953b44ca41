# SPDX-License-Identifier: Apache-2.0
"""adasum_all_reduce in a single process: arguments, errors, what is kept."""

import gc

import pytest
import torch
import torch.distributed as dist

import torch_sm3
from torch_sm3 import _ops
from torch_sm3.distributed import _all_reduce


@pytest.fixture(scope="module", autouse=True)
def _one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("error", "text", "tensors"),
    [
        (ValueError, "at least one tensor", []),
        (TypeError, "expected tensors, but got float", [1.0]),
        (TypeError, "got Int", torch.ones(3, dtype=torch.int32)),
        (TypeError, "got Bool", torch.ones(3, dtype=torch.bool)),
        (TypeError, "got Float8", torch.ones(3).to(torch.float8_e4m3fn)),
        (TypeError, "got ComplexHalf", torch.empty(3, dtype=torch.complex32)),
        (NotImplementedError, "sparse=False", torch.ones(3).to_sparse()),
        (ValueError, "without overlap", torch.ones(1).expand(3)),
    ],
)
def test_tensors_that_are_refused(error, text, tensors):
    good = torch.ones(2)
    with pytest.raises(error, match=text):
        torch_sm3.adasum_all_reduce(tensors, scale=2.0)
    if isinstance(tensors, torch.Tensor):
        # Before the first message, whatever comes first.
        with pytest.raises(error, match=text):
            torch_sm3.adasum_all_reduce([good, tensors], scale=2.0)
    assert torch.equal(good, torch.ones(2))


@pytest.mark.parametrize(
    ("error", "text", "options"),
    [
        (TypeError, r"options of AdasumState, but got \['speed'\]", {"speed": 1}),
        (ValueError, "adasum_all_reduce: expected .* got 'none'", {"mode": "none"}),
        (ValueError, "adasum_all_reduce: expected .* got 1", {"algorithm": "pair"}),
        (ValueError, "contains rank 0.*'group'", {"group": -100}),
        (ValueError, "shape", {"out": torch.ones(4)}),
        (
            ValueError,
            "torch.float32, but got torch.float64",
            {"out": torch.ones(3).double()},
        ),
        (ValueError, "1 tensors, but got 2", {"out": [torch.ones(3)] * 2}),
    ],
)
def test_options_that_are_refused(error, text, options):
    with pytest.raises(error, match=text):
        torch_sm3.adasum_all_reduce(torch.ones(3), **options)


def test_overlapping_tensors_and_doubled_options_are_refused():
    x = torch.ones(6)
    with pytest.raises(ValueError, match="share memory"):
        torch_sm3.adasum_all_reduce([x[3:], x[:4]])
    torch_sm3.adasum_all_reduce([x[3:], x[:3]])
    state = torch_sm3.AdasumState()
    for more in ({"scale": 2.0}, {"group": dist.group.WORLD}):
        with pytest.raises(ValueError, match="got both"):
            torch_sm3.adasum_all_reduce(x, state=state, **more)
    state.close()


def test_results_go_where_they_should():
    x = torch.tensor([1.0, 2.0])
    out = torch.zeros(2)
    assert torch_sm3.adasum_all_reduce(x, out=out, scale=0.5) is None
    assert x.tolist() == [1.0, 2.0] and out.tolist() == [0.5, 1.0]
    tensors = (x, torch.ones(2, 2).T)
    future = torch_sm3.adasum_all_reduce(tensors, scale=2.0, async_op=True)
    assert future.wait() is tensors
    assert x.tolist() == [2.0, 4.0] and tensors[1].tolist() == [[2.0, 2.0]] * 2
    future = torch_sm3.adasum_all_reduce(x, out=out, async_op=True)
    assert future.wait() is out and out.tolist() == [2.0, 4.0]


def test_wide_results_of_narrow_tensors():
    x = torch.full((3,), 6e4, dtype=torch.float16)
    out = torch.zeros(3)
    wide = {"result_dtype": torch.float32, "scale": 4.0}
    torch_sm3.adasum_all_reduce(x, out=out, **wide)
    assert out.tolist() == [x[0].item() * 4] * 3
    with pytest.raises(ValueError, match="for results of torch"):
        torch_sm3.adasum_all_reduce(x, **wide)
    with pytest.raises(ValueError, match="float32, but got torch"):
        torch_sm3.adasum_all_reduce(x, out=torch.zeros(3).half(), **wide)
    y = torch.ones(3)
    torch_sm3.adasum_all_reduce(y, **wide)
    assert y.tolist() == [4.0] * 3


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_tensors_are_pairs(dtype):
    x = torch.randn(2, 3, dtype=dtype)
    for tensor in (x.clone(), x.T.clone().T, x.clone().conj(), x.clone().conj().imag):
        before = tensor.clone()
        torch_sm3.adasum_all_reduce(tensor, scale=2.0)
        assert torch.equal(tensor, before * 2)
    for out in (torch.zeros_like(x), torch.zeros_like(x).conj()):
        for tensor in (x, x.conj()):
            torch_sm3.adasum_all_reduce(tensor, out=out, scale=2.0)
            assert torch.equal(out, tensor * 2)
    assert torch.equal(x, x.conj().conj())


def test_excluded_layers_and_warm_up_of_calls():
    x = [torch.ones(2), torch.ones(2, 2)]
    torch_sm3.adasum_all_reduce(
        x, mode="sum", exclude=[x[0]], named_parameters=[("a", x[0]), ("b", x[1])]
    )
    for _ in range(3):
        torch_sm3.adasum_all_reduce(x, warmup_steps=2)
    shared = _all_reduce._groups[dist.group.WORLD]
    (warm,) = [r for r, _ in shared.reductions.values() if r.options.warmup_steps]
    assert warm.step == 3


def test_one_worker_for_a_group_whatever_the_options():
    for scale in range(50):
        torch_sm3.adasum_all_reduce(torch.ones(2), scale=float(scale))
    shared = _all_reduce._groups[dist.group.WORLD]
    assert len(shared.bindings) == 1
    assert len(shared.reductions) <= 32


def test_group_that_is_gone_takes_its_worker_along():
    group = dist.new_group([0])
    torch_sm3.adasum_all_reduce(torch.ones(2), group)
    before = len(_all_reduce._groups)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert len(_all_reduce._groups) == before - 1


def test_operator_passes_opcheck_and_scales():
    name = dist.group.WORLD.group_name
    op = torch.ops.torch_sm3.adasum_all_reduce_
    torch.library.opcheck(op.default, ([torch.randn(3), torch.randn(2, 2)], name))
    x = torch.ones(3)
    _ops.adasum_all_reduce_([x], dist.group.WORLD, "tree", scale=0.25)
    assert torch.equal(x, torch.full((3,), 0.25))
