# SPDX-License-Identifier: Apache-2.0
"""Checks of SM3 in engines that flatten or hand out parameters: ZeRO, FSDP1, DDP."""

from __future__ import annotations

import copy
import pickle
import warnings
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.sm3_models import small_model, train
from helpers.sm3_ranks import Check
from helpers.sm3_runs import same_bits
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

import torch_sm3.distributed
from torch_sm3 import SM3

# Ranges of 3 ranks that cut rows in the middle; one rank may have nothing.
_CUTS = {(6, 5): (13, 17), (4, 3, 5): (7, 7), (40,): (1, 30), (2, 2): (1, 2)}


def _ranges(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    numel = torch.Size(shape).numel()
    ends = [0, *_CUTS[shape], numel]
    return list(pairwise(ends))


class _Hinted:
    """The same run on whole tensors and on flat ranges of them with hints."""

    def __init__(
        self, rank: int, dtype: torch.dtype, group: Any = None, **options: Any
    ) -> None:
        self.whole = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in _CUTS]
        self.ranges = [_ranges(shape)[rank] for shape in _CUTS]
        self.parts = [
            nn.Parameter(w.detach().flatten()[a:b].clone())
            for w, (a, b) in zip(self.whole, self.ranges, strict=True)
        ]
        self.one, self.other = SM3(self.whole, **options), SM3(self.parts, **options)
        for param, shape, (a, _) in zip(self.parts, _CUTS, self.ranges, strict=True):
            self.other.set_shape_hint(param, shape, a, process_group=group)

    def run(self, steps: int, start: int = 0) -> _Hinted:
        for seed in range(start, start + steps):
            generator = torch.Generator().manual_seed(seed)
            for w, p, (a, b) in zip(self.whole, self.parts, self.ranges, strict=True):
                w.grad = torch.randn(w.shape, generator=generator).to(w.dtype)
                p.grad = w.grad.flatten()[a:b].clone()
            self.one.step()
            self.other.step()
        return self

    def check(self, name: str) -> None:
        self.other.state_dict()
        for w, p, (a, b) in zip(self.whole, self.parts, self.ranges, strict=True):
            assert same_bits(p.detach(), w.detach().flatten()[a:b]), name
            theirs, ours = self.one.state[w], self.other.state[p]
            assert theirs.keys() == ours.keys()
            for key, value in theirs.items():
                if key in ("momentum_buffer", "compensation"):
                    value = value.flatten()[a:b]
                assert same_bits(ours[key], value), f"{name}: {key} of {w.shape}"


def hints_that_cut_rows(rank: int, folder: str) -> None:
    float32, bfloat16 = torch.float32, torch.bfloat16
    for dtype, options in [
        (float32, {}),
        (float32, {"momentum": 0.9, "beta2": 0.9, "weight_decay": 0.1}),
        (float32, {"variant": "I"}),
        (float32, {"variant": "I", "beta2": 0.5, "compat": "enealor"}),
        (float32, {"fused": False}),
        (float32, {"foreach": True, "momentum": 0.5}),
        (torch.float64, {"variant": "I"}),
        (bfloat16, {"stochastic_rounding": True, "seed": 9}),
        (bfloat16, {"kahan": True, "momentum": 0.5}),
    ]:
        _Hinted(rank, dtype, **options).run(3).check(f"{dtype} {options}")
    # By a group that is named.
    group = dist.new_group()
    _Hinted(rank, float32, group=group).run(3).check("group")


def hints_outlive_copies(rank: int, folder: str) -> None:
    run = _Hinted(rank, torch.float32, group=dist.new_group()).run(1)
    for make in (copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))):
        run.other = make(run.other)
        run.parts = run.other.param_groups[0]["params"]
        run.run(1, start=3).check("copy")


def hints_skip_together(rank: int, folder: str) -> None:
    run = _Hinted(rank, torch.float32, skip_nonfinite=True).run(1)
    before = [p.detach().clone() for p in run.parts]
    if rank == 2:
        run.parts[0].grad[0] = torch.nan
    run.other.step()
    assert all(map(torch.equal, before, run.parts))
    assert run.other.skipped_steps == 1
    run.run(1, start=5).check("after")


def hints_that_do_not_fit(rank: int, folder: str) -> None:
    param = nn.Parameter(torch.zeros(300))
    optimizer = SM3([param])
    outside = dist.GroupMember.NON_GROUP_MEMBER
    with pytest.raises(ValueError, match="process group with this rank"):
        optimizer.set_shape_hint(param, (64, 512), process_group=outside)


# --- ZeRO ----------------------------------------------------------------------


def _zero_model(layers: int) -> nn.Module:
    torch.manual_seed(1)
    wide = [nn.Linear(8, 8, bias=False) for _ in range(layers)]
    return nn.Sequential(*wide)


def _set_grads(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator)


def zero(rank: int, folder: str) -> None:
    """Three ranks own five, or two layers: then one owns nothing."""
    for layers in (5, 2):
        model, other = _zero_model(layers), _zero_model(layers)
        options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
        one = SM3(model.parameters(), **options)
        two = ZeroRedundancyOptimizer(
            other.parameters(), optimizer_class=SM3, **options
        )
        for seed in range(6):
            for m, optimizer in [(model, one), (other, two)]:
                _set_grads(m, seed)
                optimizer.step()
            if seed == 2:
                two.consolidate_state_dict(to=0)
                saved = [two.state_dict() if rank == 0 else None]
                dist.broadcast_object_list(saved, src=0)
                # What is consolidated is what the plain run has.
                plain = SM3(model.parameters(), **options)
                plain.load_state_dict(saved[0])
                for p, state in one.state.items():
                    for key, value in state.items():
                        assert torch.equal(plain.state[p][key], value)
                two = ZeroRedundancyOptimizer(
                    other.parameters(), optimizer_class=SM3, lr=0.3
                )
                two.load_state_dict(saved[0])
        pairs = zip(model.parameters(), other.parameters(), strict=True)
        assert all(torch.equal(p, q) for p, q in pairs)


# --- FSDP1 ---------------------------------------------------------------------


def row_16(rank: int, folder: str) -> None:
    """FSDP1 flattens: a warning, diagonal state that it can save, exact with hints."""
    _fsdp1_without_a_hint()
    _fsdp1_of_original_parameters()
    _fsdp1_with_hints(rank)
    _fsdp1_refuses_hinted_state(rank)


def _whole_gradients(model: nn.Module, seed: int) -> None:
    """Backward with gradients that are equal on all ranks and exact in any sum."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-3, 4, (4, 6), generator=generator).float()
    model.zero_grad()
    (model(x) * 2).sum().backward()


def _fsdp1(use_orig_params: bool) -> FSDP1:
    torch.manual_seed(2)
    model = nn.Linear(6, 5)
    return FSDP1(model, use_orig_params=use_orig_params, device_id=torch.device("cpu"))


def _fsdp1_without_a_hint() -> None:
    model = _fsdp1(use_orig_params=False)
    optimizer = SM3(model.parameters())
    _whole_gradients(model, 0)
    with pytest.warns(UserWarning, match="fully_shard.*set_shape_hint"):
        optimizer.step()
    saved = FSDP1.optim_state_dict(model, optimizer)
    (state,) = [one for one in saved["state"].values() if "bias" not in one][:1]
    assert state["accumulator_0"].numel() >= 5
    assert all("accumulator_1" not in one for one in saved["state"].values())
    loaded = FSDP1.optim_state_dict_to_load(model, optimizer, saved)
    before = {k: v.clone() for k, v in optimizer.state_dict()["state"][0].items()}
    optimizer.load_state_dict(loaded)
    after = optimizer.state_dict()["state"][0]
    assert before.keys() == after.keys()
    assert all(torch.equal(after[k], v) for k, v in before.items())


def _fsdp1_with_hints(rank: int) -> None:
    torch.manual_seed(2)
    plain = nn.Linear(6, 5)
    one = SM3(plain.parameters(), momentum=0.5)
    model = _fsdp1(use_orig_params=True)
    _whole_gradients(model, 0)
    params = list(model.parameters())
    optimizer = SM3(params, momentum=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shapes = [tuple(p.shape) for p in plain.parameters()]
        for param, shape in zip(params, shapes, strict=True):
            start = _offset(param.numel(), torch.Size(shape).numel(), rank)
            optimizer.set_shape_hint(param, shape, start)
        for seed in range(3):
            _whole_gradients(plain, seed)
            _whole_gradients(model, seed)
            one.step()
            optimizer.step()
        mine = optimizer.state_dict()["state"]
    theirs = one.state_dict()["state"]
    for i, state in theirs.items():
        for key in state:
            if key.startswith("accumulator_"):
                assert torch.equal(mine[i][key], state[key]), f"{key} of {i}"
    with FSDP1.summon_full_params(model):
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(p, q.reshape(p.shape))


def _fsdp1_of_original_parameters() -> None:
    """One rank may hold nothing of a parameter, and so no gradient.

    Without momentum: torch 2.14 gathers the state tensors of a parameter on the CPU
    into one buffer, so that every key gets the last one's values, Adam's as well.
    """
    model = _fsdp1(use_orig_params=True)
    optimizer = SM3(model.parameters())
    for seed in range(2):
        _whole_gradients(model, seed)
        optimizer.step()
    saved = FSDP1.optim_state_dict(model, optimizer)
    assert saved["state"]["weight"]["accumulator_0"].shape == (5, 6)
    loaded = FSDP1.optim_state_dict_to_load(model, optimizer, saved)
    again = SM3(model.parameters())
    again.load_state_dict(loaded)
    before, after = optimizer.state_dict()["state"], again.state_dict()["state"]
    # torch leaves out what is empty on this rank.
    assert after.keys() == {i for i, s in before.items() if s["accumulator_0"].numel()}
    for i, state in after.items():
        for key, value in state.items():
            assert torch.equal(value, before[i][key]), f"{key} {value} {before[i][key]}"


def _fsdp1_refuses_hinted_state(rank: int) -> None:
    torch.manual_seed(2)
    model = FSDP1(
        nn.Linear(6, 5, bias=False), use_orig_params=True, device_id=torch.device("cpu")
    )
    _whole_gradients(model, 0)
    (param,) = model.parameters()
    optimizer = SM3([param])
    optimizer.set_shape_hint(param, (5, 6), _offset(param.numel(), 30, rank))
    optimizer.step()
    with pytest.raises((RuntimeError, AssertionError, ValueError)):
        FSDP1.optim_state_dict(model, optimizer)


def _offset(numel: int, whole: int, rank: int) -> int:
    """Return where this rank's range starts, from the sizes of all."""
    sizes = [torch.zeros((), dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor(numel))
    assert sum(sizes) == whole
    return int(sum(sizes[:rank]))


# --- functional ----------------------------------------------------------------


def ddp_with_the_step_in_its_hook(rank: int, folder: str) -> None:
    options: dict[str, Any] = {"momentum": 0.9, "beta2": 0.9}
    plain = small_model()
    one = SM3(plain.parameters(), **options)
    model = DDP(small_model())
    model._register_fused_optim(SM3, **options)
    train(plain, one, 4)
    generator = torch.Generator().manual_seed(4)
    for _ in range(4):
        x = torch.randn(16, 8, generator=generator)
        model.zero_grad()
        model(x).square().mean().backward()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q)


def zero_that_overlaps_with_ddp(rank: int, folder: str) -> None:
    """Its hook wants NCCL; that it takes SM3 shows before."""
    model = DDP(small_model())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=SM3, overlap_with_ddp=True, lr=0.1
    )
    assert optimizer._optim_constructor is torch_sm3.distributed.FunctionalSM3


def distributed_optimizer(rank: int, folder: str) -> None:
    """By RPC, of rank 0 with itself."""
    if rank != 0:
        return
    from torch.distributed import autograd, rpc
    from torch.distributed.optim import DistributedOptimizer

    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/rpc")
    rpc.init_rpc("only", rank=0, world_size=1, rpc_backend_options=options)
    try:
        weight = nn.Parameter(torch.arange(6.0).reshape(2, 3))
        plain = nn.Parameter(weight.detach().clone())
        two = DistributedOptimizer(SM3, [rpc.RRef(weight)], lr=0.1)
        one = SM3([plain], lr=0.1)
        for _ in range(3):
            with autograd.context() as context:
                autograd.backward(context, [(weight**2).sum()])
                two.step(context)
            one.zero_grad()
            (plain**2).sum().backward()
            one.step()
        assert torch.equal(weight, plain)
    finally:
        rpc.shutdown()


def adasum_still_has_its_names(rank: int, folder: str) -> None:
    assert torch_sm3.AdasumState is torch_sm3.distributed.AdasumState
    tensor: Tensor = torch.ones(3)
    torch_sm3.adasum_all_reduce(tensor)
    assert torch.equal(tensor, torch.ones(3))


CHECKS: dict[int, list[Check]] = {
    2: [
        row_16,
        ddp_with_the_step_in_its_hook,
        zero_that_overlaps_with_ddp,
        distributed_optimizer,
        adasum_still_has_its_names,
    ],
    3: [
        hints_that_cut_rows,
        hints_outlive_copies,
        hints_skip_together,
        hints_that_do_not_fit,
        zero,
    ],
    4: [],
}
