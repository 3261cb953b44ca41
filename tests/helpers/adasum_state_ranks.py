# SPDX-License-Identifier: Apache-2.0
"""What each rank runs in the tests of Adasum's states and their metrics."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torch_sm3

Tensors = dict[str, torch.Tensor]


def make_net() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(8, 200), torch.nn.Tanh(), torch.nn.Linear(200, 4)
    )


def batch(rank: int, step: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(16, 8, generator=generator)


def backward(model: torch.nn.Module, x: torch.Tensor) -> Tensors:
    """Return the gradients of one backward by name, those of DDP without its prefix."""
    model.zero_grad()
    model(x).square().sum().backward()
    return {
        name.removeprefix("module."): parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


@contextlib.contextmanager
def hooked(net: torch.nn.Module, **options: Any):
    """A model under DDP with the hook, and its state; options of DDP have prefix."""
    ddp = {k[4:]: options.pop(k) for k in list(options) if k.startswith("ddp_")}
    state = torch_sm3.AdasumState(named_parameters=net.named_parameters(), **options)
    model = DistributedDataParallel(net, **ddp)
    model.register_comm_hook(state, torch_sm3.adasum_hook)
    try:
        yield model, state
    finally:
        state.close()


def error(function: Any, *args: Any, **options: Any) -> tuple[str, str]:
    """Return class and text of what a call raises."""
    try:
        function(*args, **options)
    except Exception as raised:
        return type(raised).__name__, str(raised)
    return "nothing", ""


def gathered(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors of all ranks."""
    all_ranks = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(all_ranks, tensor)
    return all_ranks


def metrics_of_training(rank: int, size: int) -> tuple[Any, ...]:
    """The third iteration: leaves of all ranks, results, metrics, bytes at least."""
    with hooked(make_net(), metrics=True, ddp_bucket_cap_mb=0.001) as (model, state):
        for step in range(3):
            local = backward(make_net(), batch(rank, step))
            results = backward(model, batch(rank, step))
        found = state.metrics()
        leaves = {
            name: [leaf.flatten().numpy() for leaf in gathered(local[name])]
            for name in found.layers
        }
        sent = sum(value.nbytes for value in local.values())
        flat = {name: results[name].flatten().numpy() for name in results}
        return leaves, flat, found, sent


def excluded_and_warm_up(rank: int, size: int) -> dict[str, Any]:
    """Layers by name, parameter and predicate; two steps of warm-up; and the leaves."""
    found: dict[str, Any] = {"local": backward(make_net(), batch(rank))}
    net = make_net()
    for key, exclude in {
        "names": ["0.bias", "2.weight"],
        "parameters": [net[0].bias, net[2].weight],
        "mixed": [net[0].bias, "2.weight"],
        "predicate": lambda p: p.shape in ((200,), (4, 200)),
    }.items():
        with hooked(net, exclude=exclude, ddp_bucket_cap_mb=0.001) as (model, state):
            for _ in range(3):
                found[key] = backward(model, batch(rank))
    with hooked(make_net(), warmup_steps=2) as (model, state):
        found["steps"] = [backward(model, batch(rank)) for _ in range(4)]
    # Goes on where it was.
    with hooked(make_net(), warmup_steps=2) as (model, state):
        backward(model, batch(rank))
        kept = state.state_dict()
    with hooked(make_net()) as (model, state):
        state.load_state_dict(kept)
        found["resumed"] = [backward(model, batch(rank)) for _ in range(2)]
    return found


def parameters_that_drift(rank: int, size: int, every: int) -> list[tuple[str, str]]:
    """Errors of iterations; before the second, the last rank changes a weight."""
    errors = []
    with hooked(make_net(), check="full", check_every=every) as (model, _):
        for step in range(5):
            if step == 1 and rank == size - 1:
                with torch.no_grad():
                    model.module[2].weight[1, 2] += 1e-6
            errors.append(error(backward, model, batch(rank)))
            if errors[-1][0] != "nothing":
                break
    return errors


def python_reducer(rank: int, size: int) -> tuple[Tensors, list[Tensors], list[int]]:
    """DDP's Python reducer, which calls the hook for each gradient."""
    local = backward(make_net(), batch(rank))
    mode = torch._dynamo.config.optimize_ddp
    torch._dynamo.config.optimize_ddp = "python_reducer"
    try:
        net = make_net()
        with hooked(net, metrics=True) as (model, state):
            found, steps = [], []
            for _ in range(2):
                found.append(backward(model, batch(rank)))
                state.advance()
                steps.append(len(state.metrics().layers))
    finally:
        torch._dynamo.config.optimize_ddp = mode
    return local, found, steps


def sparse_gradients(rank: int, size: int) -> tuple[str, str]:
    """The error of an embedding with sparse gradients."""

    class Words(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(10, 4, sparse=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.embedding(x)

    with hooked(Words()) as (model, _):
        return error(backward, model, torch.tensor([1, 2]))


def calls(rank: int, size: int) -> dict[str, Any]:
    """Kinds of adasum_all_reduce; every rank's leaves are those of its seed."""
    g = torch.Generator().manual_seed(rank)
    found: dict[str, Any] = {}

    def call(key: str, tensors: Any, **options: Any) -> None:
        before = copy.deepcopy(tensors)
        future = torch_sm3.adasum_all_reduce(tensors, **options)
        if options.get("async_op"):
            tensors = future.wait()
        found[key] = (before, tensors)

    call("one", torch.randn(5, 3, generator=g))
    call("strides", torch.randn(5, 4, generator=g).T[1:3])
    call(
        "dtypes",
        [
            torch.randn(4, generator=g),
            torch.randn(3, generator=g).double(),
            torch.randn(2, 2, generator=g),
            torch.randn(6, generator=g).half(),
        ],
    )
    call("async", [torch.randn(3, generator=g)], async_op=True)
    call("complex", torch.randn(3, generator=g, dtype=torch.complex64))
    call("conjugate", torch.randn(3, generator=g, dtype=torch.complex128).conj())
    call("none", [torch.randn(0), torch.randn(2, generator=g)])
    x = torch.randn(7, generator=g)
    y = torch.empty(7)
    assert torch_sm3.adasum_all_reduce(x, out=y) is None
    found["out"] = (x, y)
    x = torch.where(torch.arange(3) == rank % 3, 6e4, 0.0).half()
    y = torch.empty(3)
    torch_sm3.adasum_all_reduce(x, out=y, result_dtype=torch.float32)
    found["wide"] = (x, y)
    return found


def disagreeing_options(rank: int, size: int) -> tuple[tuple[str, str], torch.Tensor]:
    """Ranks that pass other options meet in the header check; then all is well."""
    x = torch.full((3,), rank + 1.0)
    mode = "tree" if rank == 0 else "psum"
    failure = error(torch_sm3.adasum_all_reduce, x.clone(), mode=mode)
    torch_sm3.adasum_all_reduce(x)
    return failure, x


def groups_of_unlike_histories(rank: int, size: int) -> list[torch.Tensor]:
    """States of some ranks, then of all: each rank has made other groups before."""
    some = dist.new_group([0, size - 1])
    found = []
    if rank in (0, size - 1):
        for _ in range(2):
            state = torch_sm3.AdasumState(some)
            state.close()
    state = torch_sm3.AdasumState()
    x = torch.ones(3)
    torch_sm3.adasum_all_reduce(x, state=state)
    found.append(x.clone())
    group = dist.new_group()
    dist.all_reduce(x, group=group)
    found.append(x.clone())
    state.close()
    return found


def metrics_by_algorithm(
    rank: int, size: int, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, str, Any]:
    """One call: the leaf, the result, the algorithm, the metrics of the layer."""
    state = torch_sm3.AdasumState(metrics=True, **options)
    x = torch.randn(70000, generator=torch.Generator().manual_seed(rank)) + 0.1
    result = x.clone()
    torch_sm3.adasum_all_reduce(result, state=state)
    (layer,) = state.metrics().layers.values()
    used = state.algorithm_in_use
    state.close()
    return x, result, used, layer


def warnings_of_nodes(rank: int, size: int) -> list[tuple[str, str]]:
    """Text and file of the warnings about one node of all ranks."""
    import warnings

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for options in ({"node_size": size}, {"node_size": size, "inner": "adasum"}):
            torch_sm3.AdasumState(**options).close()
    return [(str(w.message), w.filename) for w in found if "node" in str(w.message)]


def changes_of_parameters(rank: int, size: int) -> dict[str, Any]:
    """What delta mode asks of a state: changes that belong to parameters, and swaps."""
    net = make_net()
    state = torch_sm3.AdasumState(
        exclude=[net[0].bias], warmup_steps=1, metrics=True, check="hash"
    )
    generator = torch.Generator().manual_seed(rank)
    parameters = list(net.parameters())
    names = [name for name, _ in net.named_parameters()]
    leaves = [torch.randn(p.numel(), generator=generator) for p in parameters]
    found: dict[str, Any] = {"leaves": leaves, "steps": [], "results": []}
    for _ in range(2):
        changes = [leaf.clone() for leaf in leaves]
        futures = [
            state._all_reduce("delta", changes[k : k + 2], names[k : k + 2], part)
            for k, part in ((0, parameters[:2]), (2, parameters[2:]))
        ]
        found["steps"].append(state.step)
        torch.futures.wait_all(futures)
        found["results"].append(changes)
        state.advance()
    found["layers"] = list(state.metrics().layers)
    found["swapped"] = state._swap(torch.tensor([[rank, 7]]), "delta")
    state.close()
    return found
