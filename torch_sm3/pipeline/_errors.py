# SPDX-License-Identifier: Apache-2.0
"""How errors of the library reach Python, and arguments the library."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
_MARK = "ScheduleError: "


class ScheduleError(ValueError):
    r"""Say that a schedule cannot be read or cannot run, or that none fits.

    Example::

        >>> from torch_sm3.pipeline import Schedule, ScheduleError
        >>> try:
        ...     Schedule.parse("schedule 2")
        ... except ScheduleError as error:
        ...     print(type(error).__mro__[1].__name__)
        ValueError
    """


def checked(call: Callable[[], T]) -> T:
    """Call the library, whose schedule errors reach Python as marked ValueErrors."""
    try:
        return call()
    except ValueError as error:
        text = str(error)
        if not text.startswith(_MARK):
            raise
        raise ScheduleError(text.removeprefix(_MARK)) from None


def whole(op: str, value: Any, name: str) -> int:
    """Return an integer of any type, or raise an error that names the argument."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(
            f"{op}: expected an integer, but got {value!r} (argument '{name}')"
        ) from None
    if not -(2**63) <= number < 2**63:
        raise ValueError(
            f"{op}: expected an integer of 64 bits, but got {number} (argument "
            f"'{name}')"
        )
    return number


def words(op: str, value: Any, name: str) -> str:
    """Return a string, or raise a TypeError that names the argument."""
    if not isinstance(value, str):
        raise TypeError(
            f"{op}: expected a string, but got {value!r} (argument '{name}')"
        )
    return value


def real(op: str, value: Any, name: str) -> float:
    """Return a number of any type, or raise a TypeError that names the argument."""
    try:
        if not isinstance(value, str | bytes):
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise TypeError(f"{op}: expected a number, but got {value!r} (argument '{name}')")


def instance(op: str, value: Any, kind: type[T], name: str) -> T:
    """Return an object of a type, or raise a TypeError that names the argument."""
    if not isinstance(value, kind):
        raise TypeError(
            f"{op}: expected {kind.__name__}, but got {value!r} (argument '{name}')"
        )
    return value
