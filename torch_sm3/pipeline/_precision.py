# SPDX-License-Identifier: Apache-2.0
"""The optimizer's step as one of the whole pipeline: norm, scale, skip."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState
from torch.optim.optimizer import Optimizer

from torch_sm3.pipeline._collective import Collective
from torch_sm3.pipeline.stage import Stage


class Decision(NamedTuple):
    """What all ranks do alike with their gradients.

    Attributes:
        stop: whether a rank failed; then nobody steps.
        skip: whether a gradient is infinite or NaN somewhere.
        norm: over all stages, None if it was not asked for.
        mixed: whether only some replicas validate later; then nobody steps.
    """

    stop: bool
    skip: bool
    norm: float | None
    mixed: bool


def squares(
    stages: Mapping[int, Stage], others: Iterable[torch.nn.Parameter]
) -> list[tuple[int, float]]:
    """Return the sum of squared gradients of each stage.

    Args:
        stages: of this rank, by index.
        others: parameters that count elsewhere, since a lower stage is tied to them.
    """
    seen = set(others)
    found = []
    for index, stage in sorted(stages.items()):
        total = 0.0
        for parameter in stage.module.parameters():
            if parameter.grad is None or parameter in seen:
                continue
            seen.add(parameter)
            norm = torch.linalg.vector_norm(parameter.grad, dtype=_wide(parameter.grad))
            if hasattr(norm, "full_tensor"):
                # Sharded over replicas, which all come here alike.
                norm = norm.full_tensor()
            total += float(norm) ** 2
        found.append((index, total))
    return found


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64


def unscale(scaler: GradScaler, optimizer: Optimizer) -> bool:
    """Unscale an optimizer's gradients; return whether one is infinite or NaN.

    Args:
        scaler: the scaler, which may have scaled nothing on this rank.
        optimizer: the optimizer.
    """
    if not scaler.is_enabled():
        return False
    if scaler._scale is None:
        # Only the last stage's rank scales a loss, which is when the scale is made.
        device = next((p.device for p in _parameters(optimizer)), torch.device("cpu"))
        scaler.scale(torch.zeros(1, device=device))
    scaler.unscale_(optimizer)
    found = scaler._found_inf_per_device(optimizer)
    return any(bool(value.item()) for value in found.values())


def judged(
    values: Iterable[Any], replicas: Collective | None, with_norm: bool, stop: bool
) -> Decision:
    """Make a decision of what all ranks found, the same on all replicas.

    Args:
        values: of each rank whether it failed, whether it found an infinity and what
            :func:`squares` returned; at the end what it was asked for.
        replicas: the ranks with the same stages, or None.
        with_norm: whether a norm was asked for.
        stop: whether nobody may step, whatever they found.
    """
    values = list(values)
    stop = stop or any(value[0] for value in values)
    skip = any(value[1] for value in values)
    mixed, norm = False, None
    if with_norm and not stop:
        # In the order of the stages, so that the bits do not depend on the ranks.
        norm = math.sqrt(
            sum(part for _, part in sorted(s for v in values for s in v[2]))
        )
        skip = skip or not math.isfinite(norm)
    if replicas is not None:
        known = 0.0 if norm is None or skip else norm
        later = float(values[0][-1][-1])
        word = replicas.maximum([float(stop), float(skip), known, later, -later])
        mixed = word[3] != -word[4]
        stop, skip = bool(word[0]) or mixed, bool(word[1])
        norm = norm if norm is None or skip else word[2]
    return Decision(stop, skip, norm, mixed)


def factor_of(decision: Decision, max_norm: float | None) -> float:
    """Return what scales gradients down, as ``torch.nn.utils.clip_grad_norm_``.

    Args:
        decision: with the norm of all gradients.
        max_norm: the largest allowed, None for any.
    """
    if max_norm is None or decision.norm is None or decision.skip:
        return 1.0
    return min(1.0, max_norm / (decision.norm + 1e-6))


@torch.no_grad()
def shrink(parameters: Iterable[torch.nn.Parameter], factor: float) -> None:
    """Multiply gradients by a factor.

    Args:
        parameters: whose gradients.
        factor: 1 leaves them alone.
    """
    for parameter in parameters:
        if parameter.grad is not None and factor < 1:
            parameter.grad.mul_(factor)


def apply(optimizer: Optimizer, scaler: GradScaler | None, skip: bool) -> None:
    """Step, or skip, in the way all ranks agreed on.

    Args:
        optimizer: the optimizer.
        scaler: told what was agreed, so that all scales stay equal.
        skip: whether to skip.
    """
    if scaler is None or not scaler.is_enabled():
        if not skip:
            optimizer.step()
        return
    record(optimizer, scaler, skip)
    try:
        scaler.step(optimizer)
    finally:
        # The scales of all ranks stay equal, also where one optimizer fails.
        scaler.update()


def record(optimizer: Optimizer, scaler: GradScaler, skip: bool) -> None:
    """Tell a scaler what all ranks found in place of what this one did.

    Args:
        optimizer: whose gradients were unscaled.
        scaler: an enabled one.
        skip: whether any rank found an infinity.
    """
    found: dict[Any, torch.Tensor] = scaler._found_inf_per_device(optimizer)
    if not found:
        # No gradient on this rank, so that nothing was checked.
        assert scaler._scale is not None, "unscale has made it"
        found[scaler._scale.device] = torch.zeros((), device=scaler._scale.device)
    for value in found.values():
        value.fill_(float(skip))


def unscaled(scaler: GradScaler, optimizer: Optimizer) -> None:
    """Let a scaler know again that an optimizer's gradients are unscaled.

    Args:
        scaler: the scaler.
        optimizer: whose gradients are.
    """
    scaler._per_optimizer_states[id(optimizer)] = {
        "stage": OptState.UNSCALED,
        "found_inf_per_device": {},
    }


def forget(scaler: GradScaler, optimizer: Optimizer) -> None:
    """Let a scaler unscale an optimizer's next gradients, though no step came of these.

    Args:
        scaler: the scaler.
        optimizer: whose gradients it may have unscaled.
    """
    scaler._per_optimizer_states.pop(id(optimizer), None)


def _parameters(optimizer: Optimizer) -> Iterable[Any]:
    return (p for group in optimizer.param_groups for p in group["params"])
