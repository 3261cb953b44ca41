# SPDX-License-Identifier: Apache-2.0
"""Delta mode on one rank: arguments, sharing, checkpoints, pickling."""

import copy
import pickle

import numpy as np
import pytest
import torch
import torch.distributed as dist

import torch_sm3
from torch_sm3 import SM3, AdasumOptimizer, AdasumState, SM3InBackward


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def parameters(*shapes):
    return [torch.nn.Parameter(torch.randn(*shape)) for shape in shapes]


def give_gradients(params):
    for param in params:
        param.grad = torch.randn_like(param)


def test_public_names():
    assert torch_sm3.AdasumOptimizer is torch_sm3.distributed.AdasumOptimizer
    assert "AdasumOptimizer" in torch_sm3.__all__
    assert "AdasumOptimizer" in torch_sm3.distributed.__all__


# --- arguments -----------------------------------------------------------------


@pytest.mark.parametrize(
    "make, options, error, message",
    [
        (lambda p: p, {}, TypeError, "a torch.optim.Optimizer, but got list"),
        (SM3InBackward, {}, ValueError, "such as SM3, but got SM3InBackward"),
        (
            lambda p: SM3(p, skip_nonfinite=True),
            {},
            ValueError,
            r"whole=True with SM3\(skip_nonfinite=True\).*'whole'",
        ),
        (SM3, {"state": 3}, TypeError, "an AdasumState, but got int"),
        (
            SM3,
            {"combine_every": 0},
            ValueError,
            "at least 1, but got 0.*'combine_every'",
        ),
        (SM3, {"combine_every": 1.5}, TypeError, "an integer, but got float"),
        (SM3, {"bucket_bytes": 0}, ValueError, r"at least 1, but got 0 .*bucket_bytes"),
        (
            SM3,
            {"merge": {"a": "min"}},
            ValueError,
            "or 'keep' for key 'a'",
        ),
        (SM3, {"grad_scaler": 1}, TypeError, "a torch.amp.GradScaler, but got int"),
    ],
)
def test_arguments_are_checked_before_any_message(make, options, error, message):
    # No process group here: a message would be another error.
    with pytest.raises(error, match=message):
        AdasumOptimizer(make(parameters((3,))), **options)


def test_a_state_and_a_group_are_one_too_many(group):
    state = AdasumState()
    with pytest.raises(ValueError, match="either a state or a process group"):
        AdasumOptimizer(SM3(parameters((3,))), dist.group.WORLD, state=state)
    state.close()


def test_what_is_combined_already_is_refused(group):
    optimizer = AdasumOptimizer(SM3(parameters((3,))))
    with pytest.raises(ValueError, match="one rank, but got another AdasumOptimizer"):
        AdasumOptimizer(optimizer)
    optimizer.close()


def test_parameters_without_an_inner_product(group):
    weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False)
    optimizer = torch.optim.SGD([weight, *parameters((3,))], lr=0.1)
    AdasumOptimizer(optimizer).close()  # frozen: takes no part
    other = torch.nn.Parameter(torch.zeros(3).to(torch.float8_e5m2))
    with pytest.raises(TypeError, match=r"bits and more, but got odd of torch\.float8"):
        AdasumOptimizer(
            torch.optim.SGD([other], lr=0.1), named_parameters=[("odd", other)]
        )


def test_a_closure_needs_whole(group):
    optimizer = AdasumOptimizer(torch.optim.SGD(parameters((3,)), lr=0.1))
    with pytest.raises(ValueError, match=r"whole=True with a closure.*'closure'"):
        optimizer.step(lambda: torch.tensor(1.0))
    optimizer.close()


def test_use_after_close(group):
    params = parameters((3,))
    state = AdasumState(scale=0.5)
    optimizer = AdasumOptimizer(torch.optim.SGD(params, lr=0.1), state=state)
    optimizer.close()  # not its own
    give_gradients(params)
    optimizer.step()
    state.close()
    start = params[0].detach().clone()
    with pytest.raises(RuntimeError, match=r"close\(\)"):
        optimizer.step()
    assert torch.equal(start, params[0])


# --- one rank ------------------------------------------------------------------


def test_scale_applies_on_one_rank_too(group):
    params = parameters((30,))
    start = params[0].detach().clone()
    state = AdasumState(scale=0.5)
    optimizer = AdasumOptimizer(torch.optim.SGD(params, lr=1.0), state=state)
    params[0].grad = torch.ones(30)
    optimizer.step()
    np.testing.assert_allclose(params[0].detach(), start - 0.5, atol=1e-6)
    state.close()


def test_groups_and_state_are_shared_both_ways(group):
    inner = torch.optim.Adam(parameters((3,)))
    optimizer = AdasumOptimizer(inner)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state and optimizer.defaults is inner.defaults
    saved = copy.deepcopy(inner.state_dict())
    inner.load_state_dict(saved)  # replaces both in the wrapped optimizer
    assert optimizer.param_groups is inner.param_groups
    optimizer.param_groups = list(inner.param_groups)
    assert optimizer.param_groups is inner.param_groups
    optimizer.close()


def test_state_dict_hooks_and_the_wrapped_optimizers_own_dict(group):
    params = parameters((3,))
    optimizer = AdasumOptimizer(torch.optim.Adam(params))
    give_gradients(params)
    optimizer.step()
    calls = []
    optimizer.register_state_dict_pre_hook(lambda _: calls.append("before"))
    optimizer.register_state_dict_post_hook(lambda _, d: {**d, "more": 1})
    optimizer.register_load_state_dict_pre_hook(lambda _, d: calls.append(d["more"]))
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("after"))
    saved = optimizer.state_dict()
    assert saved.keys() == {"state", "param_groups", "consolidated", "delta", "more"}
    kept = copy.deepcopy(saved)
    optimizer.load_state_dict(saved)
    assert calls == ["before", 1, "after"]
    assert saved.keys() == kept.keys()
    other = torch.optim.Adam(parameters((3,)))
    other.load_state_dict(saved)
    fresh = AdasumOptimizer(torch.optim.Adam(parameters((3,))))
    fresh.load_state_dict(other.state_dict())
    (state,) = fresh.state.values()
    assert torch.equal(state["exp_avg"], optimizer.state[params[0]]["exp_avg"])
    for one in (optimizer, fresh):
        one.close()


def test_start_values_of_other_parameters_are_refused(group):
    params = parameters((3,))
    state = AdasumState(scale=0.5)
    optimizer = AdasumOptimizer(
        torch.optim.SGD(params, 0.1), state=state, combine_every=2
    )
    give_gradients(params)
    optimizer.step()
    saved = optimizer.state_dict()
    assert saved["delta"]["local_steps"] == 1 and len(saved["delta"]["starts"]) == 1
    other = AdasumOptimizer(
        torch.optim.SGD(parameters((4,)), 0.1), state=state, combine_every=2
    )
    with pytest.raises(ValueError, match=r"shapes \[\(4,\)\], but got \[\(3,\)\]"):
        other.load_state_dict(saved)
    state.close()


def test_a_new_group_between_combinations_starts_where_it_is(group):
    a, b = parameters((3,), (4,))
    state = AdasumState(scale=0.5)
    optimizer = AdasumOptimizer(torch.optim.SGD([a], 1.0), state=state, combine_every=2)
    start = [p.detach().clone() for p in (a, b)]
    a.grad, b.grad = torch.ones(3), torch.ones(4)
    optimizer.step()
    optimizer.add_param_group({"params": [b]})
    optimizer.step()
    torch.testing.assert_close(a.detach(), start[0] - 1.0)
    torch.testing.assert_close(b.detach(), start[1] - 0.5)
    state.close()


def test_pickle_and_deepcopy(group):
    params = parameters((3,), (2, 2))
    optimizer = AdasumOptimizer(SM3(params, lr=0.1))
    optimizer.register_step_post_hook(lambda *_: None)
    torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    give_gradients(params)
    optimizer.step()
    for again in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
        grads = [p.grad for p in params]
        copies = [p for g in again.param_groups for p in g["params"]]
        for param, grad in zip(copies, grads, strict=True):
            param.grad = grad.clone()
        again.step()
        assert again.adasum_state.step == 2
        ours = copy.deepcopy(params)
        plain = SM3(ours, lr=0.1)
        plain.load_state_dict(optimizer.state_dict())
        for param, grad in zip(ours, grads, strict=True):
            param.grad = grad.clone()
        plain.step()
        assert all(map(torch.equal, ours, copies))
        again.close()
    optimizer.close()


class Flight:
    """A combination that changes nothing, and tells when it is waited for."""

    def __init__(self, name, log):
        self.name, self.log = name, log
        log.append(("sent", name))

    def wait(self):
        self.log.append(("back", self.name))


def test_buckets_step_while_others_travel(group, monkeypatch):
    log = []
    params = parameters(*[(100,)] * 5)
    named = {f"{i}": p for i, p in enumerate(params)}
    state = AdasumState(scale=0.5)

    def all_reduce(op, tensors, names, parameters):
        assert op == "AdasumOptimizer.step" and parameters[0] is named[names[0]]
        assert tensors[0].shape == (100,)
        return Flight(names[0], log)

    class Logged(torch.optim.SGD):
        def step(self, closure=None):
            (number,) = (i for i, p in enumerate(params) if p.grad is not None)
            log.append(("step", f"{number}"))
            super().step(closure)

    monkeypatch.setattr(state, "_all_reduce", all_reduce)
    optimizer = AdasumOptimizer(
        Logged(params, lr=1.0), state=state, named_parameters=named, bucket_bytes=400
    )
    give_gradients(params)
    optimizer.step()
    assert log == [
        *[("step", "0"), ("sent", "0"), ("step", "1"), ("sent", "1")],
        *[("step", "2"), ("sent", "2"), ("back", "0")],
        *[("step", "3"), ("sent", "3"), ("back", "1")],
        *[("step", "4"), ("sent", "4"), ("back", "2"), ("back", "3"), ("back", "4")],
    ]
    state.close()


def test_unknown_keys_are_listed_on_one_rank_too(group):
    params = parameters((3,))
    optimizer = AdasumOptimizer(torch.optim.NAdam(params))
    give_gradients(params)
    optimizer.step()
    with pytest.raises(ValueError, match=r"none for \['mu_product'\].*'merge'"):
        optimizer.consolidate_state()
    optimizer.close()


def test_sparse_gradients_are_the_wrapped_optimizers_affair(group):
    weight = torch.nn.Parameter(torch.ones(5, 2))
    state = AdasumState(scale=0.5)
    optimizer = AdasumOptimizer(torch.optim.SGD([weight], lr=1.0), state=state)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    rows = torch.nn.functional.embedding(torch.tensor([1, 1]), weight, sparse=True)
    scaler.scale(rows.sum()).backward()
    scaler.step(optimizer)
    expected = torch.ones(5, 2)
    expected[1] = 0.0
    assert torch.equal(weight.detach(), expected)
    state.close()
