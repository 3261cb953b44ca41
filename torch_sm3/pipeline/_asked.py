# SPDX-License-Identifier: Apache-2.0
"""Arguments of an optimizer step, which must be right and alike on all ranks."""

from __future__ import annotations

from typing import Any

from torch.amp import GradScaler

from torch_sm3.pipeline._faults import GroupLostError, ProtocolError
from torch_sm3.pipeline._precision import Decision

# Arguments that must be alike; of the scaler, whether there is an enabled one.
_ASKED = ("max_norm", "scaler", "post_validate")
MIXED = (
    "optimizer_step: expected post_validate alike on all replicas, but got True on "
    "some and False on others (argument 'post_validate')"
)


class ArgumentsError(Exception):
    """Carry what is wrong with the arguments of a step, which is raised on all ranks.

    Args:
        error: the error to raise.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def wrong_scaler(call: str, scaler: Any) -> TypeError | None:
    """Return what is wrong with the scaler that a call was given, if anything."""
    if scaler is None or isinstance(scaler, GradScaler):
        return None
    return TypeError(
        f"{call}: expected a torch.amp.GradScaler, but got {type(scaler).__name__} "
        "(argument 'scaler')"
    )


def wrong_arguments(
    optimizer: Any, max_norm: float | None, scaler: Any
) -> Exception | None:
    """Return what is wrong with the arguments of a step, if anything."""
    if (wrong := wrong_scaler("optimizer_step", scaler)) is not None:
        return wrong
    if not hasattr(optimizer, "step") or not hasattr(optimizer, "param_groups"):
        return TypeError(
            "optimizer_step: expected a torch.optim.Optimizer, but got "
            f"{type(optimizer).__name__} (argument 'optimizer')"
        )
    norm = _number(max_norm)
    if norm is not None and not norm >= 0:
        return ValueError(
            f"optimizer_step: expected max_norm of at least 0, but got {max_norm!r} "
            "(argument 'max_norm')"
        )
    return None


def _number(value: Any) -> float | None:
    """Return a number as a float; what is none is below all that are allowed."""
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        return -1.0


def check_alike(decision: Decision) -> None:
    """Give up where only some replicas validate a step later that all did before."""
    if decision.mixed:
        raise GroupLostError(MIXED, ProtocolError.__name__)


def asked_for(
    max_norm: float | None, scaler: GradScaler | None, post_validate: bool
) -> tuple[float | None, bool, bool]:
    """Return what must be alike on all ranks."""
    scaled = isinstance(scaler, GradScaler) and scaler.is_enabled()
    return _number(max_norm), scaled, post_validate


def unlike_arguments(values: list[Any]) -> ValueError | None:
    """Return in which argument the ranks differ, if in any.

    Args:
        values: of each rank, what it was asked for at the end.
    """
    first = values[0][-1]
    for rank, value in enumerate(values):
        for name, mine, theirs in zip(_ASKED, value[-1], first, strict=True):
            if mine != theirs:
                return ValueError(
                    f"optimizer_step: expected {name} {theirs} as on rank 0, but got "
                    f"{mine} on rank {rank} (argument '{name}')"
                )
    return None
