# SPDX-License-Identifier: Apache-2.0
"""Options of a runner, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, NamedTuple, NoReturn

from torch_sm3.pipeline._loss import REDUCTIONS
from torch_sm3.pipeline._reduce import REDUCES

# Three decades; clocks count nanoseconds in 64 bits.
_LONGEST = 1e9


class Options(NamedTuple):
    """Options of a runner that must be equal on all ranks."""

    loss_reduction: str
    reduce: str | None
    hook: bool
    batch_dim: int
    timeout: float
    max_pending: int
    deterministic: bool
    seed: int
    share_loss: bool
    trace: bool = False
    link_delay: Mapping[tuple[int, int], float] | None = None


def fail(expected: str, got: Any, argument: str) -> NoReturn:
    """Raise what says that a value does not fit.

    Raises:
        ValueError: always.
    """
    raise ValueError(
        f"PipelineRunner: expected {expected}, but got {got} (argument '{argument}')"
    )


def refuse(expected: str, got: Any, argument: str) -> NoReturn:
    """Raise what says that a value is of another kind.

    Raises:
        TypeError: always.
    """
    raise TypeError(
        f"PipelineRunner: expected {expected}, but got {type(got).__name__} (argument "
        f"'{argument}')"
    )


def check_options(options: Options, ranks: int) -> None:
    """Refuse options of no use.

    Args:
        options: of this rank.
        ranks: their number.

    Raises:
        ValueError: if a value does not fit.
        TypeError: if it is of another kind.
    """
    for name, value, known in (
        ("loss_reduction", options.loss_reduction, REDUCTIONS),
        ("reduce", options.reduce, REDUCES),
    ):
        if value not in known:
            names = ", ".join(map(str, known))
            fail(f"{name} in {{{names}}}", repr(value), name)
    if not _is_number(options.timeout):
        refuse("seconds", options.timeout, "timeout")
    if not 0 < options.timeout <= _LONGEST:
        fail(
            f"a timeout above 0 s and at most {_LONGEST:g} s",
            options.timeout,
            "timeout",
        )
    for name in ("batch_dim", "max_pending", "seed"):
        value = getattr(options, name)
        if not isinstance(value, Integral) or isinstance(value, bool):
            refuse("a whole number", value, name)
        if not -(1 << 63) <= int(value) < 1 << 63:
            fail("a number of 64 bits", value, name)
    if options.max_pending < 1:
        fail("max_pending of at least 1", options.max_pending, "max_pending")
    _check_delays(options.link_delay, ranks)


def _check_delays(delays: Any, ranks: int) -> None:
    if delays is None:
        return
    if not isinstance(delays, Mapping):
        refuse("seconds by pairs of ranks", delays, "link_delay")
    for ends, seconds in delays.items():
        pair = type(ends) is tuple and len(ends) == 2
        known = pair and all(end in range(ranks) for end in ends)
        if not known or not _is_number(seconds) or not 0 <= seconds <= _LONGEST:
            expected = f"seconds for pairs of {ranks} ranks"
            fail(expected, {ends: seconds}, "link_delay")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
