# SPDX-License-Identifier: Apache-2.0
"""Models and small tools of the ranks in the tests of Adasum over processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import torch_sm3

# Of states whose peer is going to fail: each such test lasts as long.
SHORT = timedelta(seconds=3)

Grads = list[torch.Tensor | None]


class Net(torch.nn.Module):
    """Layers of many sizes, one of several tiles, one that odd ranks alone use."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Linear(16, 200),
            torch.nn.ReLU(),
            torch.nn.Linear(200, 150),
            torch.nn.Tanh(),
            torch.nn.Linear(150, 7, bias=False),
        )
        self.sometimes = torch.nn.Linear(7, 7)
        self.never = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, extra: bool = False) -> torch.Tensor:
        y = self.body(x)
        return self.sometimes(y) if extra else y


def make_net() -> torch.nn.Module:
    """Return the part of :class:`Net` that every rank uses."""
    torch.manual_seed(11)
    return Net().body


def batch(rank: int, step: int = 0) -> torch.Tensor:
    """Return the input of one rank in one step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 16, generator=generator)


def loss_of(model: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return a scalar that depends on all of a model's output."""
    return model(*args, **kwargs).square().sum()


def grads(model: torch.nn.Module) -> Grads:
    """Return copies of the gradients."""
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def local_grads(net: torch.nn.Module, *args: Any, **kwargs: Any) -> Grads:
    """Return the gradients of this rank alone; ``net`` has none afterwards."""
    loss_of(net, *args, **kwargs).backward()
    found = grads(net)
    net.zero_grad()
    return found


def wrap(
    net: torch.nn.Module,
    state: Any = None,
    hook: Callable[..., Any] = torch_sm3.adasum_hook,
    **options: Any,
) -> tuple[DistributedDataParallel, Any]:
    """Return a model under DDP with the hook, and the state of the hook."""
    state = torch_sm3.AdasumState() if state is None else state
    model = DistributedDataParallel(net, **options)
    model.register_comm_hook(state, hook)
    return model, state


@contextmanager
def hooked(
    net: torch.nn.Module, state: Any = None, **options: Any
) -> Iterator[DistributedDataParallel]:
    """Yield :func:`wrap`'s model; close its state at the end."""
    model, state = wrap(net, state, **options)
    yield model
    state.close()


def caught(call: Callable[[], Any]) -> tuple[str, str, float]:
    """Return the name and text of what ``call`` raises, and the seconds it took."""
    start = time.monotonic()
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "nothing", "", time.monotonic() - start
