# SPDX-License-Identifier: Apache-2.0
"""What an Adasum can be asked for, and what is wrong with what was asked."""

from __future__ import annotations

import dataclasses
import math
import sys
import warnings
from datetime import timedelta
from typing import Any, Generic, NoReturn, TypeVar

import torch

T = TypeVar("T")

MODES = ("tree", "psum", "mean", "sum")
ALGORITHMS = ("auto", "pair", "gather", "gram", "two_level", "vhdd")
INNER = ("mean", "adasum")
CHECKS = ("off", "layout", "hash", "full")
WIRES = (torch.float16, torch.bfloat16)
LEAST_SCRATCH = 1 << 20


def _either(values: tuple[Any, ...]) -> str:
    named = [repr(value) for value in values]
    return ", ".join(named[:-1]) + " or " + named[-1]


def _callers_level() -> int:
    """Return the stacklevel, for our caller, of the code that uses the package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and frame.f_globals["__name__"].startswith("torch_sm3."):
        level, frame = level + 1, frame.f_back
    return level


def refuse(
    op: str, expected: str, value: Any, argument: str, error: type = ValueError
) -> NoReturn:
    """Raise ``error`` in the words of this package."""
    raise error(f"{op}: expected {expected}, but got {value} (argument {argument!r})")


def check_timeout(op: str, timeout: timedelta | None) -> None:
    """Refuse a timeout that is not a positive timedelta."""
    if timeout is None:
        return
    if not isinstance(timeout, timedelta):
        refuse(op, "a datetime.timedelta", repr(timeout), "timeout", TypeError)
    if timeout <= timedelta(0):
        refuse(op, "a positive timeout", timeout, "timeout")


@dataclasses.dataclass(frozen=True)
class Options:
    """The options that decide what is computed and how; equal on all ranks.

    The arguments of ``AdasumState`` that name no tensor, group or deadline.
    """

    mode: str = "tree"
    algorithm: str = "auto"
    scale: float = 1.0
    node_size: int | None = None
    inner: str = "mean"
    warmup_steps: int = 0
    accumulate_dtype: torch.dtype = torch.float64
    wire_dtype: torch.dtype | None = None
    result_dtype: torch.dtype | None = None
    scratch_bytes: int = 64 << 20
    threads: int | None = None
    check: str = "layout"
    check_every: int = 1
    metrics: bool | int = False

    def checked(self, op: str) -> Options:
        """Return these options; ValueError or TypeError where one is wrong."""
        for name, legal in (
            ("mode", MODES),
            ("algorithm", ALGORITHMS),
            ("inner", INNER),
            ("check", CHECKS),
        ):
            if getattr(self, name) not in legal:
                refuse(op, _either(legal), repr(getattr(self, name)), name)
        if not isinstance(self.scale, (int, float)):
            refuse(op, "a number", repr(self.scale), "scale", TypeError)
        if not math.isfinite(self.scale):
            refuse(op, "a finite number", self.scale, "scale")
        self._check_integers(op)
        self._check_dtypes(op)
        if self.inner == "adasum" and self.mode == "psum":
            refuse(op, "'mean' with mode 'psum'", "'adasum'", "inner")
        return self

    def _check_integers(self, op: str) -> None:
        for name, least in (
            ("node_size", 1),
            ("warmup_steps", 0),
            ("scratch_bytes", LEAST_SCRATCH),
            ("threads", 1),
            ("check_every", 1),
            ("metrics", 0),
        ):
            value = getattr(self, name)
            if value is None and name in ("node_size", "threads"):
                continue
            if not isinstance(value, int):
                refuse(op, "an integer", repr(value), name, TypeError)
            if value < least:
                refuse(op, f"at least {least}", value, name)

    def _check_dtypes(self, op: str) -> None:
        wide = (torch.float64, torch.float32)
        for name, legal in (
            ("accumulate_dtype", wide),
            ("wire_dtype", (None, *WIRES)),
            ("result_dtype", (None, torch.float32)),
        ):
            if getattr(self, name) not in legal:
                refuse(op, _either(legal), repr(getattr(self, name)), name, TypeError)

    def check_ranks(self, op: str, ranks: int) -> None:
        """Refuse an algorithm that these ranks cannot run.

        Warns where one node holds all ranks and only their mean is left.
        """
        whole = self.node_size is not None and self.node_size >= ranks > 1
        if whole and self.inner == "mean" and self.mode in ("tree", "psum"):
            warnings.warn(
                f"{op}: node_size={self.node_size} puts all {ranks} ranks into one "
                "node, so that inner='mean' gives their plain mean",
                stacklevel=_callers_level(),
            )
        if self.node_size is not None:
            # Which ranks then run the algorithm is the library's to say.
            return
        expected = {
            "pair": (ranks == 2, "2"),
            "vhdd": (ranks & (ranks - 1) == 0, "2^k"),
            "two_level": (
                ranks >= 4 and ranks % 2 == 0,
                "4, 6, 8, ...",
            ),
        }
        good, text = expected.get(self.algorithm, (True, ""))
        if not good:
            expected_group = f"a group of {text} ranks for algorithm {self.algorithm!r}"
            refuse(op, expected_group, ranks, "algorithm")


class Option(Generic[T]):
    """A read-only attribute of a state that shows one of its options."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, state: Any, owner: type | None = None) -> T:
        if state is None:
            return self  # type: ignore[return-value]
        return getattr(state._reduction.options, self._name)

    def __set__(self, state: Any, value: T) -> None:
        raise AttributeError(
            f"AdasumState.{self._name}: options are fixed when a state is made; "
            "load_state_dict() changes them"
        )
