# SPDX-License-Identifier: Apache-2.0
"""A small net and a twin of the optimizer under test, for delta mode over ranks.

A *twin* steps beside the optimizer under test: the same kind of optimizer, on a copy of
the parameters, given the same gradients, and never combined. What it does from the
common start is the leaf that the parent puts into the oracle.
"""

from __future__ import annotations

from datetime import timedelta

import torch

from torch_sm3 import SM3

SHORT = timedelta(seconds=20)
# Cuts the net of the tests, of 34,450 weights, into four buckets.
SMALL = 13_000

KINDS = {
    "SGD": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "foreach": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "foreach": False}),
    "SM3": (SM3, {"lr": 0.1}),
    "SM3 momentum": (SM3, {"lr": 0.1, "momentum": 0.9, "foreach": True}),
    "SM3 int8": (
        SM3,
        {"lr": 0.1, "momentum": 0.9, "momentum_dtype": torch.int8, "beta2": 0.9},
    ),
}


def make_net():
    torch.manual_seed(11)
    return torch.nn.Sequential(
        torch.nn.Linear(16, 200),
        torch.nn.ReLU(),
        torch.nn.Linear(200, 150),
        torch.nn.Tanh(),
        torch.nn.Linear(150, 7, bias=False),
    )


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 16, generator=generator)


def loss_of(model, x):
    return model(x).square().sum()


def caught(call):
    """Return what ``call`` raises."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def copies(params):
    return [p.detach().clone() for p in params]


def backward(params, rank, step, scale=1.0):
    """Leave gradients of this rank's batch on a net's parameters."""
    net = make_net()
    for own, param in zip(net.parameters(), params, strict=True):
        own.data = param.data
    (scale * loss_of(net, batch(rank, step))).backward()
    for own, param in zip(net.parameters(), params, strict=True):
        param.grad = own.grad.to(param.dtype)


class Twin:
    """The wrapped optimizer's double."""

    def __init__(self, params, kind, options):
        self.params = [p.detach().clone().requires_grad_() for p in params]
        self.optimizer = kind(self.params, **options)

    def step(self, params):
        """Step from where ``params`` are with their gradients; return the changes."""
        for own, param in zip(self.params, params, strict=True):
            own.data.copy_(param.detach())
            own.grad = None if param.grad is None else param.grad.clone()
        self.optimizer.step()
        return [
            (a.detach().to(torch.promote_types(a.dtype, torch.float32))) - b.detach()
            for a, b in zip(self.params, params, strict=True)
        ]


def follow(params, optimizer, twin, rank, steps):
    """Return for each step the start, this rank's changes, and the end."""
    seen = []
    for step in steps:
        backward(params, rank, step)
        start = copies(params)
        changes = twin.step(params)
        optimizer.step()
        seen.append((start, changes, copies(params)))
    return seen
