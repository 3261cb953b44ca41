# SPDX-License-Identifier: Apache-2.0
"""What both trainers share: checks, seeds, one step's frame, slots, evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torch_sm3.trainer._batch import (
    Microbatch,
    as_stack,
    microbatches,
    part_of_rank,
)
from torch_sm3.trainer._layers import Layer
from torch_sm3.trainer._logging import StepLog
from torch_sm3.trainer._reduce import Reducer
from torch_sm3.trainer._scale import Scale
from torch_sm3.trainer._seeds import draw, fold
from torch_sm3.trainer._slots import get_slots, set_slots
from torch_sm3.trainer._update import Updates, with_learning_rate

#: What a step returns: the loss, and figures by name.
Result = tuple[Tensor, dict[str, Any]]


class TrainerBase:
    """The frame of a step, around what a subclass does with the layers.

    Args:
        layers: with their optimizers, from the input side.
        nesting: index lists that say how slots are nested.
        device: where layers run.
        options: of the trainer that both kinds have.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        nesting: Any,
        device: torch.device,
        *,
        process_group: Any,
        adasum: bool,
        batch_is_global: bool,
        n_microbatches: int,
        clip_grad_norm: float | None,
        grad_scaler: Any,
        n_steps_per_log: int,
    ) -> None:
        op = type(self).__name__
        check_positive(op, "n_microbatches", n_microbatches)
        check_positive(op, "n_steps_per_log", n_steps_per_log)
        if clip_grad_norm is not None and not clip_grad_norm > 0:
            raise ValueError(
                f"{op}: expected None or a number > 0, but got {clip_grad_norm} "
                "(argument 'clip_grad_norm')"
            )
        self._op = op
        self._layers = list(layers)
        self._nesting = nesting
        self._device = device
        self._batch_is_global = batch_is_global
        self._n_microbatches = n_microbatches
        self._limit = clip_grad_norm
        self._scaler = grad_scaler
        self._n_steps_per_log = n_steps_per_log
        self._prefixed = True
        self._reducer = Reducer(op, process_group, adasum, device)
        self._reducer.broadcast(
            [t for layer in layers for t in [*layer.owned, *layer.module.buffers()]]
        )

    def one_step(
        self,
        batch: Tensor | tuple[Tensor, ...],
        rng: int | torch.Generator | None = None,
        step: int = 0,
        learning_rate: float | None = None,
    ) -> Result:
        """Train on one batch.

        Args:
            batch: a tensor, or a tuple of them: the initial stack, of this rank or,
                with ``batch_is_global``, of all ranks together.
            rng: seed of the step, a generator to draw it from, or None for the global
                generator of the CPU. Ranks, layers and microbatches fold their own
                seeds from it.
            step: number of the step, for log messages.
            learning_rate: of every parameter group, for this call only.

        Returns:
            The loss, detached, as the mean over all ranks, and a dict of figures that
            stay on the device until they are read.

        Raises:
            TypeError: for a batch that is not tensors, or ``rng`` of another type.
            ValueError: for a loss that is no scalar, a batch that cannot be split, a
                negative ``step``, and a ``learning_rate`` that is negative or NaN.
        """
        if step < 0:
            raise ValueError(
                f"{self._op}.one_step: expected a number >= 0, but got {step} "
                "(argument 'step')"
            )
        parts, seed = self._prepare("one_step", batch, rng)
        log = StepLog(step, self._n_steps_per_log)
        log.inputs(parts[0][0])
        scale = Scale(self._scaler, self._device)
        updates = Updates(self._device, self._limit, scale, self._prefixed)
        with with_learning_rate(self._op, self.optimizers, learning_rate):
            losses = self._train(parts, seed, scale, updates, log)
        loss = self._reducer.mean(_sum(losses, parts))
        stats = self._finished(updates.stats, loss)
        log.summary(self._layers, stats)
        return loss, stats

    def eval_step(
        self,
        batch: Tensor | tuple[Tensor, ...],
        rng: int | torch.Generator | None = None,
    ) -> Result:
        """Take the loss of one batch in eval mode; nothing is updated.

        Args:
            batch: as in :meth:`one_step`.
            rng: as in :meth:`one_step`, but None is a fixed seed, so that evaluating
                does not change what training draws.

        Returns:
            The loss as in :meth:`one_step`, and a dict that holds it.
        """
        parts, seed = self._prepare("eval_step", batch, 0 if rng is None else rng)
        modules = {m: m.training for la in self._layers for m in la.module.modules()}
        for module in modules:
            module.training = False
        try:
            with torch.no_grad():
                losses = self._evaluate(parts, seed)
        finally:
            for module, flag in modules.items():
                module.training = flag
        loss = self._reducer.mean(_sum(losses, parts))
        return loss, {"loss": loss}

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers, in layer order."""
        found = [layer.optimizer for layer in self._layers]
        return [optimizer for optimizer in found if optimizer is not None]

    @property
    def slots(self) -> list[Any]:
        """A copy of the state of all optimizers.

        Nested lists in block order, the loss last: for each block the slots of its
        standard layer and a list of those of its reversible layers. The slots of a
        layer are one dict for each parameter that the layer updates.

        Assigning them copies them back, also from another trainer of the same model.
        """
        return get_slots(self._layers, self._nesting)

    @slots.setter
    def slots(self, slots: list[Any]) -> None:
        set_slots(self._op, self._layers, self._nesting, slots)

    def state_dict(self) -> dict[str, Any]:
        """Return weights, buffers, optimizer states and the scaler's state.

        Example::

            >>> from torch_sm3.trainer import Trainer
            >>> model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Flatten(0))
            >>> trainer = Trainer(model, torch_sm3.SM3(model.parameters()))
            >>> trainer.load_state_dict(trainer.state_dict())
        """
        state: dict[str, Any] = {
            "layers": [layer.module.state_dict() for layer in self._layers],
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        if self._scaler is not None:
            state["grad_scaler"] = self._scaler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            ValueError: if it has another number of layers or of optimizers.
        """
        for key, mine in (("layers", self._layers), ("optimizers", self.optimizers)):
            if len(state_dict[key]) != len(mine):
                raise ValueError(
                    f"{self._op}.load_state_dict: expected {len(mine)} {key}, but got "
                    f"{len(state_dict[key])} (argument 'state_dict')"
                )
        for layer, one in zip(self._layers, state_dict["layers"], strict=True):
            layer.module.load_state_dict(one)
        for optimizer, one in zip(
            self.optimizers, state_dict["optimizers"], strict=True
        ):
            optimizer.load_state_dict(one)
        if self._scaler is not None and "grad_scaler" in state_dict:
            self._scaler.load_state_dict(state_dict["grad_scaler"])

    def close(self) -> None:
        """Leave the trainer's process group; also done at garbage collection."""
        self._reducer.close()

    def _prepare(self, name: str, batch: Any, rng: Any) -> tuple[list[Microbatch], int]:
        op = f"{self._op}.{name}"
        # Where one autocast region spans several steps, it holds casts of old weights.
        torch.clear_autocast_cache()
        stack = as_stack(op, batch)
        if self._batch_is_global:
            stack = part_of_rank(op, stack, self._reducer.rank, self._reducer.size)
        parts = microbatches(op, stack, self._n_microbatches, self._device)
        return parts, fold(draw(op, rng), self._reducer.rank)

    def _train(
        self,
        parts: list[Microbatch],
        seed: int,
        scale: Scale,
        updates: Updates,
        log: StepLog,
    ) -> list[Tensor]:
        """Do a step; return the loss of each microbatch."""
        raise NotImplementedError

    def _evaluate(self, parts: list[Microbatch], seed: int) -> list[Tensor]:
        """Return the loss of each microbatch."""
        raise NotImplementedError

    def _finished(self, stats: dict[str, Any], loss: Tensor) -> dict[str, Any]:
        return stats | {f"layer{self._layers[-1].index}/loss": loss, "loss": loss}


def checked_loss(op: str, value: Any) -> Tensor:
    """Return what a loss layer returned.

    Raises:
        ValueError: if it is no floating scalar.
    """
    is_scalar = isinstance(value, Tensor) and value.dim() == 0
    if not is_scalar or not value.is_floating_point():
        got = type(value).__name__
        if isinstance(value, Tensor):
            got = f"{value.dtype} of shape {tuple(value.shape)}"
        raise ValueError(
            f"{op}: expected the loss to be a floating scalar, but got {got} "
            "(argument 'loss_layer')"
        )
    return value


def check_positive(op: str, argument: str, value: int, least: int = 1) -> None:
    """Check a count.

    Raises:
        ValueError: if it is less than ``least``.
    """
    if value < least:
        raise ValueError(
            f"{op}: expected a number >= {least}, but got {value} "
            f"(argument '{argument}')"
        )


def check_devices(
    op: str, modules: Sequence[nn.Module], device: torch.device, or_host: bool
) -> None:
    """Check that all weights and buffers are where they are needed.

    Raises:
        RuntimeError: if one is on another device.
    """
    allowed = {device, torch.device("cpu")} if or_host else {device}
    for i, module in enumerate(modules):
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if tensor.device not in allowed:
                raise RuntimeError(
                    f"{op}: expected the weights of layer {i} on {device}, but got "
                    f"'{name}' on {tensor.device} (argument 'device')"
                )


def default_device(modules: Sequence[nn.Module], device: Any) -> torch.device:
    """Return a device with its index; None is that of the first weight."""
    if device is None:
        found = (t.device for m in modules for t in [*m.parameters(), *m.buffers()])
        device = next(found, torch.device("cpu"))
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _sum(losses: Sequence[Tensor], parts: Sequence[Microbatch]) -> Tensor:
    if len(losses) == 1:
        return losses[0]
    return torch.stack([x * w for x, (_, w) in zip(losses, parts, strict=True)]).sum()
