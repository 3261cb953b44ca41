# SPDX-License-Identifier: Apache-2.0
"""AdasumState in a single process: options, counters, saving, the hook."""

import inspect
import math
import pickle
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import torch_sm3


@pytest.fixture(scope="module", autouse=True)
def _one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def state():
    state = torch_sm3.AdasumState()
    yield state
    state.close()


def test_hook_has_the_annotations_that_ddp_compares():
    signature = inspect.signature(torch_sm3.adasum_hook)
    assert list(signature.parameters) == ["state", "bucket"]
    assert signature.parameters["bucket"].annotation == dist.GradBucket
    assert signature.return_annotation == torch.futures.Future[torch.Tensor]


NO_GROUP = dist.GroupMember.NON_GROUP_MEMBER


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mode": "median"}, "'tree', 'psum', 'mean' or 'sum', but got 'median'"),
        ({"algorithm": "ring"}, "'auto', 'pair', .* 'vhdd', but got 'ring'"),
        ({"inner": "sum"}, "'mean' or 'adasum', but got 'sum'"),
        ({"check": "all"}, "'off', 'layout', 'hash' or 'full', but got 'all'"),
        ({"scale": float("nan")}, "finite number, but got nan .argument 'scale'"),
        ({"scale": math.inf}, "finite number, but got inf"),
        ({"timeout": timedelta(0)}, "positive timeout"),
        ({"warmup_steps": -1}, "at least 0, but got -1 .argument 'warmup_steps'"),
        ({"scratch_bytes": 2**20 - 1}, "at least 1048576, but got 1048575"),
        ({"node_size": 0}, "at least 1, but got 0 .argument 'node_size'"),
        ({"threads": 0}, "at least 1"),
        ({"check_every": 0}, "at least 1"),
        ({"metrics": -1}, "at least 0"),
        ({"mode": "psum", "inner": "adasum"}, "'adasum' .argument 'inner'"),
        ({"algorithm": "pair"}, "group of 2 ranks for algorithm 'pair', but got 1"),
        ({"algorithm": "two_level"}, "ranks for algorithm 'two_level', but got 1"),
        ({"process_group": NO_GROUP}, "contains rank 0"),
        ({"shard_group": NO_GROUP}, "contains rank 0.*'shard_group'"),
    ],
)
def test_values_that_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        torch_sm3.AdasumState(**options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"wire_dtype": torch.float32}, "torch.float16 or torch.bfloat16"),
        ({"accumulate_dtype": torch.float16}, "torch.float64 or torch.float32"),
        ({"result_dtype": torch.float64}, "None or torch.float32"),
        ({"warmup_steps": 1.5}, "an integer, but got 1.5"),
        ({"scale": "1"}, "a number, but got '1'"),
        ({"timeout": 3.0}, "a datetime.timedelta, but got 3.0"),
    ],
)
def test_types_that_are_refused(options, text):
    with pytest.raises(TypeError, match=text):
        torch_sm3.AdasumState(**options)


def test_options_can_be_read_and_not_be_set():
    options = {
        "mode": "psum",
        "algorithm": "gather",
        "scale": 2.0,
        "node_size": 1,
        "inner": "mean",
        "warmup_steps": 3,
        "accumulate_dtype": torch.float32,
        "wire_dtype": torch.bfloat16,
        "result_dtype": torch.float32,
        "scratch_bytes": 2**21,
        "threads": 1,
        "check": "hash",
        "check_every": 5,
    }
    state = torch_sm3.AdasumState(**options)
    for name, value in options.items():
        assert getattr(state, name) == value
    with pytest.raises(AttributeError, match="load_state_dict"):
        state.mode = "mean"
    assert state.process_group is dist.group.WORLD
    state.close()


@pytest.mark.parametrize("bad", ["state", None, torch_sm3.AdasumState])
def test_another_state_is_refused(bad):
    with pytest.raises(TypeError, match="expected an AdasumState"):
        torch_sm3.adasum_hook(bad, None)
    if bad is not None:
        with pytest.raises(TypeError, match="expected an AdasumState"):
            torch_sm3.adasum_all_reduce(torch.ones(2), state=bad)


def test_pickle_keeps_options_and_step_and_no_group():
    state = torch_sm3.AdasumState(mode="psum", scale=2.0, warmup_steps=3, check="hash")
    state.step = 7
    data = pickle.dumps(state)
    state.close()
    loaded = pickle.loads(data)
    assert loaded.state_dict() == state.state_dict()
    assert loaded.step == 7 and loaded.process_group is None
    # It used the default group, so it finds it by itself.
    value = torch.ones(3)
    torch_sm3.adasum_all_reduce(value, state=loaded)
    assert torch.equal(value, torch.full((3,), 2.0))
    loaded.close()
    with pytest.raises(RuntimeError, match="got one after close"):
        torch_sm3.adasum_all_reduce(value, state=loaded)


def test_pickled_state_of_another_group_asks_for_rebind():
    group = dist.new_group([0])
    state = torch_sm3.AdasumState(group)
    loaded = pickle.loads(pickle.dumps(state))
    with pytest.raises(RuntimeError, match=r"unpickled one of 1 ranks"):
        torch_sm3.adasum_all_reduce(torch.ones(2), state=loaded)
    loaded.rebind(group)
    torch_sm3.adasum_all_reduce(torch.ones(2), state=loaded)
    loaded.close()
    state.close()


def test_state_dict_is_restored_and_checked(state):
    other = torch_sm3.AdasumState(mode="mean", scale=0.5, wire_dtype=torch.float16)
    other.step = 3
    state.load_state_dict(other.state_dict())
    assert state.state_dict() == other.state_dict()
    assert (state.mode, state.scale, state.step) == ("mean", 0.5, 3)
    x = torch.ones(2)
    torch_sm3.adasum_all_reduce(x, state=state)
    assert torch.equal(x, torch.full((2,), 0.5))
    state.load_state_dict({"scale": 2.0})
    assert (state.mode, state.scale, state.step) == ("mean", 2.0, 4)
    for wrong in ({"mode": "none"}, {"speed": 3}, {"algorithm": "pair"}):
        with pytest.raises(ValueError, match="load_state_dict"):
            state.load_state_dict(wrong)
    assert state.mode == "mean"
    other.close()


def test_steps_are_counted_by_buckets_calls_and_advance(state):
    net = torch.nn.Sequential(torch.nn.Linear(30, 30), torch.nn.Linear(30, 30))
    model = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.001)
    model.register_comm_hook(state, torch_sm3.adasum_hook)
    for _ in range(2):
        model(torch.ones(1, 30)).sum().backward()
    assert state.step == 2
    with model.no_sync():
        model(torch.ones(1, 30)).sum().backward()
    assert state.step == 2
    torch_sm3.adasum_all_reduce([torch.ones(3), torch.ones(3).half()], state=state)
    assert state.step == 3
    state.advance()
    assert state.step == 4
    state.rebind()
    assert state.step == 4


def test_rebind_that_is_refused_keeps_the_group(state):
    with pytest.raises(ValueError, match=r"AdasumState.rebind.*contains rank 0"):
        state.rebind(NO_GROUP)
    torch_sm3.adasum_all_reduce(torch.ones(2), state=state)
    state.close()
    state.close()
    state.rebind()
    torch_sm3.adasum_all_reduce(torch.ones(2), state=state)


def test_one_rank_sends_nothing_and_says_what_it_would_use(state):
    assert isinstance(state.algorithm_in_use, str)
    x = torch.tensor([1.0, float("nan"), -0.0])
    y = x.clone()
    torch_sm3.adasum_all_reduce(y, state=state)
    assert torch.equal(x.view(torch.int32), y.view(torch.int32))


def test_failed_bucket_is_raised_by_backward():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    state = torch_sm3.AdasumState()
    model.register_comm_hook(state, torch_sm3.adasum_hook)
    state.close()
    with pytest.raises(RuntimeError, match="got one after close"):
        model(torch.ones(1, 2)).sum().backward()


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
