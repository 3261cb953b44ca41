# SPDX-License-Identifier: Apache-2.0
"""What each rank runs in the tests of state and checkpoints of delta mode."""

from __future__ import annotations

import io

import torch
from helpers.adasum_delta_twins import (
    KINDS,
    SMALL,
    backward,
    caught,
    copies,
    make_net,
)

from torch_sm3 import AdasumOptimizer


def states_of(optimizer):
    """Return a copy of the state, in the order of the parameters."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [
        {k: v.clone() for k, v in optimizer.state.get(p, {}).items()} for p in params
    ]


def consolidation(rank, world):
    """The state of several optimizers before and after."""
    answers = {}
    kinds = ("SM3", "SM3 momentum", "SM3 int8", "Adam", "AdamW", "RMSprop", "SGD")
    for name in kinds:
        kind, options = KINDS[name]
        params = list(make_net().parameters())
        optimizer = AdasumOptimizer(kind(params, **options))
        said = [optimizer.state_dict()["consolidated"]]
        for step in range(3):
            backward(params, rank, step)
            params[2].grad = params[2].grad if rank == 0 or step == 2 else None
            # Only the first rank ever has a gradient of this one.
            params[3].grad = params[3].grad if rank == 0 else None
            optimizer.step()
        said.append(optimizer.state_dict()["consolidated"])
        before = states_of(optimizer)
        optimizer.consolidate_state()
        said.append(optimizer.state_dict()["consolidated"])
        after = states_of(optimizer)
        backward(params, rank, 3)
        optimizer.step()
        said.append(optimizer.state_dict()["consolidated"])
        optimizer.close()
        answers[name] = before, after, said
    return answers


def quantised_tensors(rank, world):
    """State in torchao's 8-bit tensors, which decode what they stand for."""
    try:
        from torchao.optim.subclass_8bit import OptimState8bit
    except ImportError:
        return None
    weight = torch.nn.Parameter(torch.ones(8, 512))
    optimizer = AdasumOptimizer(torch.optim.SGD([weight], 0.1))
    generator = torch.Generator().manual_seed(rank)
    for key, signed in (("exp_avg", True), ("exp_avg_sq", False)):
        values = torch.randn(8, 512, generator=generator)
        state = OptimState8bit.zeros((8, 512), signed=signed)
        optimizer.state[weight][key] = state.copy_(values if signed else values**2)
    kept = optimizer.state[weight]
    before = {key: value.dequantize() for key, value in kept.items()}
    optimizer.consolidate_state()
    after = {key: value.dequantize() for key, value in kept.items()}
    optimizer.close()
    return before, after


def merge_rules(rank, world):
    """Keys that nobody knows, with and without a rule."""
    answers = []
    for merge in (None, {"mu_product": "keep"}, {"mu_product": "mean", "step": "keep"}):
        params = [torch.nn.Parameter(torch.ones(4))]
        optimizer = AdasumOptimizer(torch.optim.NAdam(params), merge=merge)
        for _ in range(rank + 1):
            params[0].grad = torch.full((4,), float(rank + 1))
            optimizer._wrapped.step()
        before = states_of(optimizer)
        failure = caught(optimizer.consolidate_state)
        answers.append((failure, before, states_of(optimizer)))
        optimizer.close()
    return answers


def unlike_states(rank, world):
    """The same key holds something else on the last rank."""
    answers = []
    for odd in (torch.zeros(3), torch.zeros(4, dtype=torch.float64), 1.0, [1]):
        weight = torch.nn.Parameter(torch.ones(4))
        optimizer = AdasumOptimizer(torch.optim.SGD([weight], 0.1))
        value = odd if rank == world - 1 else torch.zeros(4)
        optimizer.state[weight]["exp_avg"] = value
        answers.append(caught(optimizer.consolidate_state))
        optimizer.close()
    return answers


def resume(rank, world):
    """Training in one go, and with a checkpoint of each rank in the middle."""
    ends = {}
    for name, last, options in (
        ("SM3 int8", 20, {}),
        ("SM3", 20, {"whole": True}),
        # Its checkpoint falls between two combinations.
        ("Adam", 100, {"combine_every": 4}),
    ):
        middle = last // 2
        kind, inner = KINDS[name]

        def make(params, kind=kind, inner=inner, options=options):
            return AdasumOptimizer(kind(params, **inner), bucket_bytes=SMALL, **options)

        def train(params, optimizer, steps):
            for step in steps:
                backward(params, rank, step)
                optimizer.step()

        straight = list(make_net().parameters())
        optimizer = make(straight)
        train(straight, optimizer, range(last))
        optimizer.close()

        params = list(make_net().parameters())
        optimizer = make(params)
        train(params, optimizer, range(middle))
        file = io.BytesIO()
        torch.save({"params": copies(params), "opt": optimizer.state_dict()}, file)
        optimizer.close()
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        # As from a fresh program: equal start values, then what was saved.
        params = list(make_net().parameters())
        optimizer = make(params)
        for param, value in zip(params, saved["params"], strict=True):
            param.data.copy_(value)
        optimizer.load_state_dict(saved["opt"])
        train(params, optimizer, range(middle, last))
        steps = optimizer.adasum_state.step
        optimizer.close()
        ends[name] = copies(straight), copies(params), steps
    return ends
