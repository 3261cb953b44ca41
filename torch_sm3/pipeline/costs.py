# SPDX-License-Identifier: Apache-2.0
"""What the actions of a schedule cost."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

Cost = float | Sequence[float]

# Costs that are one number for the whole pipeline.
_SINGLE = ("serial_links", "jitter", "seed", "optimizer_waits")


@dataclass(frozen=True)
class Costs:
    r"""Say how long actions take and how many bytes they keep.

    Times are in any one unit. What belongs to a stage is one number for all stages or
    a sequence with one for each. Sequences become tuples, so equal costs compare and
    hash as equal.

    Args:
        F: forward.
        I: gradients of the inputs.
        W: gradients of the weights.
        B: full backward; recompute + I + W if None.
        pair: a pair ``(F;B)OVERLAP_F_B`` in one call, by the stage of its F; if None
            the two run one after the other.
        recompute: what a backward computes once more before its gradients; adds to I
            but not to a B or pair that is given.
        reduce: REDUCE_GRAD.
        optimizer: share of OPTIM.
        activation_bytes: kept from F to B or W.
        released_at_input: part of it that I lets go of; negative where I keeps more
            for W, such as the gradients that entered layers, than it lets go of.
        shared_bytes: part of it that is the stage's output as well, such as the result
            of a tanh, and in use once.
        boundary_bytes: output of the stage, and the gradient that comes back.
        transient_bytes: in use only while an action of the stage runs.
        static_bytes: parameters, gradients, optimizer state.
        route_bytes: what travels each route of the schedule; one number for all.
        latency: time from SEND to arrival: one number, one per sender, or a p x p
            matrix by sender, then receiver.
        bandwidth: bytes per unit of time in the same form; 0 is without limit.
        serial_links: whether a link carries one message at a time.
        speed: of each rank, relative; one number for all.
        jitter: each forward and backward takes up to this much longer, relative.
        seed: of the jitter.
        tie: TIE_REDUCE, of each tie; one number for all.
        optimizer_waits: whether no rank starts OPTIM before all have come to it.

    Raises:
        ValueError: if a number is negative where it may not be, or not finite, or a
            sequence is empty.

    Example::

        >>> from torch_sm3.pipeline import Costs
        >>> costs = Costs(F=1, I=[1, 2], W=1, latency=0.1)
        >>> costs.I, Costs.from_json(costs.to_json()) == costs
        ((1.0, 2.0), True)
    """

    F: Cost = 1.0
    I: Cost = 1.0  # noqa: E741
    W: Cost = 1.0
    B: Cost | None = None
    pair: Cost | None = None
    recompute: Cost = 0.0
    reduce: Cost = 0.0
    optimizer: Cost = 0.0
    activation_bytes: Cost = 0.0
    released_at_input: Cost = 0.0
    shared_bytes: Cost = 0.0
    boundary_bytes: Cost = 0.0
    transient_bytes: Cost = 0.0
    static_bytes: Cost = 0.0
    route_bytes: Cost = 0.0
    latency: Cost | Sequence[Sequence[float]] = 0.0
    bandwidth: Cost | Sequence[Sequence[float]] = 0.0
    serial_links: bool = False
    speed: Cost = 1.0
    jitter: float = 0.0
    seed: int = 0
    tie: Cost = 0.0
    optimizer_waits: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.name in ("B", "pair"):
                continue
            if field.name not in _SINGLE:
                value = _frozen(value, field.name)
            elif not isinstance(value, int | float):
                _fail("a number", value, field.name)
            object.__setattr__(self, field.name, value)

    def to_json(self) -> str:
        r"""Return the costs as JSON; what is as by default is left out."""
        usual = Costs()
        given = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if getattr(self, field.name) != getattr(usual, field.name)
        }
        return json.dumps(given, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Costs:
        r"""Read what :meth:`to_json` writes.

        Args:
            text: a JSON object of arguments.

        Returns:
            The costs.

        Raises:
            ValueError: if it is anything else.
        """
        try:
            given = json.loads(text)
        except json.JSONDecodeError as error:
            _fail(f"JSON ({error})", text[:40], "text")
        known = {field.name for field in fields(cls)}
        if not isinstance(given, dict) or not known.issuperset(given):
            unknown = sorted(set(given) - known) if isinstance(given, dict) else given
            _fail(f"an object with names in {sorted(known)}", unknown, "text")
        return cls(**given)

    def save(self, path: str | os.PathLike[str]) -> None:
        r"""Write the costs to a JSON file.

        Args:
            path: the file.
        """
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Costs:
        r"""Read a JSON file.

        Args:
            path: the file.

        Returns:
            The costs.

        Raises:
            ValueError: if it holds anything else.
        """
        return cls.from_json(Path(path).read_text(encoding="utf-8"))

    def values(self) -> dict[str, list[float]]:
        r"""Return the costs as the library takes them: lists by name."""
        found: dict[str, list[float]] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                found[field.name] = _flat(value)
        return found

    @classmethod
    def from_values(cls, values: Mapping[str, Sequence[float]]) -> Costs:
        r"""Read what :meth:`values` writes.

        Args:
            values: lists by name; one number stands for itself.

        Returns:
            The costs.
        """
        given: dict[str, Any] = {
            name: numbers[0] if len(numbers) == 1 else tuple(numbers)
            for name, numbers in values.items()
        }
        for name in ("serial_links", "optimizer_waits"):
            given[name] = bool(given.get(name, False))
        given["seed"] = int(given.get("seed", 0))
        return cls(**given)


def _fail(expected: str, got: Any, argument: str) -> NoReturn:
    raise ValueError(
        f"Costs: expected {expected}, but got {got!r} (argument '{argument}')"
    )


def _frozen(value: Any, name: str) -> Any:
    """Turn numbers into floats and sequences into tuples, and refuse the rest."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) == 0:
            _fail("one number or more", value, name)
        return tuple(_frozen(item, name) for item in value)
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or (number < 0 and name != "released_at_input"):
        _fail("finite numbers of 0 or more", value, name)
    return number


def _flat(value: Any) -> list[float]:
    if isinstance(value, tuple):
        return [number for item in value for number in _flat(item)]
    return [float(value)]
