# SPDX-License-Identifier: Apache-2.0
"""The trainer that updates each layer in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torch_sm3.trainer._base import (
    TrainerBase,
    check_devices,
    check_positive,
    checked_loss,
    default_device,
)
from torch_sm3.trainer._batch import Microbatch
from torch_sm3.trainer._contract import Contract, Terms, contract_of
from torch_sm3.trainer._evaluate import evaluate
from torch_sm3.trainer._layers import Blocks, Model
from torch_sm3.trainer._logging import StepLog
from torch_sm3.trainer._offload import HostOffload, Resident
from torch_sm3.trainer._optimizers import attach
from torch_sm3.trainer._passes import Passes
from torch_sm3.trainer._scale import Scale
from torch_sm3.trainer._side import SideItems
from torch_sm3.trainer._slots import nesting_of
from torch_sm3.trainer._track import Plan
from torch_sm3.trainer._update import Updates

OptimizerFn = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class ReversibleTrainer(TrainerBase):
    r"""Train a model of which almost nothing is on the device at once.

    Reversible layers rebuild their inputs in the backward pass, so the activations of
    one layer exist at a time. Each layer is updated there and then, so the gradients
    of one layer exist at a time. With ``offload="host"``, weights and optimizer slots
    live in host memory, and those of one layer are on the device at a time, while
    those of the next one are on their way.

    Losses, weights, slots, buffers and generators equal those of
    :meth:`Trainer.from_blocks` bit for bit with ``exact="grid"`` or ``"sidecar"`` and
    deterministic algorithms.

    Args:
        blocks: pairs of a list of standard and a list of reversible layers; either
            may be empty. A standard layer takes its ``n_in`` stack items (an
            attribute, 1 where there is none) and puts what it returns in their place.
            See :func:`extract_reversible_blocks`.
        loss_layer: takes ``n_in`` items, or the whole stack where it has no such
            attribute, and returns a scalar. Aux outputs of reversible layers follow
            below the stack, in layer order.
        optimizer_fn: is called with the parameters of each layer that has some. A
            parameter that several layers use belongs to the one nearest to the input.
        device: where layers run; None is where the weights are.
        process_group: as of :class:`Trainer`.
        adasum: combine gradients by Adasum instead of by their mean.
        batch_is_global: every rank is given the whole batch and takes its part.
        offload: "host" keeps weights and slots in (pinned) host memory.
        n_prefetch_layers: number of layers whose weights are fetched ahead.
        n_async_layers: number of layers whose reduction, or whose copies to the host,
            may be under way.
        free_accelerator_on_step: send everything to the host and empty the allocator
            at the start of a step and after the loss, which mends fragmentation.
        exact: "none", "grid" or "sidecar", as of ``ReversibleSequence``.
        n_microbatches: number of parts of a batch, whose gradients are added up.
        clip_grad_norm: largest norm of all gradients together.
        clip_strategy: how the norm is known before the first update, and whether the
            loss scale was too large: "two_pass" runs the backward pass twice,
            "host_grads" parks all gradients on the host.
        grad_scaler: a ``torch.amp.GradScaler``.
        n_steps_per_log: steps from one log message about memory to the next.
        side: side context of reversible layers: names that their functions declare,
            and the places of the stack items to give them, counted from the bottom:
            ``{"mask": -1}`` is the last tensor of the batch if nothing took it.

    Raises:
        TypeError: for blocks that are no pairs of lists of modules, and a name in
            ``side`` that no layer takes.
        ValueError: for a number out of its range or an unknown word.
        RuntimeError: for weights on another device, or ranks without an initialised
            process group.

    Example:
        >>> from torch import nn
        >>> from torch_sm3.reversible import AdditiveCoupling
        >>> from torch_sm3.trainer import ReversibleTrainer
        >>> class Streams(nn.Linear):
        ...     def forward(self, x):
        ...         h = super().forward(x)
        ...         return h, h
        >>> class Loss(nn.Module):
        ...     def forward(self, y1, y2):
        ...         return (y1 - y2).square().mean()
        >>> def coupling():
        ...     return AdditiveCoupling(nn.Linear(8, 8), nn.Linear(8, 8))
        >>> blocks = [([Streams(4, 8)], [coupling(), coupling()])]
        >>> trainer = ReversibleTrainer(
        ...     blocks, Loss(), lambda params: torch_sm3.SM3(params, lr=0.01)
        ... )
        >>> x = torch.randn(16, 4)
        >>> losses = [float(trainer.one_step(x, rng=i)[0]) for i in range(20)]
        >>> losses[-1] < losses[0]
        True

    Source: the trainers of Trax (https://github.com/google/trax), whose defects it
    does not share; Kitaev et al., Reformer, ICLR 2020.
    """

    def __init__(
        self,
        blocks: Blocks,
        loss_layer: nn.Module,
        optimizer_fn: OptimizerFn,
        *,
        device: torch.device | str | None = None,
        process_group: Any = None,
        adasum: bool = False,
        batch_is_global: bool = False,
        offload: str = "none",
        n_prefetch_layers: int = 1,
        n_async_layers: int = 1,
        free_accelerator_on_step: bool = False,
        exact: str = "none",
        n_microbatches: int = 1,
        clip_grad_norm: float | None = None,
        clip_strategy: str = "two_pass",
        grad_scaler: Any = None,
        n_steps_per_log: int = 100,
        side: Mapping[str, int] | None = None,
    ) -> None:
        op = type(self).__name__
        _check_word(op, "offload", offload, ("none", "host"))
        _check_word(op, "exact", exact, ("none", "grid", "sidecar"))
        _check_word(op, "clip_strategy", clip_strategy, ("two_pass", "host_grads"))
        check_positive(op, "n_prefetch_layers", n_prefetch_layers, least=0)
        check_positive(op, "n_async_layers", n_async_layers, least=0)
        model = Model(op, blocks, loss_layer)
        where = default_device(model.modules, device)
        check_devices(op, model.modules, where, or_host=offload == "host")
        self.optimizer_fn = optimizer_fn
        self._model = model
        self._n_async = n_async_layers
        self._n_prefetch = n_prefetch_layers
        self._defragments = free_accelerator_on_step
        self._waiting = clip_strategy
        attach(op, model, optimizer_fn)
        super().__init__(
            model.layers,
            nesting_of(model),
            where,
            process_group=process_group,
            adasum=adasum,
            batch_is_global=batch_is_global,
            n_microbatches=n_microbatches,
            clip_grad_norm=clip_grad_norm,
            grad_scaler=grad_scaler,
            n_steps_per_log=n_steps_per_log,
        )
        place = Resident()
        if offload == "host":
            place = HostOffload(where, model.layers, n_prefetch_layers, n_async_layers)
        self._plan = Plan(model, exact, SideItems(op, model, side), place, where)

    @property
    def all_layers(self) -> list[nn.Module]:
        """All layers from the input side; the standard ones of a block are one."""
        return self._model.modules

    @property
    def loss_layer(self) -> nn.Module:
        """The loss layer."""
        return self._model.loss.module

    @property
    def overflows(self) -> dict[str, int]:
        """How often an exact mode kept a stream that it could not rebuild, by layer.

        Such a stream is memory beyond the contract: in grid mode one of magnitude 256
        or more in float32.
        """
        return dict(self._plan.stats.overflows)

    def memory_contract(self, batch_signature: Any) -> Contract:
        """Return the bound of the device's memory in a step, by term.

        Args:
            batch_signature: a batch of this rank, on any device, also "meta": only
                shapes and dtypes are looked at.

        Returns:
            Bytes by term; their sum is the bound.
        """
        terms = Terms(
            exact=self._plan.exact,
            offloads=self._plan.place.offloads,
            n_microbatches=self._n_microbatches,
            n_prefetch=self._n_prefetch,
            n_async=self._n_async,
            two_passes=self._strategy() == "two_pass",
        )
        plan = self._plan
        return contract_of(plan.model, plan.side, plan.device, batch_signature, terms)

    def _train(
        self,
        parts: list[Microbatch],
        seed: int,
        scale: Scale,
        updates: Updates,
        log: StepLog,
    ) -> list[Tensor]:
        passes = Passes(
            self._plan,
            self._reducer,
            scale,
            updates,
            strategy=self._strategy(),
            n_async=self._n_async,
            defragments=self._defragments,
        )
        try:
            with torch.no_grad():
                return passes.run(parts, seed, log)
        finally:
            self._plan.place.finish()

    def _strategy(self) -> str:
        """Return how a step goes: a layer may have to wait for all gradients."""
        scaler = self._scaler
        scales = scaler is not None and scaler.is_enabled()
        return self._waiting if scales or self._limit is not None else "one_pass"

    def _evaluate(self, parts: list[Microbatch], seed: int) -> list[Tensor]:
        try:
            return [
                checked_loss(self._op, evaluate(self._plan, stack, seed, i))
                for i, (stack, _) in enumerate(parts)
            ]
        finally:
            self._plan.place.finish()


def _check_word(op: str, argument: str, word: str, known: tuple[str, ...]) -> None:
    if word not in known:
        shown = ", ".join(repr(one) for one in known)
        raise ValueError(
            f"{op}: expected {shown}, but got {word!r} (argument '{argument}')"
        )
