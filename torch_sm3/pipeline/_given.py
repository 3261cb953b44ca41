# SPDX-License-Identifier: Apache-2.0
"""The arguments of a step that bring data, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from torch_sm3.pipeline.stage import Stage


class Given(NamedTuple):
    """The arguments of a step that bring data, as the caller gave them."""

    inputs: tuple[Any, ...]
    target: Any
    kwargs: Any
    microbatches: Any
    targets: Any
    iterator: Any


class Needs(NamedTuple):
    """What of it a rank uses.

    Attributes:
        items: the stages that take part of each microbatch's item.
        target: whether the loss is computed here.
        kwargs: names of keyword arguments of its stages.
    """

    items: tuple[int, ...]
    target: bool
    kwargs: frozenset[str]

    @classmethod
    def of(cls, stages: Mapping[int, Stage], target: bool) -> Needs:
        """Return the needs of a rank.

        Args:
            stages: its stages by index.
            target: whether the loss is computed here.
        """
        items = tuple(s for s, stage in stages.items() if s == 0 or stage.data)
        names = (name for stage in stages.values() for name in stage.kwargs)
        return cls(items, target, frozenset(names))

    def __bool__(self) -> bool:
        return bool(self.items) or self.target


def fail(expected: str, got: Any, argument: str) -> NoReturn:
    """Raise the error of an argument of a step.

    Args:
        expected: what was expected.
        got: what came.
        argument: its name.
    """
    raise ValueError(
        f"step: expected {expected}, but got {got} (argument '{argument}')"
    )


def check_kwargs(kwargs: Any, known: Iterable[str]) -> None:
    """Refuse keyword arguments that no stage of any rank names.

    Args:
        kwargs: a dict, or one for each microbatch, or None.
        known: names that any stage takes.

    Raises:
        TypeError: if they are no dicts.
        ValueError: naming one that is not known.
    """
    parts = kwargs if isinstance(kwargs, Sequence) else [kwargs or {}]
    for part in parts:
        if not isinstance(part, Mapping):
            raise TypeError(
                "step: expected a dict, or a list with one for each microbatch, but "
                f"got {type(part).__name__} (argument 'kwargs')"
            )
        for name in part:
            if name not in known:
                names = f"kwargs that a stage names, one of {sorted(known)}"
                fail(names, repr(name), "kwargs")


def check_given(given: Given) -> None:
    """Refuse data that is given twice, or not in a list."""
    if given.iterator is not None:
        if not hasattr(given.iterator, "__iter__"):
            raise TypeError(
                "step: expected an iterator of pairs of stage input and target, but "
                f"got {type(given.iterator).__name__} (argument 'iterator')"
            )
        for name in ("inputs", "target", "microbatches", "targets"):
            value = getattr(given, name)
            if value is not None and value != ():
                fail(f"no {name} beside an iterator", type(value).__name__, name)
    for name in ("microbatches", "targets"):
        many = getattr(given, name)
        if many is not None and not hasattr(many, "__len__"):
            raise TypeError(
                f"step: expected a list with an item for each microbatch, but got "
                f"{type(many).__name__}; an iterator of pairs is given as iterator "
                f"(argument '{name}')"
            )
    if given.microbatches is not None and given.inputs:
        fail("either inputs or microbatches", "both", "microbatches")
    if given.targets is not None and given.target is not None:
        fail("either target or targets", "both", "targets")
