# SPDX-License-Identifier: Apache-2.0
"""What each rank of the distributed reversible tests does."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from helpers.reversible_models import couplings, gradients, loss_of, mlp, plain
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torch_sm3.reversible import (
    AdditiveCoupling,
    ReversibleSequence,
    is_recomputing,
)

RUNS = ("plain", "node", "graph")
MODES: dict[str, dict[str, bool]] = {
    "default": {},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "view": {"gradient_as_bucket_view": True},
}
#: Mode of DDP, whether a function is tied across blocks, whether an output is dropped.
DDP_CASES = [
    (mode, tied, drop)
    for mode in MODES
    for tied in (False, True)
    for drop in (False, True)
]


class Wrapped(nn.Module):
    """A model around a sequence; ``run`` says how the sequence is run."""

    def __init__(self, seq: ReversibleSequence, run: str, drop: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.seq = seq
        self.run = run
        self.drop = drop

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        x = self.first(x)
        if self.run == "plain":
            y = plain(self.seq, x, x)
        else:
            y = self.seq(x, x)
        return y[:1] if self.drop else y


def sequence(tied: bool, run: str, **options: Any) -> ReversibleSequence:
    """Three couplings; if tied, with one F."""
    if run in ("node", "graph"):
        options["engine"] = run
    if not tied:
        return couplings(3, lambda: mlp(dropout=0.2), **options)
    shared = mlp(dropout=0.2)
    blocks = [AdditiveCoupling(shared, mlp(dropout=0.2)) for _ in range(3)]
    return ReversibleSequence(*blocks, **options)


def _arrays(grads: list[Any]) -> list[Any]:
    return [grad if grad is None else grad.numpy() for grad in grads]


def ddp(rank: int, mode: str, tied: bool, drop: bool, run: str) -> dict[str, Any]:
    """Train three steps; return gradients, and events of the last backward pass."""
    torch.manual_seed(0)
    model = Wrapped(sequence(tied, run), run, drop).double()
    parallel = DistributedDataParallel(model, bucket_cap_mb=0.001, **MODES[mode])
    events: list[Any] = []

    def reduce(state, bucket):  # torch checks annotations, and knows no strings
        events.append(bucket.index())
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda f: f.value()[0] / dist.get_world_size())

    parallel.register_comm_hook(None, reduce)
    for block in model.seq:
        block.G.register_forward_hook(
            lambda *_: events.append("again") if is_recomputing() else None
        )
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.05)
    torch.manual_seed(10 + rank)
    try:
        for _ in range(3):
            optimizer.zero_grad()
            events.clear()
            loss_of(parallel(torch.randn(4, 8, dtype=torch.double))).backward()
            optimizer.step()
    except RuntimeError as error:
        return {"error": str(error)[:60]}
    return {"grads": _arrays(gradients(model)), "events": events}


def no_sync(rank: int, run: str) -> list[Any]:
    """Accumulate two microbatches and reduce once."""
    torch.manual_seed(0)
    model = Wrapped(sequence(True, run), run).double()
    parallel = DistributedDataParallel(model)
    torch.manual_seed(rank)
    a, b = torch.randn(2, 4, 8, dtype=torch.double)
    with parallel.no_sync():
        loss_of(parallel(a)).backward()
    loss_of(parallel(b)).backward()
    return _arrays(gradients(model))


def all_ddp(rank: int, world_size: int) -> dict[Any, Any]:
    """Run every case of DistributedDataParallel, each in three ways."""
    answers: dict[Any, Any] = {}
    for case in DDP_CASES:
        answers[case] = {run: ddp(rank, *case, run) for run in RUNS}
    answers["no_sync"] = {run: no_sync(rank, run) for run in RUNS}
    return answers


#: What is sharded besides the root, and the policy of mixed precision.
FSDP_CASES = [
    (units, policy)
    for units in ("root", "functions", "blocks", "sequence")
    for policy in ("none", "cast", "cast back")
]


def fsdp(rank: int, world_size: int, units: str, policy: str, run: str) -> Any:
    """Train two sharded steps; return gradients, and what happened."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (world_size,))}
    options["reshard_after_forward"] = True
    if policy != "none":
        back = torch.float32 if policy == "cast back" else None
        options["mp_policy"] = MixedPrecisionPolicy(
            torch.bfloat16, torch.float32, output_dtype=back
        )
    torch.manual_seed(0)
    # A plan is another run of the same modules, whatever calls them.
    plan = "store" if run == "plain" else "reversible"
    seq = couplings(3, lambda: mlp(dropout=0.2), exact="sidecar", plan=plan)
    model = Wrapped(seq, "plain" if run == "plain" and units != "sequence" else "")
    if run == "plain" and units == "sequence":
        seq.engine = "graph"
    for block in seq:
        if units == "functions":
            fully_shard(block.F, **options)
            fully_shard(block.G, **options)
        elif units == "blocks":
            fully_shard(block, **options)
    if units == "sequence":
        fully_shard(seq, **options)
    fully_shard(model, **options)
    fired: dict[str, int] = {}

    def count(name: str) -> Any:
        return lambda *_: fired.update({name: fired.get(name, 0) + 1})

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(count(name))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    for _ in range(2):
        optimizer.zero_grad()
        fired.clear()
        y = model(torch.randn(4, 8))
        loss_of(y).backward()
        optimizer.step()
    names = [name for name, _ in model.named_parameters()]
    return {
        "grads": [p.grad.full_tensor().numpy() for p in model.parameters()],
        "fired": [fired.get(name) for name in names],
        "node": type(y[0].grad_fn).__name__,
        "generator": torch.get_rng_state().numpy(),
    }


class Gated(nn.Module):
    """A function with side context."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * memory


def fsdp_with_side(rank: int, world_size: int, run: str) -> list[Any]:
    """Shard blocks whose functions take side context that requires grad."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world_size,))
    torch.manual_seed(0)
    seq = couplings(3, Gated, exact="sidecar")
    for block in seq:
        fully_shard(block, mesh=mesh)
    torch.manual_seed(rank)
    x, memory = torch.randn(2, 4, 8).requires_grad_().unbind()
    call = (lambda *s, **k: plain(seq, *s, **k)) if run == "plain" else seq
    leaf = memory.detach().requires_grad_()
    loss_of(call(x, x, memory=leaf.exp())).backward()
    full = [p.grad.full_tensor() for p in seq.parameters()]
    return [grad.numpy() for grad in [leaf.grad, *full]]


def fsdp_with_nodes(rank: int, world_size: int) -> str:
    """Ask for the node engine over shards; return the error."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    seq = couplings(1, engine="node")
    for function in (seq[0].F, seq[0].G):
        fully_shard(function, mesh=init_device_mesh("cpu", (world_size,)))
    x = torch.randn(4, 8)
    try:
        seq(x, x)
    except RuntimeError as error:
        return str(error)
    return "no error"


def all_fsdp(rank: int, world_size: int) -> dict[Any, Any]:
    """Run every case of fully_shard, reversible and plain."""
    runs = ("plain", "auto")
    answers: dict[Any, Any] = {}
    for case in FSDP_CASES:
        answers[case] = {run: fsdp(rank, world_size, *case, run) for run in runs}
    answers["side"] = {run: fsdp_with_side(rank, world_size, run) for run in runs}
    answers["node"] = fsdp_with_nodes(rank, world_size)
    return answers
