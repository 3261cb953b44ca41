# SPDX-License-Identifier: Apache-2.0
"""DistributedDataParallel over a sequence equals DDP over the plain run."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.processes import run_ranks
from helpers.reversible_models import couplings, gradients, loss_of, mlp, plain
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torch_sm3.reversible import AdditiveCoupling, ReversibleSequence


class Wrapped(nn.Module):
    def __init__(self, seq: ReversibleSequence, reversible: bool, drop: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.seq = seq
        self.reversible = reversible
        self.drop = drop

    def forward(self, x):
        x = self.first(x)
        y = self.seq(x, x) if self.reversible else plain(self.seq, x, x)
        return y[:1] if self.drop else y


def mean_hook(state, bucket):
    state.append(bucket.index())
    return (
        torch.distributed.all_reduce(bucket.buffer(), async_op=True)
        .get_future()
        .then(lambda future: future.value()[0] / torch.distributed.get_world_size())
    )


CASES = [
    (mode, tied, drop)
    for mode in ("default", "static", "unused")
    for tied in (False, True)
    for drop in (False, True)
    # Plain DDP refuses the unused parameters of the dropped output too.
    if not (drop and mode == "default")
]


def train(rank, mode, tied, drop, reversible):
    torch.manual_seed(0)
    if tied:
        shared = mlp()
        seq = ReversibleSequence(*[AdditiveCoupling(shared, mlp()) for _ in range(3)])
    else:
        seq = couplings(3)
    options = {
        "default": {},
        "static": {"static_graph": True},
        "unused": {"find_unused_parameters": True},
    }[mode]
    model = Wrapped(seq, reversible, drop).double()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.001, **options)
    fired: list[int] = []
    if mode == "default":
        ddp.register_comm_hook(fired, mean_hook)
    torch.manual_seed(10 + rank)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for _ in range(3):
        fired.clear()
        optimizer.zero_grad()
        loss_of(ddp(torch.randn(4, 8, dtype=torch.double))).backward()
        assert len(fired) == len(set(fired))
        optimizer.step()
    return [g if g is None else g.numpy() for g in gradients(model)]


def train_all(rank, world_size):
    return [[train(rank, *case, flag) for flag in (True, False)] for case in CASES]


@pytest.fixture(scope="module")
def trained():
    return run_ranks(2, train_all, timeout=240)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reversible_row_07_ddp(trained, case):
    ranks = [answers[CASES.index(case)] for answers in trained]
    for reversible, expected in ranks:
        for got, want in zip(reversible, expected, strict=True):
            assert (got is None) == (want is None)
            if want is not None:
                np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)
    for got, want in zip(ranks[0][0], ranks[1][0], strict=True):
        assert (got is None and want is None) or (got == want).all()


def no_sync(rank, world_size):
    torch.manual_seed(0)
    seq = couplings(2).double()
    ddp = DistributedDataParallel(Wrapped(seq, True, False).double())
    torch.manual_seed(rank)
    a, b = torch.randn(2, 4, 8, dtype=torch.double)
    with ddp.no_sync():
        loss_of(ddp(a)).backward()
    loss_of(ddp(b)).backward()
    return [g.numpy() for g in gradients(ddp)]


def test_no_sync_accumulates():
    first, second = run_ranks(2, no_sync)
    for a, b in zip(first, second, strict=True):
        assert (a == b).all()
