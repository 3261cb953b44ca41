# SPDX-License-Identifier: Apache-2.0
"""What each rank does in the distributed tests of the trainers."""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from helpers.trainer_models import adamw, assert_equal, batch, build, make, state
from reference.trainer_oracle import fold, layered

from torch_sm3.trainer import Trainer

OPTIONS: list[dict[str, Any]] = [
    {},
    {"offload": "host", "n_microbatches": 2},
    {"adasum": True},
    {"clip_grad_norm": 0.02, "n_microbatches": 2},
    {"clip_grad_norm": 0.02, "clip_strategy": "host_grads", "adasum": True},
    {"n_async_layers": 3, "optimizer": adamw},
    {"batch_is_global": True, "exact": "grid"},
]


def digest(tensors: Sequence[torch.Tensor]) -> str:
    """A hash of the bits of tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        data = tensor.detach().contiguous().flatten().view(torch.uint8)
        found.update(data.numpy().tobytes())
    return found.hexdigest()


def on_ranks(rank: int, size: int, names: Sequence[str]) -> dict[str, Any]:
    """Run checks by name; return what each returned, or what went wrong."""
    found = {}
    for name in names:
        try:
            found[name] = globals()[name](rank, size)
        except Exception:
            found[name] = traceback.format_exc()
    return found


def weights(trainer: Any) -> list[torch.Tensor]:
    return [p for layer in trainer._layers for p in layer.owned]


def equality(rank: int, size: int) -> list[str]:
    """Both trainers agree on each rank; return hashes of the weights."""
    hashes = []
    for options in OPTIONS:
        found = []
        for kind in ("reversible", "store"):
            # Weights that differ until the first rank's are sent.
            trainer = make(kind, built=build(seed=rank), **options)
            found.append(train(trainer, rank, size, options))
            hashes.append(digest(weights(trainer)))
            trainer.close()
        assert_equal(*found)
    return hashes


def train(trainer: Any, rank: int, size: int, options: Any) -> list[torch.Tensor]:
    """Three steps on a batch of this rank, or on one of all ranks."""
    torch.manual_seed(rank)
    is_global = options.get("batch_is_global", False)
    found: list[Any] = []
    for i in range(3):
        part = batch(i, 4 * size) if is_global else batch(10 * rank + i)
        loss, stats = trainer.one_step(part, learning_rate=0.1 / (1 + i))
        found += [loss, *stats.values()]
    figures = [torch.as_tensor(value) for value in found]
    return [*figures, *state(trainer), torch.get_rng_state()]


def mean(rank: int, size: int) -> float:
    """A step on ranks is a step on the mean of their gradients; return the loss."""

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.5)

    trainer = make("reversible", exact="none", optimizer=sgd)
    before = [p.detach().clone() for p in weights(trainer)]
    loss, _ = trainer.one_step(batch(rank), rng=77)
    losses, grads = [], []
    for other in range(size):
        run, parameters, _ = layered(build(), fold(77, other))
        one = run(batch(other), 0)
        losses.append(one.detach())
        grads.append(torch.autograd.grad(one, parameters))
    torch.testing.assert_close(loss, torch.stack(losses).mean())
    for i, (old, new) in enumerate(zip(before, weights(trainer), strict=True)):
        expected = old - 0.5 * torch.stack([g[i] for g in grads]).mean(0)
        torch.testing.assert_close(new.detach(), expected, rtol=1e-5, atol=1e-6)
    trainer.close()
    return float(loss)


def overflow(rank: int, size: int) -> list[bool]:
    """An overflow on one rank skips the step of all."""
    moved = []
    for adasum in (False, True):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        trainer = make("reversible", grad_scaler=scaler, adasum=adasum)
        for step in range(2):
            *rest, loss_weights = batch(rank)
            if step == 0 and rank == size - 1:
                loss_weights = loss_weights.fill_(torch.inf)
            before = digest(weights(trainer))
            trainer.one_step((*rest, loss_weights), rng=1)
            moved.append(digest(weights(trainer)) != before)
        assert scaler.get_scale() == 2.0
        trainer.close()
    return moved


class Either(torch.nn.Module):
    """Uses one of two weights, or neither of a third."""

    def __init__(self) -> None:
        super().__init__()
        self.used = torch.nn.Parameter(torch.ones(2))
        self.first = torch.nn.Parameter(torch.ones(2))
        self.never = torch.nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_first = dist.get_rank() == 0
        return (x * self.used * (self.first if is_first else 1.0)).sum()


def unused(rank: int, size: int) -> list[float]:
    """A weight that some ranks use is updated on all, one that none uses on none."""
    found = []
    for adasum in (False, True):
        model = Either()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.5)
        trainer = Trainer(model, optimizer, adasum=adasum)
        trainer.one_step(torch.ones(2))
        found += [float(p[0]) for p in (model.used, model.first, model.never)]
        trainer.close()
    return found


def subgroup(rank: int, size: int) -> str:
    """A trainer on some of the ranks; the others are refused."""
    ranks = list(range(1, size))
    if rank == 0:
        try:
            make("reversible", process_group=ranks)
        except ValueError as error:
            return str(error)
        return "no error"
    trainer = make("reversible", process_group=ranks)
    trainer.one_step(batch(rank))
    result = digest(weights(trainer))
    trainer.close()
    return result


def uneven(rank: int, size: int) -> str:
    """A batch that the ranks cannot share is refused on all of them."""
    trainer = make("reversible", batch_is_global=True)
    try:
        trainer.one_step(batch(0, 2 * size + 1))
    except ValueError as error:
        return str(error)
    finally:
        trainer.close()
    return "no error"
