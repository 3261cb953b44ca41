# SPDX-License-Identifier: Apache-2.0
"""What a step is fed with: whole batches, lists of microbatches or an iterator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from torch_sm3.pipeline._faults import DataExhausted
from torch_sm3.pipeline._given import Given, Needs, check_given, fail
from torch_sm3.pipeline._values import map_tensors
from torch_sm3.pipeline.stage import Stage


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors in nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return [value]
    found: list[torch.Tensor] = []
    map_tensors(value, found.append)
    return found


def batch_size(value: Any, dim: int, argument: str) -> int | None:
    """Return the common size of a batch's tensors, None if there is no tensor.

    Args:
        value: tensors in nested tuples, lists and dicts.
        dim: dimension of the batch.
        argument: name of the argument, for errors.

    Raises:
        ValueError: if a tensor has no such dimension or the sizes differ.
    """
    sizes = set()
    for tensor in tensors_of(value):
        if not -tensor.dim() <= dim < tensor.dim():
            fail(
                f"tensors with dimension {dim} (batch_dim)",
                f"shape {tuple(tensor.shape)}",
                argument,
            )
        sizes.add(tensor.shape[dim])
    if len(sizes) > 1:
        fail("tensors of one batch size", sorted(sizes), argument)
    return sizes.pop() if sizes else None


def cut(value: Any, parts: int, dim: int, argument: str) -> list[Any]:
    """Cut a value into parts as even as possible: 8 in 3 gives 3, 3, 2.

    Args:
        value: tensors in nested tuples, lists and dicts, all cut along ``dim``; what
            is no tensor goes to every part.
        parts: number of parts.
        dim: dimension to cut.
        argument: name of the argument, for errors.

    Raises:
        ValueError: if the sizes differ or are smaller than ``parts``.
    """
    size = batch_size(value, dim, argument)
    if size is None:
        return [value] * parts
    if size < parts:
        fail(
            f"a batch of at least {parts} samples, one for each microbatch",
            size,
            argument,
        )
    lengths = [size // parts + (i < size % parts) for i in range(parts)]
    if isinstance(value, torch.Tensor):
        return list(torch.split_with_sizes(value, lengths, dim))
    pieces = [iter(tensor.split(lengths, dim)) for tensor in tensors_of(value)]

    def part() -> Any:
        # The tensors come in the same order each time.
        rest = iter([next(own) for own in pieces])
        return map_tensors(value, lambda _: next(rest))

    return [part() for _ in lengths]


def count_of(given: Given, needs: Needs, planned: int, dim: int) -> int | None:
    """Return into how many microbatches an eval falls, None if this rank has no say.

    Args:
        given: the arguments.
        needs: what this rank uses.
        planned: the schedule's number, taken unless the data is less or a list.
        dim: dimension of the batch.
    """
    if not needs:
        return None
    check_given(given)
    counts = set()
    if given.iterator is None:
        for used, many, one, names in (
            (needs.items, given.microbatches, given.inputs, ("microbatches", "inputs")),
            (needs.target, given.targets, given.target, ("targets", "target")),
        ):
            if used and many is not None:
                counts.add(len(many) or fail("at least one item", 0, names[0]))
            elif used and (size := batch_size(one, dim, names[1])) is not None:
                counts.add(min(size, planned))
    if len(counts) > 1:
        fail("one number of microbatches", sorted(counts), "targets")
    if not counts and given.iterator is None and not needs.items:
        # Without a target the loss's rank has nothing to count.
        return None
    return counts.pop() if counts else planned


class Feed:
    """The items and targets of one step or eval on one rank.

    Args:
        given: the arguments.
        needs: what this rank uses.
        count: number of microbatches.
        dim: dimension of a batch that is cut.
        training: whether a target must be there.

    Raises:
        ValueError: if the arguments do not fit each other or the schedule.

    Attributes:
        targets: the targets if they are known before the step.
        replays: whether items may be asked for again, when a step begins anew.
    """

    replays = False

    def __init__(
        self, given: Given, needs: Needs, count: int, dim: int, training: bool
    ) -> None:
        self.count = count
        self.targets: list[Any] | None = None
        self._needs = needs
        self._iterator: Iterator[Any] | None = None
        self._items: list[Any] = []
        self._pulled: dict[int, tuple[Any, Any]] = {}
        self._uses: dict[int, int] = {}
        self._next = 0
        # An input that is itself a tuple or list is one argument, not several.
        self._single = len(given.inputs) == 1
        check_given(given)
        self._kwargs = self._own_kwargs(given.kwargs, dim)
        if given.iterator is not None:
            self._iterator = iter(given.iterator) if needs else None
            return
        if needs.items:
            whole = given.inputs[0] if self._single else given.inputs
            listed = self._listed(given.microbatches, "microbatches")
            self._items = listed or cut(whole, count, dim, "inputs")
        if needs.target:
            self.targets = self._listed(given.targets, "targets")
            if self.targets is None and given.target is not None:
                self.targets = cut(given.target, count, dim, "target")
            if self.targets is None and training:
                fail("a target for loss_fn", None, "target")

    def arguments(
        self, stage: Stage, microbatch: int
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return what a stage gets besides values of other stages.

        Args:
            stage: one of this rank.
            microbatch: number of the microbatch.

        Raises:
            DataExhausted: if the iterator has ended.
        """
        named = {key: self._kwargs[microbatch][key] for key in stage.kwargs}
        if stage.index != 0 and stage.data is None:
            return (), named
        item = self._item(microbatch)
        if stage.data is None:
            return ((item,) if self._single else spread(item)), named
        picked = stage.data(item)
        if type(picked) is dict:
            return (), {**named, **picked}
        return spread(picked), named

    def target(self, microbatch: int) -> Any:
        """Return the target of a microbatch, None if there is none.

        Raises:
            DataExhausted: if the iterator has ended.
        """
        if not self._needs.target:
            return None
        if self._iterator is not None:
            return self._pull(microbatch)[1]
        return None if self.targets is None else self.targets[microbatch]

    def _item(self, microbatch: int) -> Any:
        if self._iterator is not None:
            return self._pull(microbatch)[0]
        return self._items[microbatch]

    def _pull(self, microbatch: int) -> tuple[Any, Any]:
        """Take a pair of the iterator; all chunks of this rank share it."""
        assert self._iterator is not None, "called with an iterator only"
        while self._next <= microbatch:
            try:
                pair = next(self._iterator)
            except StopIteration:
                raise DataExhausted(
                    f"expected {self.count} microbatches, but the iterator ended after "
                    f"{self._next} (argument 'iterator')"
                ) from None
            if type(pair) not in (tuple, list) or len(pair) != 2:
                raise TypeError(
                    "step: expected pairs of stage input and target, but got "
                    f"{type(pair).__name__} (argument 'iterator')"
                )
            self._pulled[self._next] = pair[0], pair[1]
            self._uses[self._next] = len(self._needs.items) + self._needs.target
            self._next += 1
        pair = self._pulled[microbatch]
        self._uses[microbatch] -= 1
        if self._uses[microbatch] == 0 and not self.replays:
            del self._pulled[microbatch], self._uses[microbatch]
        return pair

    def _listed(self, many: Any, argument: str) -> list[Any] | None:
        if many is None:
            return None
        if len(many) != self.count:
            fail(f"{self.count} microbatches", len(many), argument)
        return list(many)

    def _own_kwargs(self, kwargs: Any, dim: int) -> list[dict[str, Any]]:
        if not self._needs.kwargs:
            return [{}] * self.count
        if isinstance(kwargs, Sequence):
            parts = self._listed(kwargs, "kwargs") or []
        else:
            own = {k: v for k, v in (kwargs or {}).items() if k in self._needs.kwargs}
            parts = cut(own, self.count, dim, "kwargs")
        for part in parts:
            missing = self._needs.kwargs - set(part)
            if missing:
                fail(f"{sorted(missing)[0]!r} for a stage", sorted(part), "kwargs")
        return parts


def spread(item: Any) -> tuple[Any, ...]:
    """Return the positional arguments that an item stands for."""
    return tuple(item) if type(item) in (tuple, list) else (item,)
