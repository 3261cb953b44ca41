# SPDX-License-Identifier: Apache-2.0
"""The plain trainer: a whole graph, then all updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torch_sm3.trainer._base import (
    TrainerBase,
    check_devices,
    checked_loss,
    default_device,
)
from torch_sm3.trainer._batch import Microbatch
from torch_sm3.trainer._gradients import without_autocast
from torch_sm3.trainer._layers import Blocks, Layer, Model
from torch_sm3.trainer._logging import StepLog
from torch_sm3.trainer._optimizers import attach
from torch_sm3.trainer._reduce import Grads
from torch_sm3.trainer._scale import Scale
from torch_sm3.trainer._seeds import fold, seeded
from torch_sm3.trainer._side import SideItems
from torch_sm3.trainer._slots import nesting_of
from torch_sm3.trainer._store import Store
from torch_sm3.trainer._update import Updates

OptimizerFn = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
_Run = Callable[[Sequence[Any], int, int], Any]


class Trainer(TrainerBase):
    r"""Train a model as an ordinary loop does: forward, backward, reduce, update.

    With :meth:`from_blocks` it trains the same layers as :class:`ReversibleTrainer`,
    with ordinary autograd in place of reversal, and is what that one is compared with.

    Args:
        model_with_loss: maps the tensors of a batch to a scalar loss.
        optimizer: of its parameters.
        process_group: the ranks that train together: a group, a list of ranks, or
            None for the default group where one is initialised. The trainer makes a
            group of its own, so creating it is collective; ranks start from the
            weights of the first one.
        adasum: combine gradients by Adasum instead of by their mean.
        batch_is_global: every rank is given the whole batch and takes its part.
        n_microbatches: number of parts of a batch that run one after the other.
        clip_grad_norm: largest norm of all gradients together.
        grad_scaler: a ``torch.amp.GradScaler``.

    Raises:
        ValueError: for a number out of its range.
        RuntimeError: for weights on several devices, or ranks without an initialised
            process group.

    Example:
        >>> from torch_sm3.trainer import Trainer
        >>> class Squares(torch.nn.Linear):
        ...     def forward(self, x):
        ...         return super().forward(x).square().mean()
        >>> model = Squares(4, 2)
        >>> trainer = Trainer(model, torch_sm3.SM3(model.parameters()))
        >>> x = torch.ones(3, 4)
        >>> losses = [float(trainer.one_step(x, rng=i)[0]) for i in range(9)]
        >>> losses[-1] < losses[0]
        True
    """

    def __init__(
        self,
        model_with_loss: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        process_group: Any = None,
        adasum: bool = False,
        batch_is_global: bool = False,
        n_microbatches: int = 1,
        clip_grad_norm: float | None = None,
        grad_scaler: Any = None,
    ) -> None:
        device = default_device([model_with_loss], None)
        check_devices("Trainer", [model_with_loss], device, or_host=False)
        layer = Layer(0, "loss", model_with_loss)
        layer.owned = layer.parameters
        layer.optimizer = optimizer

        def run(stack: Sequence[Any], seed: int, microbatch: int) -> Any:
            with seeded(fold(fold(seed, 0), microbatch), device):
                return model_with_loss(*stack)

        self._run: _Run = run
        super().__init__(
            [layer],
            0,
            device,
            process_group=process_group,
            adasum=adasum,
            batch_is_global=batch_is_global,
            n_microbatches=n_microbatches,
            clip_grad_norm=clip_grad_norm,
            grad_scaler=grad_scaler,
            n_steps_per_log=100,
        )
        self._prefixed = False

    @classmethod
    def from_blocks(
        cls,
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
    ) -> Trainer:
        """Make the trainer that :class:`ReversibleTrainer` must equal.

        It takes the arguments of that one. What only says where memory goes
        (``offload``, ``n_prefetch_layers``, ``n_async_layers``,
        ``free_accelerator_on_step``, ``clip_strategy``) makes no difference here.

        Returns:
            A trainer of the same layers under ordinary autograd, with an optimizer
            for each layer.
        """
        del offload, n_prefetch_layers, n_async_layers
        del free_accelerator_on_step, clip_strategy
        op = "Trainer.from_blocks"
        model = Model(op, blocks, loss_layer)
        where = default_device(model.modules, device)
        check_devices(op, model.modules, where, or_host=False)
        attach(op, model, optimizer_fn)
        self = cls.__new__(cls)
        store = Store(model, exact, SideItems(op, model, side), where)
        self._run = store.run
        TrainerBase.__init__(
            self,
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
        return self

    def _train(
        self,
        parts: list[Microbatch],
        seed: int,
        scale: Scale,
        updates: Updates,
        log: StepLog,
    ) -> list[Tensor]:
        self._clear()
        losses = []
        for i, (stack, weight) in enumerate(parts):
            with torch.enable_grad():
                loss = checked_loss(self._op, self._run(stack, seed, i))
            with without_autocast():
                loss.backward(scale.cotangent(loss.detach(), weight))
            losses.append(loss.detach())
        log.memory("backward", self._layers[-1])
        with torch.no_grad():
            self._update(scale, updates)
        self._clear()
        return losses

    def _update(self, scale: Scale, updates: Updates) -> None:
        layers = [la for la in reversed(self._layers) if la.optimizer is not None]
        pending = []
        for layer in layers:
            grads = [parameter.grad for parameter in layer.trainable]
            pending.append(self._reducer.start(layer.trainable, grads))
        reduced: list[Grads] = [one.wait() for one in pending]
        for layer, grads in zip(layers, reduced, strict=True):
            updates.measure(layer, grads)
        skip = scale.finish(self._reducer.any)
        updates.total()
        for layer, grads in zip(layers, reduced, strict=True):
            if skip:
                updates.note(layer)
            else:
                updates.apply(layer, grads)

    def _evaluate(self, parts: list[Microbatch], seed: int) -> list[Tensor]:
        return [
            checked_loss(self._op, self._run(stack, seed, i))
            for i, (stack, _) in enumerate(parts)
        ]

    def _clear(self) -> None:
        for layer in self._layers:
            for parameter in layer.parameters:
                parameter.grad = None

    def _finished(self, stats: dict[str, Any], loss: Tensor) -> dict[str, Any]:
        if not self._prefixed:
            return stats | {"loss": loss}
        for layer in self._layers:
            if layer.monitor is not None:
                # Nothing is rebuilt, so nothing drifts.
                stats[f"layer{layer.index}/drift"] = torch.zeros((), dtype=torch.double)
        return super()._finished(stats, loss)
