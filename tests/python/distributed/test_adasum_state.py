# SPDX-License-Identifier: Apache-2.0
"""AdasumState, the hook and the all-reduce in a single process."""

import inspect
import pickle
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import torch_sm3
from torch_sm3 import _ops


@pytest.fixture(scope="module", autouse=True)
def _one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_hook_has_the_annotations_that_ddp_compares():
    signature = inspect.signature(torch_sm3.adasum_hook)
    assert list(signature.parameters) == ["state", "bucket"]
    assert signature.parameters["bucket"].annotation == dist.GradBucket
    assert signature.return_annotation == torch.futures.Future[torch.Tensor]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mode": "median"}, "'tree', 'psum', 'mean' or 'sum', but got 'median'"),
        ({"scale": float("nan")}, "finite number, but got nan .argument 'scale'"),
        ({"timeout": timedelta(0)}, "positive timeout"),
        ({"process_group": dist.GroupMember.NON_GROUP_MEMBER}, "contains rank 0"),
    ],
)
def test_bad_options(options, text):
    with pytest.raises(ValueError, match=text):
        torch_sm3.AdasumState(**options)


def test_hook_refuses_another_state():
    with pytest.raises(TypeError, match="expected an AdasumState, but got str"):
        torch_sm3.adasum_hook("state", None)


def test_pickle_keeps_options_and_step_and_no_group():
    state = torch_sm3.AdasumState(mode="psum", scale=2.0)
    state.step = 7
    data = pickle.dumps(state)
    state.close()
    loaded = pickle.loads(data)
    assert (loaded.mode, loaded.scale, loaded.step) == ("psum", 2.0, 7)
    value = torch.ones(3)
    torch_sm3.adasum_all_reduce(value, state=loaded)
    assert torch.equal(value, torch.full((3,), 2.0))
    loaded.close()
    with pytest.raises(RuntimeError, match="got one after close"):
        torch_sm3.adasum_all_reduce(value, state=loaded)


def test_load_state_dict_restores_and_checks():
    state = torch_sm3.AdasumState()
    state.load_state_dict({"mode": "mean", "scale": 0.5, "step": 3})
    assert state.state_dict() == {"mode": "mean", "scale": 0.5, "step": 3}
    with pytest.raises(ValueError, match="load_state_dict"):
        state.load_state_dict({"mode": "none", "scale": 0.5, "step": 3})
    state.close()


def test_failed_bucket_is_raised_by_backward():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    state = torch_sm3.AdasumState()
    model.register_comm_hook(state, torch_sm3.adasum_hook)
    state.close()
    with pytest.raises(RuntimeError, match="got one after close"):
        model(torch.ones(1, 2)).sum().backward()


@pytest.mark.parametrize(
    ("error", "text", "tensors"),
    [
        (ValueError, "at least one tensor", []),
        (TypeError, "got Int", torch.ones(3, dtype=torch.int32)),
        (NotImplementedError, "sparse=False", torch.ones(3).to_sparse()),
        (NotImplementedError, "on meta", torch.ones(3, device="meta")),
        (ValueError, "without overlap", torch.ones(1).expand(3)),
    ],
)
def test_bad_tensors(error, text, tensors):
    with pytest.raises(error, match=text):
        torch_sm3.adasum_all_reduce(tensors)


def test_overlapping_tensors_and_doubled_options_are_refused():
    x = torch.ones(6)
    with pytest.raises(ValueError, match="share memory"):
        torch_sm3.adasum_all_reduce([x[3:], x[:4]])
    torch_sm3.adasum_all_reduce([x[3:], x[:3]])
    state = torch_sm3.AdasumState()
    with pytest.raises(ValueError, match="got both"):
        torch_sm3.adasum_all_reduce(x, state=state, scale=2.0)
    state.close()


def test_operator_passes_opcheck_and_scales():
    name = dist.group.WORLD.group_name
    op = torch.ops.torch_sm3.adasum_all_reduce_
    torch.library.opcheck(op.default, ([torch.randn(3), torch.randn(2, 2)], name))
    x = torch.ones(3)
    _ops.adasum_all_reduce_([x], dist.group.WORLD, "tree", scale=0.25)
    assert torch.equal(x, torch.full((3,), 0.25))


def test_process_ends_without_close():
    code = (
        "import torch, torch.distributed as dist, torch_sm3\n"
        "store = dist.HashStore()\n"
        "dist.init_process_group('gloo', store=store, rank=0, world_size=1)\n"
        "state = torch_sm3.AdasumState()\n"
        "kept = torch_sm3.adasum_all_reduce(torch.ones(3), async_op=True)\n"
        "torch_sm3.adasum_all_reduce(torch.ones(3), state=state)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=120, check=False)
    assert done.returncode == 0
